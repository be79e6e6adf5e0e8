"""Whatever fails in this package, the engine goes on: the real scheduler in virtual time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from marks import MODES

pytest.importorskip("vllm")

from faults import SITES, EndlessAnswers, Faults
from virtual_model import TINY_MODEL
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import PriorityRequestQueue

import sola_sched
from sola_sched.core.state import PREFILL, StepPlan
from sola_sched.planner.attain import AttainPlanner
from sola_sched.simulator import RequestRecord, StepTimeModel, VirtualEngine, VirtualRequest

pytestmark = [pytest.mark.vllm, pytest.mark.injects_failures]

STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)
NUM_BLOCKS = 260
#: Sites that a policy other than the default is needed for.
POLICY_OF = {"paper": "paper", "alise": "alise", "doubling": "doubling"}
#: Sites that are reached only after another failure.
AFTER = ("monitor rebuild", "predictor forget_but", "queue iter")
#: Sites where priority classes compete for slots, and where requests are refused.
DISPLACING = ("is ending", "may preempt", "preempt", "queue prepend")
REFUSING = ("answer", "queue contains", "reject")
#: Sites that are reached only where plans are not followed.
UNSTEERED = ("part skipped",)
#: Share of the calls that fail, where they are rarer or more frequent than one in a step.
SHARE_OF = {
    "answer": 0.5,
    "cost renew": 0.9,
    "hold": 0.9,
    "is ending": 0.5,
    "may preempt": 0.5,
    "monitor finished": 0.1,
    "monitor rebuild": 0.5,
    "monitor requeued": 0.5,
    "monitor unplanned": 0.5,
    "predictor forget_but": 0.5,
    "preempt": 0.9,
    "queue contains": 0.5,
    "queue iter": 0.5,
    "queue prepend": 0.5,
    "queue remove": 0.5,
    "reject": 0.5,
    "statistics": 0.5,
    "waits": 1.0,
}
#: Sites with a few calls in a run: none is left alone.
RARE = (
    "cost renew",
    "hold",
    "is ending",
    "may preempt",
    "monitor rebuild",
    "monitor unplanned",
    "predictor forget_but",
    "preempt",
    "queue contains",
    "queue iter",
    "queue prepend",
    "queue remove",
    "waits",
)


def make_engine(sola: dict[str, Any] | None = None, **options: Any) -> VirtualEngine:
    defaults: dict[str, Any] = {
        "model": TINY_MODEL,
        "num_blocks": NUM_BLOCKS,
        "max_model_len": 2048,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 512,
        "step_time": STEP_TIME,
    }
    if "scheduler_cls" not in options:
        options["scheduler_cls"] = sola_sched.Scheduler
        options["additional_config"] = {
            "sola_sched": {"ttft_s": 0.5, "tpot_s": 0.03, **(sola or {})}
        }
    return VirtualEngine(options.pop("scheduler_cls"), **(defaults | options))


def make_workload(count: int = 80, rate_per_s: float = 20.0, seed: int = 0) -> list[VirtualRequest]:
    """Past saturation, with preemptions, aborts and two classes of priority."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        VirtualRequest(
            f"r{i}",
            arrival_s=float(arrival),
            prompt_len=int(rng.integers(50, 500)),
            output_len=int(rng.integers(2, 120)),
            max_tokens=1000,
            priority=int(rng.integers(0, 2)),
            abort_s=float(arrival) + 1.0 if i % 9 == 8 else None,
        )
        for i, arrival in enumerate(arrivals)
    ]


def assert_nothing_is_lost(engine: VirtualEngine, records: list[RequestRecord]) -> None:
    wanted = {r.req_id: r.output_len for r in make_workload()}
    for record in records:
        assert record.finish_reason in ("stop", "abort", "error"), record
        if record.finish_reason == "stop":
            assert record.num_output_tokens == min(1000, wanted[record.req_id]), record
    assert engine.num_free_blocks == NUM_BLOCKS - 1
    assert not engine.scheduler.requests


@pytest.mark.parametrize("async_scheduling", MODES)
@pytest.mark.parametrize("site", sorted(SITES))
def test_a_failure_at_any_call_loses_no_request_and_no_block(
    site: str, async_scheduling: bool
) -> None:
    sola = {
        "policy": POLICY_OF.get(site, "attain"),
        "overload": "reject" if site in REFUSING else "defer",
        "log_interval_s": 0.5,
        "steer": site not in UNSTEERED,
    }
    num_slots = 8 if site in DISPLACING else 24
    engine = make_engine(
        sola,
        async_scheduling=async_scheduling,
        scheduling_policy="priority",
        max_num_seqs=num_slots,
        enable_prefix_caching=site == "monitor expect_cached",
    )
    sites = (site, "attain") if site in AFTER else (site,)
    share = SHARE_OF.get(site, 0.05)
    if site.startswith("predictor") or site == "monitor predicted":
        engine.scheduler.sola_predictions = EndlessAnswers(engine.scheduler)
    first = 0 if site in RARE else 3
    with Faults(*sites, share=share, first=first).injected() as faults:
        records = engine.run(make_workload())
    assert faults.num_raised[site]
    assert sum(engine.scheduler.sola_guard.num_failures.values()) >= faults.num_raised[site] / 2
    assert_nothing_is_lost(engine, records)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_failures_everywhere_at_random_lose_nothing(async_scheduling: bool) -> None:
    for seed in range(3):
        engine = make_engine(async_scheduling=async_scheduling)
        with Faults(*SITES, share=0.01, seed=seed, first=20).injected() as faults:
            records = engine.run(make_workload())
        assert faults.total > 5
        assert_nothing_is_lost(engine, records)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_a_planner_that_always_fails_leaves_vllms_own_schedule(
    async_scheduling: bool, scheduling_policy: str
) -> None:
    options = {"async_scheduling": async_scheduling, "scheduling_policy": scheduling_policy}

    def schedules(engine: VirtualEngine) -> list[Any]:
        steps: list[Any] = []
        engine.run(
            make_workload(),
            on_step=lambda trace: steps.append(
                (trace.start_s, dict(trace.output.num_scheduled_tokens))
            ),
        )
        return steps

    stock = schedules(make_engine(scheduler_cls=AsyncScheduler, **options))
    engine = make_engine(**options)
    with Faults("attain", share=1.0).injected():
        ours = schedules(engine)
    assert ours == stock
    assert engine.scheduler.sola_stats()["is_aside"]
    if scheduling_policy == "priority":
        assert isinstance(engine.scheduler.waiting, PriorityRequestQueue)


