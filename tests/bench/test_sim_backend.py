"""`--backend sim`: real schedulers in virtual time, exactly repeatable."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm")

from tiny_sim import SLO, SMALL, TINY, busy_workload, make_backend, make_workload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from sola_sched.bench.backends.base import BASELINES, RunOutcome, parse_scheduler
from sola_sched.bench.backends.simulation import SimBackend, SimOptions
from sola_sched.bench.backends.virtual_replay import VirtualReplay
from sola_sched.bench.cli import main
from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import RequestRecord
from sola_sched.errors import ConfigError
from sola_sched.workloads.datasets import DatasetOptions, build
from sola_sched.workloads.workload import RequestSpec, Workload

pytestmark = pytest.mark.vllm


class Watching(AsyncScheduler):
    """Keeps the output limit of every request it is given."""

    limits: ClassVar[dict[str, int]] = {}

    def add_request(self, request: Request) -> None:
        self.limits[request.request_id] = request.max_tokens
        super().add_request(request)


class Stuck(AsyncScheduler):
    """Schedules nothing any more once it has seen request 1."""

    last = "1"

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.last in self.requests:
            self.max_num_scheduled_tokens = 0
        return super().schedule(*args, **kwargs)


class StuckAtOnce(Stuck):
    """The same in the warm-up."""

    last = "warmup-1"


def facts(outcome: RunOutcome) -> Any:
    """All that must repeat: everything but the scheduler's CPU time."""
    stats = outcome.scheduler
    assert stats is not None
    counts = (stats.num_steps, stats.num_preemptions, stats.max_num_running)
    return outcome.records, outcome.duration_s, outcome.notes, counts


def test_two_requests_take_the_time_worked_out_by_hand() -> None:
    workload = make_workload((0.0, 64, 3), (0.5, 32, 1))

    outcome = make_backend(async_scheduling=False).run(workload, parse_scheduler("stock"), SLO)

    # Prefill of 64: 1 + 0.5. Decode with a prefill of 32: 1 + 0.125 + 0.25. Decode: 1 + 0.125.
    first, second = outcome.records
    assert first.token_times_s == [1.5, 2.875, 4.0]
    assert second.token_times_s == [2.875]
    assert (first.completed, second.completed, outcome.clock) == (True, True, "virtual")
    assert outcome.duration_s == 4.0
    assert outcome.scheduler is not None
    assert outcome.scheduler.num_steps == 3
    assert outcome.scheduler.cpu_s > 0.0


def test_a_turn_comes_after_the_answer_before_it_and_pays_for_what_is_not_cached() -> None:
    (first,) = make_workload((0.0, 64, 3)).requests
    turn = RequestSpec("turn", (*first.prompt_token_ids, *range(300, 332)), 1, 2.0, after="0")
    backend = make_backend(async_scheduling=False, enable_prefix_caching=True)

    outcome = backend.run(Workload((first, turn)), parse_scheduler("stock"), SLO)

    # Prefill of 64: 1 + 0.5, twice 1 + 0.125, a pause of 2, and a prefill of the 32 new tokens.
    assert outcome.records[0].token_times_s == [1.5, 2.625, 3.75]
    assert outcome.records[1].arrival_s == 5.75
    assert outcome.records[1].token_times_s == [5.75 + 1.25]
    assert outcome.duration_s == 7.0


@pytest.mark.parametrize("max_concurrency", [None, 1])
def test_turns_are_all_answered_in_their_order(max_concurrency: int | None) -> None:
    opening = busy_workload(6).requests
    turns = [
        replace(r, req_id=f"{r.req_id}.{i}", arrival_s=3.0 - i,
                after=f"{r.req_id}.{i - 1}" if i else r.req_id)
        for r in opening for i in range(3)
    ]  # fmt: skip
    workload = Workload((*turns, *opening))

    outcome = make_backend().run(
        workload, parse_scheduler("sola"), SLO, max_concurrency=max_concurrency
    )

    assert all(record.completed for record in outcome.records)
    records = {record.req_id: record for record in outcome.records}
    for turn in turns:
        end_s = records[str(turn.after)].token_times_s[-1]
        assert records[turn.req_id].arrival_s == pytest.approx(end_s + turn.arrival_s)


