from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_runs import SLO

from sola_sched.bench.backends import engine as engine_module
from sola_sched.bench.backends.base import RunOutcome, SchedulerSpec, parse_scheduler
from sola_sched.bench.backends.engine import EngineBackend, EngineOptions
from sola_sched.bench.backends.model import TINY_SHAPE, write_model
from sola_sched.bench.backends.probe import SchedulerProbe
from sola_sched.bench.cli import main
from sola_sched.config.slo import SloTarget
from sola_sched.workloads.datasets import ModelLimits
from sola_sched.workloads.workload import RequestSpec, Workload

#: Enough for one request of the tiny model's full length (512 tokens), little more than that.
BLOCK_SIZE, NUM_BLOCKS = 32, 18


class FakeScheduler:
    """Schedules the given numbers of tokens, then none; preempts when told."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        total = self.tokens.pop(0)
        if total > 2:
            self._preempt_request("victim", 0.0)
        per_request = {str(i): 1 for i in range(total)}
        return SimpleNamespace(total_num_scheduled_tokens=total, num_scheduled_tokens=per_request)

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> str:
        return "updated"

    def _preempt_request(self, request: str, timestamp: float) -> None:
        pass


def test_probe_counts_steps_batch_sizes_and_preemptions() -> None:
    scheduler: Any = FakeScheduler(1, 3, 0, 4)
    probe = SchedulerProbe(scheduler)
    scheduler.update_from_output(scheduler.schedule(), None)
    probe.reset()

    for throttle_prefills in (False, True, False):
        output = scheduler.schedule(throttle_prefills)
        assert scheduler.update_from_output(output, None) == "updated"

    stats = probe.stats()
    assert stats.num_steps == len(stats.step_cpu_s) == 2  # the empty step is none
    assert stats.num_preemptions == 2
    assert (stats.max_num_running, stats.mean_num_running) == (4, 3.5)
    assert stats.cpu_s >= sum(stats.step_cpu_s) > 0


class Replays:
    """In place of the replay of requests: what each call ends as, in order."""

    def __init__(self, *outcomes: RunOutcome) -> None:
        self.outcomes = list(outcomes)
        self.cpu_share = 1.0
        self.served: list[list[str]] = []

    def __call__(self, *_: Any) -> Replays:
        return self

    def wall_s(self) -> float:
        return 0.0

    def run(self, requests: Any, *_: Any, **__: Any) -> RunOutcome:
        self.served.append([request.req_id for request in requests])
        return self.outcomes.pop(0)


def served_by(
    replays: Replays, monkeypatch: pytest.MonkeyPatch, told: list[RunOutcome] | None = None
) -> list[RunOutcome]:
    """What a backend with these replays tells of one workload."""
    module = pytest.importorskip("sola_sched.bench.backends.engine_replay")
    monkeypatch.setattr(module, "Replay", replays)
    backend = EngineBackend(EngineOptions("model", num_warmups=2, times_reference=True))
    backend.__dict__["limits"] = ModelLimits(max_model_len=512, vocab_size=100)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=FakeScheduler()))
    engine = SimpleNamespace(engine_core=core, reset_prefix_cache=lambda: None)
    told = [] if told is None else told
    backend._serve(engine, [make_burst(2, 8, 4)], parse_scheduler("stock"), told.append, None, None)
    return told


def ended(*notes: str, is_interrupted: bool = False) -> RunOutcome:
    return RunOutcome([], 1.0, notes=list(notes), interrupted=is_interrupted)


@pytest.mark.vllm
@pytest.mark.parametrize("place", [0, 1])
def test_an_interrupt_in_the_warm_up_or_the_batch_before_ends_all(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    replays = Replays(*(ended(is_interrupted=number == place) for number in range(4)))

    with pytest.raises(KeyboardInterrupt):
        served_by(replays, monkeypatch)

    assert len(replays.served) == place + 1


@pytest.mark.vllm
def test_an_interrupt_in_the_batch_after_a_run_keeps_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replays = Replays(ended(), ended(), ended("a note."), ended(is_interrupted=True))

    told: list[RunOutcome] = []
    with pytest.raises(KeyboardInterrupt):
        served_by(replays, monkeypatch, told)

    (outcome,) = told
    assert not outcome.interrupted
    assert outcome.reference_s == (1.0, 1.0)
    assert outcome.notes == ["a note."]


@pytest.mark.vllm
def test_a_run_is_whole_after_which_the_user_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = EngineBackend(EngineOptions("model"))
    whole = ended("a note.")

    def run_each(_: Any, __: Any, ___: Any, on_run: Any, **____: Any) -> None:
        on_run(whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "run_each", run_each)

    assert backend.run(make_burst(2, 8, 4), parse_scheduler("stock"), SloTarget()) is whole
    assert (whole.ends_all, whole.interrupted) == (True, False)


@pytest.mark.vllm
def test_a_warm_up_that_stalls_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = Replays(ended("2 of 2 requests ended: no token for 9 s."), ended(), ended(), ended())

    (outcome,) = served_by(replays, monkeypatch)

    assert outcome.notes == ["The warm-up was cut short: 2 of 2 requests ended: no token for 9 s."]
    assert replays.served[0] == ["warmup-0", "warmup-1"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bench") / "tiny", TINY_SHAPE)


def make_backend(model: Path, **engine_args: Any) -> EngineBackend:
    values = {"enforce_eager": True, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 16}
    return EngineBackend(
        EngineOptions(
            str(model), is_random_model=True, engine_args=values | engine_args, num_warmups=2
        )
    )


def make_burst(num_requests: int, prompt_tokens: int, output_tokens: int) -> Workload:
    return Workload(
        tuple(
            RequestSpec(str(i), tuple(range(3 + i, 3 + i + prompt_tokens)), output_tokens)
            for i in range(num_requests)
        )
    )


@pytest.mark.vllm
def test_every_request_gets_its_exact_length_and_ordered_times(tiny_model: Path) -> None:
    backend = make_backend(tiny_model)
    workload = make_burst(12, prompt_tokens=40, output_tokens=9).at_rate(200.0, seed=1)
    finished: list[str] = []

    outcome = backend.run(
        workload, parse_scheduler("stock:64"), SLO, on_done=lambda r: finished.append(r.req_id)
    )

    assert [r.num_output_tokens for r in outcome.records] == [9] * 12
    assert all(r.completed and not r.error for r in outcome.records)
    assert all(r.token_times_s == sorted(r.token_times_s) for r in outcome.records)
    assert all(r.token_times_s[0] > (r.sent_s or 0) >= r.arrival_s for r in outcome.records)
    assert sorted(finished) == sorted(r.req_id for r in outcome.records)
    assert outcome.scheduler is not None
    assert outcome.scheduler.num_steps >= 9  # the prompts alone need 480 / 64 steps
    assert backend.limits.max_model_len == TINY_SHAPE.max_model_len
    assert backend.limits.vocab_size == TINY_SHAPE.vocab_size


@pytest.mark.vllm
def test_an_equal_batch_is_timed_before_and_after_a_run_and_counts_into_nothing(
    tiny_model: Path,
) -> None:
    backend = make_backend(tiny_model)
    backend.options = replace(backend.options, times_reference=True)

    outcome = backend.run(make_burst(3, 20, output_tokens=4), parse_scheduler("sola"), SLO)

    assert len(outcome.reference_s) == 2
    assert min(outcome.reference_s) > 0
    assert outcome.scheduler is not None
    assert outcome.scheduler.num_steps < 40  # the batch alone has more
    assert [r.num_output_tokens for r in outcome.records] == [4] * 3


@pytest.mark.vllm
def test_one_engine_serves_several_workloads_each_with_its_own_figures(tiny_model: Path) -> None:
    backend = make_backend(tiny_model, enable_prefix_caching=True)
    engines: set[int] = set()
    hits: list[int] = []
    outcomes: list[RunOutcome] = []

    def watched(engine: Any, scheduler: Any, clock: Any) -> Any:
        engines.add(id(engine))
        manager = scheduler.kv_cache_manager
        look_up = manager.get_computed_blocks

        def counted(request: Any) -> Any:
            found = look_up(request)
            hits.append(found[1])
            return found

        manager.get_computed_blocks = counted
        return engine

    backend._watched = watched  # type: ignore[method-assign]
    same = make_burst(3, prompt_tokens=200, output_tokens=6)
    more = make_burst(5, prompt_tokens=200, output_tokens=3)

    backend.run_each([same, same, more], parse_scheduler("sola"), SLO, outcomes.append)

    assert len(engines) == 1
    assert [[r.num_output_tokens for r in o.records] for o in outcomes] == [
        [6] * 3, [6] * 3, [3] * 5,
    ]  # fmt: skip
    assert all(o.scheduler is not None and o.scheduler.num_steps < 12 for o in outcomes)
    assert len(hits) >= 11
    # The same prompts came twice, and the engine had forgotten them.
    assert set(hits) == {0}


@pytest.mark.vllm
def test_nothing_holds_an_engine_when_its_memory_is_given_back(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the next engine would find its memory taken: what is held cannot be given back."""
    held: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    # Compiled, but to the same Python: torch.compile holds what it has seen.
    backend = make_backend(
        tiny_model, enforce_eager=False, compilation_config={"mode": 3, "backend": "eager"}
    )

    def watched(engine: Any, scheduler: Any, clock: Any) -> Any:
        weights = engine.apply_model(lambda model: [*map(weakref.ref, model.parameters())])[0]
        held.extend([weakref.ref(engine), *weights])
        return engine

    def release() -> None:
        gc.collect()
        alive.extend(each() is not None for each in held)

    monkeypatch.setattr(backend, "_watched", watched)
    monkeypatch.setattr(engine_module, "_release_memory", release)
    backend.run(make_burst(2, 20, output_tokens=2), parse_scheduler("stock"), SLO)

    assert len(alive) > 10
    assert not any(alive)


