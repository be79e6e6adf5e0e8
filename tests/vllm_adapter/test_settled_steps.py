"""Steps for which nothing can be decided are not planned anew, and the outcome is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from marks import LONG
from virtual_runs import STEP_TIME, make_small_engine, make_workload, step_until, warm_up

from sola_sched.core.state import StepPlan, StepState
from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.scheduler import Scheduler
from sola_sched.vllm_adapter.steps import planning

pytestmark = pytest.mark.vllm

TARGETS = {"ttft_s": 0.4, "tpot_s": 0.05}
BY_CONTEXT = StepTimeModel(
    base_s=0.005, per_decode_s=1e-4, per_prefill_token_s=2e-5, per_ctx_s=4e-6
)


class Asked:
    """Counts what a planner is asked."""

    def __init__(
        self, engine: VirtualEngine, answer: Callable[[StepState], StepPlan] | None = None
    ) -> None:
        self._planner = engine.scheduler.sola_planner
        engine.scheduler.sola_planner = self
        self.answer = answer or self._planner.plan
        self.count = 0

    def plan(self, state: StepState) -> StepPlan:
        self.count += 1
        return self.answer(state)

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


def assert_one_of_eight_is_planned(engine: VirtualEngine, problem: str) -> None:
    asked, num_before = Asked(engine), problems_of(engine)[problem]

    for _ in range(80):
        engine.step()

    assert asked.count == 10
    assert problems_of(engine)[problem] == num_before + 80


def test_one_of_eight_steps_is_planned_while_nothing_can_be_decided() -> None:
    engine = make_engine()
    decode_alone(engine)

    assert_one_of_eight_is_planned(engine, "decode")


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

    assert_one_of_eight_is_planned(engine, "neutral")
    assert engine.scheduler._planning.why_unplanned(StepPlan()) == reason


def test_nor_while_nobody_has_a_target() -> None:
    engine = make_engine(ttft_s=None, tpot_s=None)
    decode_alone(engine)

    assert_one_of_eight_is_planned(engine, "neutral")
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


def test_a_plan_that_decides_is_followed_by_others() -> None:
    engine = make_engine()
    for name in ("two", "three"):
        now_s = engine.clock.now
        engine.add(VirtualRequest(name, arrival_s=now_s, prompt_len=100, output_len=400))
    decode_alone(engine)
    asked = Asked(engine, lambda state: StepPlan(is_settled=True, problem="decode"))
    for _ in range(9):
        engine.step()
    assert asked.count <= 2

    asked.count, asked.answer = 0, lambda state: StepPlan(run=state.running[:2], problem="holds")
    num_held = engine.scheduler.sola_stats()["num_held"]
    for _ in range(48):
        engine.step()

    assert asked.count > 40
    assert engine.scheduler.sola_stats()["num_held"] == num_held + asked.count


@pytest.mark.parametrize("problem", ["mine", "neutral", "decode"])
def test_a_policy_of_others_may_name_its_problem(problem: str) -> None:
    engine = make_cold_engine(**TARGETS)
    asked = Asked(engine, lambda state: StepPlan(problem=problem, is_settled=True))

    decode_alone(engine, 80)

    planning = engine.scheduler._planning
    assert asked.count < 20
    assert engine.scheduler.sola_stats()["failures"] == {}
    assert problems_of(engine) == {problem: planning.num_plans}


@pytest.mark.parametrize(
    "what",
    [
        lambda state: {"run": state.running[:1]},
        lambda state: {"token_budget": 1},
        lambda state: {"prefill_cap": 1},
        lambda state: {"preempt": state.running[:1]},
    ],
    ids=["holds", "budget", "cap", "preempts"],
)
def test_what_a_policy_of_others_asks_for_is_done_although_it_calls_that_settled(
    what: Callable[[StepState], dict[str, Any]],
) -> None:
    engine = make_engine()
    decode_alone(engine)
    asked = Asked(engine, lambda state: StepPlan(is_settled=True, problem="mine", **what(state)))
    engine.scheduler.sola_monitor.table.epoch += 1

    for _ in range(8):
        engine.step()

    assert asked.count >= 4


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
@pytest.mark.parametrize("step_time", [STEP_TIME, BY_CONTEXT], ids=["", "contexts grow"])
def test_the_outcome_is_that_of_planning_each_step(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    is_async: bool,
    options: dict[str, Any],
    step_time: StepTimeModel,
) -> None:
    outcomes = []
    for every in (8, 1):
        monkeypatch.setattr(planning, "_SETTLED_PLANS", every)
        sola = {**TARGETS, **options}
        engine = make_small_engine(
            Scheduler, sola, async_scheduling=is_async, max_num_seqs=16, step_time=step_time
        )
        engine.run(make_workload(120, 8.0, seed=seed))
        outcomes.append([(r.first_token_s, r.last_token_s) for r in engine.records])

    assert outcomes[0] == outcomes[1]


def test_holds_that_growing_contexts_ask_for_are_made() -> None:
    """Decodes without a target sit out, once contexts are so long that others would be late."""
    sola = {"ttft_s": 2.0, "tpot_s": 0.025, "classes": {"bulk": {"ttft_s": None, "tpot_s": None}}}
    engine = make_small_engine(
        Scheduler,
        sola,
        num_blocks=8000,
        max_model_len=4096,
        step_time=StepTimeModel(
            base_s=0.005, per_decode_s=1e-4, per_prefill_token_s=2e-5, per_ctx_s=1e-6
        ),
    )
    warm_up(engine)
    step_until(engine, lambda: False)
    now_s = engine.clock.now
    for number in range(20):
        is_bulk = number >= 4
        engine.add(
            VirtualRequest(
                f"r{number}",
                now_s,
                2500 if is_bulk else 1500,
                prompt_len=300,
                max_tokens=3000,
                extra_args={"slo_class": "bulk"} if is_bulk else None,
            )
        )

    engine.run()

    records = {record.req_id: record for record in engine.records}
    for number in range(4):
        first_s, last_s = records[f"r{number}"].first_token_s, records[f"r{number}"].last_token_s
        assert first_s is not None
        assert last_s is not None
        assert (last_s - first_s) / 1499 <= 0.025