def test_after_one_failure_it_plans_again_as_before() -> None:
    engine, undisturbed = make_engine(), make_engine()
    with Faults("monitor completed", share=0.005, seed=3, first=50).injected() as faults:
        records = engine.run(make_workload())
    assert 1 <= faults.total <= 5
    stats = engine.scheduler.sola_stats()
    assert not stats["is_aside"]
    expected = attained(undisturbed.run(make_workload()))
    assert attained(records) >= 0.9 * expected
    assert stats["problems"]["attain"] > 50


def test_the_state_that_is_built_anew_is_the_one_that_was_lost() -> None:
    """With nothing in flight and nothing learned since, a plan after it is the same plan."""
    engine = make_engine()
    scheduler = engine.scheduler
    columns = ("phase", "arrival_s", "num_output", "priority", "max_tokens", "num_preemptions")
    num_compared = 0

    def compare(_: Any) -> None:
        nonlocal num_compared
        before = scheduler.sola_monitor.table
        scheduler._planning.restore()
        after = scheduler.sola_monitor.table
        after.check_integrity()
        assert after.row_of.keys() == before.row_of.keys()
        for name, row in after.row_of.items():
            was = before.row_of[name]
            for column in columns:
                assert getattr(after, column)[row] == getattr(before, column)[was], (name, column)
            np.testing.assert_equal(after.first_token_s[row], before.first_token_s[was])
            if after.phase[row] == PREFILL:
                assert after.num_computed[row] == before.num_computed[was]
                assert after.prefill_target[row] == before.prefill_target[was]
            num_compared += 1

    records = engine.run(make_workload(), on_step=compare)
    assert_nothing_is_lost(engine, records)
    assert num_compared > 5000
    assert attained(records) >= 0.9 * attained(make_engine().run(make_workload()))


def attained(records: list[RequestRecord]) -> int:
    met = 0
    for r in records:
        if r.finish_reason == "stop" and r.first_token_s is not None:
            tpot_s = (r.last_token_s - r.first_token_s) / max(1, r.num_output_tokens - 1)
            met += r.first_token_s - r.arrival_s <= 0.5 and tpot_s <= 0.03
    return met


def test_plans_that_take_too_long_make_planning_pause_and_short_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = took_s = 0.0
    num_made = 0
    plan = AttainPlanner.plan

    def slow(self: AttainPlanner, state: Any) -> Any:
        nonlocal seconds, num_made
        seconds, num_made = seconds + took_s, num_made + 1
        return plan(self, state)

    monkeypatch.setattr(AttainPlanner, "plan", slow)
    for each_s, is_slow in ((0.2, True), (0.05, False)):
        took_s, num_made = each_s, 0
        engine = make_engine({"plan_limit_s": 0.1})
        engine.scheduler.sola_cpu_clock = lambda: seconds
        assert_nothing_is_lost(engine, engine.run(make_workload()))
        stats, num_plans = engine.scheduler.sola_stats(), engine.scheduler._planning.num_plans
        assert not stats["is_aside"]
        if is_slow:
            assert stats["failures"] == {"planning a step": num_made}
            assert num_plans < 0.2 * engine.num_steps
        else:
            assert stats["failures"] == {}
            assert num_plans > 0.9 * engine.num_steps


def test_time_without_plans_is_nobody_s_held_time() -> None:
    engine = make_engine()
    for number in range(3):
        engine.add(VirtualRequest(f"r{number}", 0.0, 150, prompt_len=40))
    for _ in range(10):
        engine.step()
    scheduler = engine.scheduler
    planner, guard = scheduler.sola_planner, scheduler.sola_guard
    scheduler.sola_planner = SimpleNamespace(
        plan=lambda state: StepPlan(run=state.running[:2], problem="attain"), traits=planner.traits
    )
    scheduler.sola_monitor.table.epoch += 1
    began_s = engine.clock.now
    for _ in range(2):
        engine.step()
    held_s = engine.clock.now - began_s

    scheduler.sola_planner = planner
    guard._plans_again_at = guard._num_steps + 60
    engine.run()

    monitor = scheduler.sola_monitor
    ended = monitor.fates.since(0, monitor.cost)
    held = ended.records[ended.records["num_held"] > 0]
    assert len(held) == 1
    assert 0 < held["num_held"][0] <= 2
    assert held["held_s"][0] <= held_s + 1e-9


def test_stepping_aside_does_not_wait_for_the_predictor() -> None:
    class Slow(EndlessAnswers):
        is_closed = False

        def close(self) -> None:
            time.sleep(0.2)
            self.is_closed = True

    engine = make_engine()
    predictions = engine.scheduler.sola_predictions = Slow(engine.scheduler)
    closed_at_end = []
    with Faults("attain", share=1.0).injected():
        engine.run(
            make_workload(),
            on_step=lambda _: closed_at_end.append(predictions.is_closed),
        )
    assert engine.scheduler.sola_predictions is None
    assert not closed_at_end[10]