def test_held_requests_wait_at_the_client_and_refused_ones_are_reported(tiny_model: Path) -> None:
    burst = make_burst(4, prompt_tokens=8, output_tokens=5)
    too_long = RequestSpec("too-long", tuple(range(3, 503)), output_tokens=100)
    workload = Workload((*burst.requests, too_long))

    outcome = make_backend(tiny_model).run(
        workload, SchedulerSpec("stock", "stock"), SloTarget(), max_concurrency=1
    )

    *served, refused = outcome.records
    for earlier, later in itertools.pairwise(served):
        assert (later.sent_s or 0) >= earlier.token_times_s[-1]
        assert later.ttft_s > earlier.ttft_s  # the wait counts
    assert not refused.completed
    assert refused.error


@pytest.mark.vllm
def test_preemptions_are_counted_when_memory_is_short(tiny_model: Path) -> None:
    backend = make_backend(
        tiny_model,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        enable_prefix_caching=False,
    )

    outcome = backend.run(
        make_burst(8, prompt_tokens=60, output_tokens=60), parse_scheduler("stock"), SloTarget()
    )

    assert all(r.completed for r in outcome.records)
    assert outcome.scheduler is not None
    assert outcome.scheduler.num_preemptions > 0


@pytest.mark.vllm
def test_command_line_compares_stock_with_ours(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["--model", str(tiny_model), "--load-format", "dummy", "--schedulers", "stock:128", "sola",
         "--dataset-name", "random", "--random-input-len", "50", "--random-output-len", "8",
         "--num-prompts", "8", "--request-rate", "100", "--slo", "ttft:5000", "tpot:1000",
         "--slo-class", "chat:1:4000:900", "--result-dir", str(tmp_path), "--disable-tqdm",
         "--engine-args", '{"kv_cache_memory_bytes": 8388608, "max_num_seqs": 16}']
    )  # fmt: skip

    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count("100.0 %") == 2
    assert "sola / stock:128" in out
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert len(list(tmp_path.glob("*.png"))) == 2


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "no/such-folder-or-model"], "vLLM must accept '--model"),
        (["--engine-args", '{"max_num_seq": 3}'], "must be names vLLM knows"),
    ],
)
def test_model_errors_end_with_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert main([*argv, "--schedulers", "stock"]) == 2
    assert message in capsys.readouterr().err
