"""`sola_sched.Scheduler` around a real vLLM scheduler, in virtual time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from virtual_runs import attained, make_small_engine, make_workload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import sola_sched
from sola_sched.simulator import (
    StepTrace,
    VirtualEngine,
    VirtualRequest,
)
from sola_sched.vllm_adapter.versions import Seams

pytestmark = pytest.mark.vllm


def make_engine(
    scheduler_cls: type[Any] = sola_sched.Scheduler, sola: dict[str, Any] | None = None, **options
) -> VirtualEngine:
    ours = None if scheduler_cls is AsyncScheduler else sola or {}
    return make_small_engine(scheduler_cls, ours, **options)


def test_without_asynchronous_scheduling_tokens_are_booked_as_by_vllms_synchronous_class() -> None:
    names = ("_update_after_schedule", "_update_request_with_output")

    def booked_by(**options: Any) -> list[Any]:
        scheduler = make_engine(**options).scheduler
        return [getattr(scheduler, name).__func__ for name in names]

    assert booked_by(async_scheduling=False) == [getattr(Scheduler, name) for name in names]
    assert booked_by(async_scheduling=True) == [getattr(AsyncScheduler, name) for name in names]


def test_what_a_class_of_another_author_overrides_stays_without_asynchronous_scheduling() -> None:
    class Theirs(sola_sched.Scheduler):
        def _update_after_schedule(self, output: Any) -> None:
            super()._update_after_schedule(output)

    scheduler = make_engine(Theirs, async_scheduling=False).scheduler

    assert scheduler._update_after_schedule.__func__ is Theirs._update_after_schedule


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("policy", ["attain", "paper"])
@pytest.mark.parametrize("num_blocks", [2000, 140])
def test_without_slos_the_schedule_is_stock_vllms_step_by_step(
    async_scheduling: bool, policy: str, num_blocks: int
) -> None:
    def schedules(scheduler_cls: type[Any], sola: dict[str, Any] | None) -> list[Any]:
        steps: list[Any] = []

        def note(trace: StepTrace) -> None:
            steps.append((trace.start_s, dict(trace.output.num_scheduled_tokens)))

        engine = make_engine(
            scheduler_cls, sola, async_scheduling=async_scheduling, num_blocks=num_blocks
        )
        engine.run(make_workload(80, 12.0), on_step=note)
        return steps

    stock = schedules(AsyncScheduler, None)
    ours = schedules(sola_sched.Scheduler, {"policy": policy, "ttft_s": None, "tpot_s": None})
    assert ours == stock


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_past_saturation_more_requests_meet_their_slos_than_with_any_stock_chunk(
    async_scheduling: bool,
) -> None:
    workload = make_workload(300, 25.0)
    stock = max(
        attained(
            make_engine(
                AsyncScheduler, max_num_batched_tokens=chunk, async_scheduling=async_scheduling
            ).run(workload),
            0.5,
            0.03,
        )
        for chunk in (128, 256, 1024)
    )
    engine = make_engine(sola={"ttft_s": 0.5, "tpot_s": 0.03}, async_scheduling=async_scheduling)
    ours = attained(engine.run(workload), 0.5, 0.03)
    assert ours > 1.5 * stock, f"ours {ours:.3f}, best stock {stock:.3f}"


def test_a_higher_priority_class_gets_a_slot_when_all_are_taken() -> None:
    low = [
        VirtualRequest(f"low{i}", arrival_s=0.0, prompt_len=50, output_len=400, priority=5)
        for i in range(4)
    ]
    high = VirtualRequest("high", arrival_s=1.0, prompt_len=50, output_len=20, priority=0)
    options = {"max_num_seqs": 4, "scheduling_policy": "priority"}
    stock = {r.req_id: r for r in make_engine(AsyncScheduler, **options).run([*low, high])}
    ours = {r.req_id: r for r in make_engine(**options).run([*low, high])}
    assert stock["high"].first_token_s > 4.0  # waits for a low one to end
    assert ours["high"].first_token_s < 1.1
    assert sum(r.num_preemptions for r in ours.values()) == 1
    assert all(r.num_output_tokens == 400 for name, r in ours.items() if name != "high")


def test_held_requests_never_keep_others_out_of_free_slots() -> None:
    """vLLM #53130: deferred requests must not count against admission for good."""
    sola = {"ttft_s": 0.05, "tpot_s": 0.011, "best_effort_share": 0.02}
    engine = make_engine(sola=sola, max_num_seqs=8)
    records = engine.run(make_workload(120, 40.0))
    assert all(r.is_finished for r in records)
    assert engine.scheduler.sola_stats()["num_held"] > 0


def test_a_rejected_request_is_answered_with_an_error_and_the_rest_is_served() -> None:
    engine = make_engine(sola={"ttft_s": 0.3, "tpot_s": 0.05, "overload": "reject"})
    records = engine.run(make_workload(200, 60.0))
    reasons = {r.finish_reason for r in records}
    assert reasons == {"stop", "error"}
    stats = engine.scheduler.sola_stats()
    assert stats["num_rejected"] == sum(r.finish_reason == "error" for r in records)
    assert stats["attainment"] == pytest.approx(attained(records, 0.3, 0.05), abs=0.001)
    assert (stats["num_aborted"], stats["num_failed"]) == (0, 0)
    assert all(r.num_output_tokens == 0 for r in records if r.finish_reason == "error")
    assert engine.num_free_blocks == 1999