def test_turns_whose_answer_never_comes_end_with_the_run() -> None:
    workload = busy_workload(3)
    turn = replace(workload.requests[2], req_id="turn", after="1")
    spec = parse_scheduler(f"stock:engine.scheduler_cls={__name__}:Stuck")

    backend = SimBackend(SimOptions(TINY, SMALL, num_warmups=2, stall_timeout_s=0.5))
    outcome = backend.run(replace(workload, requests=(*workload.requests, turn)), spec, SLO)

    assert not outcome.records[3].completed
    assert outcome.records[3].error


def test_asynchronous_scheduling_is_the_default() -> None:
    workload = make_workload((0.0, 64, 3), (0.5, 32, 1))

    outcome = make_backend().run(workload, parse_scheduler("stock"), SLO)

    # The second step is scheduled when the first starts, before the second request arrives.
    assert outcome.records[0].token_times_s == [1.5, 2.625, 4.0]
    assert outcome.records[1].token_times_s == [4.0]


@pytest.mark.parametrize("scheduler", ["stock:128", "sola", "sola:policy=paper"])
def test_same_arguments_give_the_same_result_to_the_last_digit(scheduler: str) -> None:
    backend = make_backend(num_gpu_blocks_override=40)
    spec = parse_scheduler(scheduler)

    first = backend.run(busy_workload(), spec, SLO)
    second = make_backend(num_gpu_blocks_override=40).run(busy_workload(), spec, SLO)

    assert facts(first) == facts(second)
    assert all(record.completed for record in first.records)


