"""Steps for which nothing can be decided are not planned anew, and the outcome is the same."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from marks import LONG
from virtual_runs import make_small_engine, make_workload, step_until, warm_up

from sola_sched.core.state import StepPlan, StepState
from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.scheduler import Scheduler
from sola_sched.vllm_adapter.steps import planning

pytestmark = pytest.mark.vllm

TARGETS = {"ttft_s": 0.4, "tpot_s": 0.05}


class Asked:
    """Counts what a planner is asked."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._planner = engine.scheduler.sola_planner
        engine.scheduler.sola_planner = self
        self.count = 0

    def plan(self, state: StepState) -> StepPlan:
        self.count += 1
        return self._planner.plan(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


def make_cold_engine(**options: Any) -> VirtualEngine:
    """One that has served nobody: step times are unknown."""
    return make_small_engine(Scheduler, options)


def make_engine(**options: Any) -> VirtualEngine:
    engine = make_small_engine(Scheduler, {**TARGETS, **options})
    warm_up(engine)
    step_until(engine, lambda: False)
    return engine


def decode_alone(engine: VirtualEngine, num_tokens: int = 12) -> None:
    """One request has come, and has so many tokens."""
    now_s = engine.clock.now
    engine.add(VirtualRequest("one", arrival_s=now_s, prompt_len=100, output_len=400))
    step_until(engine, lambda: num_output(engine) >= num_tokens)


def num_output(engine: VirtualEngine) -> int:
    table = engine.scheduler.sola_monitor.table
    return int(table.num_output[table.row_of["one"]]) if "one" in table.row_of else 0


def problems_of(engine: VirtualEngine) -> dict[str, int]:
    problems: dict[str, int] = engine.scheduler.sola_stats()["problems"]
    return problems


def test_one_of_eight_steps_is_planned_while_nothing_can_be_decided() -> None:
    engine = make_engine()
    decode_alone(engine)
    asked = Asked(engine)
    problems = problems_of(engine)

    for _ in range(80):
        engine.step()

    assert asked.count == 10
    assert problems_of(engine)["decode"] == problems["decode"] + 80


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (TARGETS, "learning"),
        ({**TARGETS, "policy": "alise"}, "learning"),
        ({**TARGETS, "policy": "paper"}, "learning"),
        ({"ttft_s": None, "tpot_s": None}, "learning"),
    ],
)
def test_nor_while_step_times_are_unknown(options: dict[str, Any], reason: str) -> None:
    engine = make_cold_engine(**options)
    decode_alone(engine)
    asked = Asked(engine)
    problems = problems_of(engine)

    for _ in range(80):
        engine.step()

    assert asked.count == 10
    assert problems_of(engine)["neutral"] == problems["neutral"] + 80
    assert engine.scheduler._planning.why_unplanned(StepPlan()) == reason


def test_nor_while_nobody_has_a_target() -> None:
    engine = make_engine(ttft_s=None, tpot_s=None)
    decode_alone(engine)
    asked = Asked(engine)

    for _ in range(80):
        engine.step()

    assert asked.count == 10
    assert engine.scheduler._planning.why_unplanned(StepPlan()) == "no_targets"


def test_the_first_step_of_known_step_times_is_planned() -> None:
    engine = make_cold_engine(**TARGETS)
    cost = engine.scheduler.sola_monitor.cost
    for i in range(60):
        engine.add(VirtualRequest(f"w{i}", arrival_s=0.02 * i, prompt_len=100, output_len=20))
    asked = Asked(engine)
    step_until(engine, lambda: cost.is_ready)
    before = asked.count

    engine.step()

    assert asked.count == before + 1


@pytest.mark.parametrize("num_quiet", range(1, 9))
def test_who_comes_is_planned_for_at_once(num_quiet: int) -> None:
    engine = make_engine()
    decode_alone(engine)
    for _ in range(num_quiet):
        engine.step()
    asked = Asked(engine)

    engine.add(VirtualRequest("two", arrival_s=engine.clock.now, prompt_len=100, output_len=5))
    engine.step()

    assert asked.count == 1
    assert engine.scheduler.sola_monitor.table.num_in_phase[1] == 0, "it must have begun"


def test_who_goes_ends_what_was_settled() -> None:
    engine = make_engine()
    decode_alone(engine)
    engine.step()
    asked = Asked(engine)

    engine.scheduler.sola_monitor.table.epoch += 1  # as with any end, preemption or load
    engine.step()

    assert asked.count == 1


def test_options_that_change_are_looked_at_at_once() -> None:
    engine = make_engine()
    decode_alone(engine)
    engine.step()
    asked = Asked(engine)

    engine.scheduler._planning.change(engine.scheduler.sola_config)
    engine.step()

    assert asked.count == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LONG) for seed in (1, 2))])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"best_effort_share": 0.1}, {"e2e_s": 5.0}, {"policy": "alise"}]
)
def test_the_outcome_is_that_of_planning_each_step(
    monkeypatch: pytest.MonkeyPatch, seed: int, is_async: bool, options: dict[str, Any]
) -> None:
    outcomes = []
    for every in (8, 1):
        monkeypatch.setattr(planning, "_SETTLED_PLANS", every)
        sola = {**TARGETS, **options}
        engine = make_small_engine(Scheduler, sola, async_scheduling=is_async, max_num_seqs=16)
        engine.run(make_workload(120, 8.0, seed=seed))
        outcomes.append([(r.first_token_s, r.last_token_s) for r in engine.records])

    assert outcomes[0] == outcomes[1]