def test_ends_are_counted_for_each_class_of_the_options() -> None:
    sola = {"ttft_s": 1.0, "tpot_s": 0.05, "classes": {"strict": {"ttft_s": 1e-3}}}
    engine = make_engine(sola=sola)
    served = make_workload(6, 1.0)
    strict = dataclasses.replace(served[0], extra_args={"slo_class": "strict"})
    unknown = dataclasses.replace(served[1], extra_args={"slo_class": "nobody"})
    aborted = dataclasses.replace(served[2], output_len=200, abort_s=served[2].arrival_s + 0.3)
    engine.run([strict, unknown, aborted, *served[3:]])
    assert engine.scheduler.sola_stats()["by_class"] == {
        "default": {"attained": 4, "missed": 0, "rejected": 0, "aborted": 1},
        "strict": {"attained": 0, "missed": 1, "rejected": 0, "aborted": 0},
    }


def test_the_log_tells_of_each_burst_by_itself_and_of_the_first_and_the_last(
    monkeypatch: Any,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "sola_sched.vllm_adapter.scheduler.logger.info",
        lambda text, *args: lines.append(text % args),
    )
    burst = [VirtualRequest(f"a{i}", 0.1 * i, 20, prompt_len=50) for i in range(30)]
    others = [dataclasses.replace(r, req_id=f"b{r.req_id}", arrival_s=1e3) for r in burst[:5]]
    engine = make_engine(sola={"ttft_s": 1.0, "tpot_s": 0.05, "log_interval_s": 2.0})
    engine.run([*burst, *others])
    finished = [int(line.split("s: ")[1].split()[0]) for line in lines if " finished, " in line]
    assert len(finished) == 3  # after two seconds, before idling, before idling
    assert sum(finished[:2]) == 30
    assert finished[2] == 5
    assert "attained 100.0%" in lines[-1]
    assert engine.scheduler.sola_stats()["num_finished"] == 35


@pytest.mark.parametrize(("num_blocks", "is_told"), [(2000, True), (250, False)])
def test_an_operator_is_told_that_slots_alone_are_short(num_blocks: int, is_told: bool) -> None:
    sola = {"ttft_s": 5.0, "tpot_s": 0.2}
    engine = make_engine(sola=sola, max_num_seqs=8, num_blocks=num_blocks)
    engine.run(make_workload(200, 40.0))
    assert (engine.scheduler.sola_stats()["short_of_slots"] > 0.5) == is_told


def test_prefix_cache_hits_do_not_slow_admission() -> None:
    """The plan counts whole prompts; hits leave budget, which others behind get at once."""
    prompt = list(range(10, 1010))
    requests = [
        VirtualRequest(
            f"hit{i}", 0.5 * (i > 0), output_len=20, prompt_token_ids=[*prompt, 5, i + 6]
        )
        for i in range(12)
    ]
    engine = make_engine(
        sola={"ttft_s": 1.0, "tpot_s": 0.05}, enable_prefix_caching=True, num_blocks=4000
    )
    warm = make_workload(30, 20.0)
    engine.run(warm)
    start = engine.clock.now
    records = engine.run([dataclasses.replace(r, arrival_s=start + r.arrival_s) for r in requests])
    late = [r for r in records if r.arrival_s > start]
    assert max(r.first_token_s - r.arrival_s for r in late if r.first_token_s) < 0.1


def test_bad_options_stop_the_engine_at_start() -> None:
    with pytest.raises(ValueError, match=r"Unknown option 'polcy'.*known options"):
        make_engine(sola={"polcy": "paper"})


def shared_prefix(count: int, rate_per_s: float) -> list[VirtualRequest]:
    prefix = [1 + i % 500 for i in range(1600)]
    return [
        VirtualRequest(
            f"shared{i}", i / rate_per_s, 20, prompt_token_ids=[*prefix, 2 + i], max_tokens=90
        )
        for i in range(count)
    ]


def test_a_waiting_request_counts_without_what_the_prefix_cache_holds() -> None:
    engine = make_engine(enable_prefix_caching=True, max_num_seqs=1)
    table = engine.scheduler.sola_monitor.table
    seen = []

    def note(step: StepTrace) -> None:
        if "shared1" in table.row_of and "shared1" not in step.output.num_scheduled_tokens:
            seen.append(int(table.num_computed[table.row_of["shared1"]]))

    engine.run(shared_prefix(2, rate_per_s=100.0), on_step=note)
    assert seen[0] == 1024  # at its arrival: the first chunk of the other one
    assert seen[-1] == 1600  # looked up again


def test_a_prompt_longer_than_its_target_is_not_lost_if_it_is_cached(monkeypatch: Any) -> None:
    # 1,601 tokens take 170 ms, the last one alone 10 ms; the target is 100 ms.
    shared = shared_prefix(40, rate_per_s=4.0)
    requests = [*shared, *make_workload(250, rate_per_s=25.0)]
    options = {"sola": {"ttft_s": 0.1, "tpot_s": 0.05}, "enable_prefix_caching": True}

    def share_attained() -> float:
        return attained(make_engine(**options).run(requests)[: len(shared)], 0.1, 0.05)

    known = share_attained()
    monkeypatch.setattr(Seams, "caches_prefixes", False)
    assert known > share_attained() + 0.2


@pytest.mark.injects_failures
def test_a_log_line_that_fails_is_tried_again_an_interval_later_and_no_sooner() -> None:
    engine = make_engine(sola={"ttft_s": 1.0, "tpot_s": 0.05, "log_interval_s": 2.0})
    asked: list[float] = []

    def fail() -> dict[str, Any]:
        asked.append(engine.clock.now)
        raise RuntimeError("no figures today")

    engine.scheduler.sola_stats = fail
    records = engine.run(make_workload(120, 20.0))  # it idles at the end only
    assert all(r.is_finished for r in records)
    assert len(asked) >= 3
    gaps = np.diff(asked)[:-1]
    assert np.all(gaps >= 2.0)