@pytest.mark.slow
@pytest.mark.long
def test_another_process_gives_the_same_result(tmp_path: Path) -> None:
    def argv(name: str) -> list[str]:
        return ["--backend", "sim", "--schedulers", "stock:512", "sola", "--num-prompts", "40",
                "--request-rate", "3", "--slo", "ttft:800", "tpot:60", "--disable-tqdm",
                "--engine-args", '{"enable_prefix_caching": true}', "--save-detailed",
                "--result-filename", f"{name}.json", "--result-dir", str(tmp_path)]  # fmt: skip

    done = subprocess.run(
        [sys.executable, "-P", "-m", "sola_sched.bench", *argv("other")],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert main(argv("own")) == 0

    results = {}
    for name in ("own", "other"):
        lines = (tmp_path / f"{name}.json").read_text().splitlines()
        results[name] = [json.loads(line) for line in lines]
        for run in results[name]:
            del run["date"]
            for key in [key for key in run["scheduler"] if "cpu" in key]:
                del run["scheduler"][key]
    assert results["own"] == results["other"]
    assert [run["clock"] for run in results["own"]] == ["virtual", "virtual"]


def test_scheduler_cannot_read_the_output_length_off_its_limit() -> None:
    workload = make_workload((0.0, 10, 3), (0.0, 10, 90), (0.0, 480, 5))
    spec = parse_scheduler(f"stock:engine.scheduler_cls={__name__}:Watching")

    outcome = make_backend().run(workload, spec, SLO)

    assert [Watching.limits[name] for name in "012"] == [90, 90, 32]  # 512 - 480 are left
    assert [record.num_output_tokens for record in outcome.records] == [3, 90, 5]
    assert all(record.completed for record in outcome.records)


def test_concurrency_limit_holds_requests_at_the_client() -> None:
    workload = make_workload((0.0, 64, 2), (0.0, 64, 2), (9.0, 64, 1))

    outcome = make_backend(async_scheduling=False).run(
        workload, parse_scheduler("stock"), SLO, max_concurrency=1
    )

    # 1.5 s of prefill and 1.125 s of decode each; the second waits, the third does not have to.
    assert [record.sent_s for record in outcome.records] == [0.0, 2.625, 9.0]
    assert [record.token_times_s[0] for record in outcome.records] == [1.5, 4.125, 10.5]
    assert outcome.records[1].ttft_s == 4.125
    assert outcome.scheduler is not None
    assert outcome.scheduler.max_num_running == 1


def test_each_request_is_reported_once_when_it_ends() -> None:
    done: list[RequestRecord] = []
    workload = make_workload((0.0, 64, 9), (0.0, 64, 2))

    outcome = make_backend().run(workload, parse_scheduler("stock"), SLO, on_done=done.append)

    assert [record.req_id for record in done] == ["1", "0"]
    assert {id(record) for record in done} == {id(record) for record in outcome.records}


def test_recorded_prefixes_are_hit_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 60000, "input_length": 1300, "output_length": 1, "hash_ids": [1, 2, 4]},
        {"timestamp": 120000, "input_length": 1200, "output_length": 1, "hash_ids": [5, 6, 7]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    profile = replace(TINY, max_model_len=2048)
    options = DatasetOptions("mooncake", path, num_prompts=3, self_timed=True, length_scale=1.0)

    def ttfts_s(caching: bool) -> list[float]:
        backend = make_backend(profile, enable_prefix_caching=caching, max_num_batched_tokens=2048)
        workload = build(options, backend.limits)
        return [r.ttft_s for r in backend.run(workload, parse_scheduler("stock"), SLO).records]

    # 1024 tokens are shared: the second request computes 276 of 1300.
    assert ttfts_s(False) == pytest.approx([1 + 1200 / 128, 1 + 1300 / 128, 1 + 1200 / 128])
    assert ttfts_s(True) == pytest.approx([1 + 1200 / 128, 1 + 276 / 128, 1 + 1200 / 128])


def test_lengths_without_text_are_a_custom_data_set(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("prompt_tokens,output_tokens\n100,20\n300,5\n")

    workload = build(
        DatasetOptions("custom", path, num_prompts=2, shuffle=False), make_backend().limits
    )

    lengths = [(len(r.prompt_token_ids), r.output_tokens) for r in workload.requests]
    assert lengths == [(100, 20), (300, 5)]
    assert workload.notes == ()


def test_own_targets_and_rejection_reach_the_scheduler() -> None:
    hopeless = SloTarget(ttft_s=0.001, tpot_s=0.001)
    workload = busy_workload(30)
    requests = tuple(
        replace(request, slo=hopeless) if i % 3 == 2 else request
        for i, request in enumerate(workload.requests)
    )

    # Enough warm-up that the cost model is known at the start.
    backend = SimBackend(SimOptions(TINY, SMALL, num_warmups=30))
    outcome = backend.run(
        replace(workload, requests=requests), parse_scheduler("sola:overload=reject"), SLO
    )

    refused = [record for record in outcome.records if record.slo == hopeless]
    assert len(refused) == 10
    assert all(record.error.startswith("ended (error) after 0 of ") for record in refused)
    assert any(record.completed for record in outcome.records)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_of_the_simulator_run_by_name(name: str) -> None:
    baselines = pytest.importorskip("sola_sched.simulator.baselines.rules")

    outcome = make_backend().run(busy_workload(20), parse_scheduler(name), SLO)

    assert set(baselines.BASELINES) == set(BASELINES)
    assert outcome.scheduler is not None
    assert outcome.scheduler.num_steps > 0
    assert name == "reject" or all(record.completed for record in outcome.records)


def test_stalled_scheduler_ends_the_run_with_a_note() -> None:
    spec = parse_scheduler(f"stock:engine.scheduler_cls={__name__}:Stuck")
    backend = SimBackend(SimOptions(TINY, SMALL, num_warmups=0, stall_timeout_s=0.5))

    outcome = backend.run(make_workload((0.0, 10, 1), (5.0, 10, 1)), spec, SLO)

    assert [record.completed for record in outcome.records] == [True, False]
    assert outcome.notes[0].startswith("1 of 2 requests ended: the scheduler must deliver")


def test_a_scheduler_that_stalls_in_the_warm_up_is_named() -> None:
    spec = parse_scheduler(f"stock:engine.scheduler_cls={__name__}:StuckAtOnce")
    backend = SimBackend(SimOptions(TINY, SMALL, num_warmups=2, stall_timeout_s=0.5))

    with pytest.raises(ConfigError, match=r"must serve the 2 requests of the warm-up \(the sched"):
        backend.run(make_workload((0.0, 10, 1), (5.0, 10, 1)), spec, SLO)


def test_interrupted_run_keeps_what_it_has() -> None:
    def interrupt(record: RequestRecord) -> None:
        raise KeyboardInterrupt

    outcome = make_backend().run(
        make_workload((0.0, 10, 1), (0.0, 10, 9)), parse_scheduler("stock"), SLO, on_done=interrupt
    )

    assert outcome.interrupted
    assert [record.completed for record in outcome.records] == [True, False]
    assert outcome.records[1].error == "interrupted by the user"


def test_classes_reach_the_scheduler_with_their_targets_and_weights() -> None:
    job = SloTarget(e2e_s=60.0, weight=2.0)
    workload = make_workload((0.0, 64, 3), (0.0, 64, 3))
    first = replace(workload.requests[0], slo=job, slo_class="job")
    workload = replace(workload, requests=(first, *workload.requests[1:]))
    seen: dict[str, SloTarget] = {}
    engine = make_backend()._engine(parse_scheduler("sola"), SLO, workload)
    replay = VirtualReplay(engine, None, None, tells_lengths=False)

    def look(_: Any) -> None:
        table = engine.scheduler.sola_monitor.table
        for name, row in table.row_of.items():
            columns = (table.ttft_s, table.tpot_s, table.e2e_s, table.weight)
            seen[name] = SloTarget(*(float(column[row]) for column in columns))

    replay.start(workload.requests, on_done=None)
    engine.run(on_step=look, on_finish=replay.ended)
    assert seen == {"0": job, "1": SLO}
    assert engine.scheduler.sola_stats()["by_class"]["job"]["attained"] == 1


def test_priorities_order_stock_where_it_reads_them() -> None:
    """One slot: the last to come is the most urgent."""
    workload = make_workload((0.0, 64, 8), (0.001, 64, 8), (0.001, 64, 8))
    ranked = tuple(replace(r, priority=-i) for i, r in enumerate(workload.requests))
    workload = replace(workload, requests=ranked)

    def order(policy: str) -> list[str]:
        done: list[str] = []
        args = f"engine.max_num_seqs=1,engine.scheduling_policy={policy}"
        spec = parse_scheduler(f"stock:{args}")
        make_backend().run(workload, spec, SLO, on_done=lambda r: done.append(r.req_id))
        return done[-3:]

    assert order("fcfs") == ["0", "1", "2"]
    assert order("priority") == ["0", "2", "1"]


def test_warm_up_shares_no_prefix_with_the_workload() -> None:
    backend = make_backend()
    workload = make_workload((0.0, 64, 3), (0.5, 32, 1))

    warmup = backend._warmup(workload)

    assert [len(request.prompt_token_ids) for request in warmup] == [64, 32]
    prompts = {request.prompt_token_ids for request in workload.requests}
    assert prompts.isdisjoint(request.prompt_token_ids for request in warmup)


def test_predictions_arrive_with_their_requests_and_decide_who_is_first() -> None:
    """One slot: the short request goes first only if its length is known."""
    workload = make_workload((0.0, 64, 8), (1.0, 64, 60), (2.0, 64, 4))

    def order(scheduler: str) -> list[str]:
        done: list[str] = []
        spec = parse_scheduler(f"{scheduler},engine.max_num_seqs=1")
        make_backend().run(workload, spec, SLO, on_done=lambda r: done.append(r.req_id))
        return done[-3:]

    assert order("sola:policy=alise,sim.predictor=oracle") == ["0", "2", "1"]
    assert order("sola:policy=alise,sim.predictor=none") == ["0", "1", "2"]


def test_predictor_process_is_refused_in_virtual_time() -> None:
    with pytest.raises(ConfigError, match="'predictor' must be 'histogram' in virtual time"):
        make_backend().check(parse_scheduler("sola:predictor=lexical"))
