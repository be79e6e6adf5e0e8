"""Who leaves first, when there is room to be made, and what a copy is worth."""

from __future__ import annotations

import numpy as np
import pytest
from states import STEP_S, TOKEN_S, StateBuilder, make_cost

from sola_sched.core.state import StepPlan, StepState
from sola_sched.kv_swap.jobs import Report
from sola_sched.kv_swap.policy import (
    MOST_PATIENCE,
    PATIENCE,
    Link,
    give_way,
    leaving_order,
    make_room,
    outward,
)


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def four_decodes(num_free_blocks: int) -> tuple[StateBuilder, StepState, StepPlan]:
    """Four decodes of 160 tokens, which take a block each now; the last two are held."""
    builder = StateBuilder(num_free_blocks=num_free_blocks)
    names = ("first", "second", "held", "held longer")
    all_rows = [builder.decode(name, first_ago_s=4.0 - i, out=60) for i, name in enumerate(names)]
    for row, wait_s in zip(all_rows, (0.0, 0.0, 1.0, 5.0), strict=True):
        builder.table.ewt_s[row] = wait_s
    return builder, builder.build(), StepPlan(run=rows(*all_rows[:2]), admit=rows())


def test_the_held_leave_first_then_the_longest_wait_then_the_latest_arrival() -> None:
    builder, state, plan = four_decodes(100)

    order = leaving_order(state, plan)

    assert builder.names(order) == ["held longer", "held", "second", "first"]


def test_where_the_plan_has_an_order_the_last_leave_first() -> None:
    builder, state, plan = four_decodes(100)
    plan.order = state.running[[2, 0, 3, 1]]

    assert builder.names(leaving_order(state, plan)) == ["second", "held longer", "first", "held"]


def test_lower_classes_leave_before_all_others() -> None:
    builder, state, plan = four_decodes(100)
    builder.table.priority[state.running[0]] = 3

    assert builder.names(leaving_order(state, plan))[0] == "first"


@pytest.mark.parametrize(
    ("num_free", "num_leaving", "victims"),
    [(2, 0, []), (1, 0, ["held longer"]), (0, 0, ["held longer"]), (0, 2, [])],
)
def test_room_is_made_before_it_is_needed(
    num_free: int, num_leaving: int, victims: list[str]
) -> None:
    """Two decodes run, and each takes one block in the next steps."""
    builder, state, plan = four_decodes(num_free)

    state.num_leaving_blocks = num_leaving
    changed = make_room(state, plan)

    assert builder.names(changed.preempt) == victims
    assert builder.names(changed.run) == ["first", "second"]
    assert not len(plan.preempt)  # the planner's own plan stays


def test_the_last_one_that_runs_stays() -> None:
    builder = StateBuilder(num_free_blocks=0)
    for i, name in enumerate(("first", "second")):
        builder.decode(name, first_ago_s=2.0 - i, out=60)
    state = builder.build()

    changed = make_room(state, StepPlan(run=state.running))

    assert builder.names(changed.run) == ["first"]
    assert builder.names(changed.preempt) == ["second"]


def test_a_neutral_plan_is_left_to_vllm() -> None:
    _, state, _ = four_decodes(0)

    assert not len(make_room(state, StepPlan()).preempt)


@pytest.mark.parametrize(
    ("waited_s", "num_free", "victims"),
    [(0.1, 0, ["held longer"]), (0.1, 50, []), (5.0, 0, [])],
    ids=["no room", "room", "late already"],
)
def test_the_lost_give_way_to_one_that_can_be_on_time(
    waited_s: float, num_free: int, victims: list[str]
) -> None:
    builder, _, plan = four_decodes(num_free)
    builder.waiting("new", waited_s=waited_s, prompt=80)

    changed = give_way(builder.build(), plan)

    assert builder.names(changed.preempt) == victims


def test_nobody_gives_way_in_vain() -> None:
    builder, _, plan = four_decodes(0)
    builder.waiting("new", waited_s=0.1, prompt=8000)

    assert not len(give_way(builder.build(), plan).preempt)


def test_copies_run_ahead_of_those_that_would_leave() -> None:
    builder, state, plan = four_decodes(5)  # two decodes of 50 more tokens: 8 blocks

    assert builder.names(outward(state, plan)) == ["held longer"]
    assert not len(outward(builder.build(num_free_blocks=8), plan))


def measured(s_per_token: float) -> Link:
    link = Link()
    link.observe(Report({1: 1}, load_s=100 * s_per_token), 100)
    return link


def test_workers_that_load_beside_each_other_are_no_slower_than_one() -> None:
    """With tensor parallelism each loads its part of the same tokens."""
    reports = [Report({1: 1}, load_s=100 * TOKEN_S, num_loading=1) for _ in range(8)]
    for other in reports[1:]:
        reports[0].merge(other)
    link = Link()
    link.observe(reports[0], 100)

    assert link.s_per_token == pytest.approx(TOKEN_S)


def test_a_copy_is_worth_what_it_saves_all_that_run() -> None:
    cost, link = make_cost(), measured(TOKEN_S / 10)
    # Three steps of 11 ms or more against 0.1 ms a token for each that runs and the one itself.
    alone = link.crossover_tokens(cost, 0)
    beside_ten = link.crossover_tokens(cost, 10)

    assert alone == pytest.approx(3 * (STEP_S + 0.001) / (0.9 * TOKEN_S), rel=0.02)
    assert beside_ten == pytest.approx(3 * (STEP_S + 0.010) / (10.9 * TOKEN_S), rel=0.05)
    assert link.is_worth_loading(cost, 2 * (alone or 0), 0, 0)
    assert not link.is_worth_loading(cost, (alone or 0) // 2, 0, 0)


def test_a_slow_link_is_never_worth_it_alone() -> None:
    assert measured(2 * TOKEN_S).crossover_tokens(make_cost(), 0) is None


def test_what_is_not_measured_is_tried() -> None:
    assert Link().is_worth_loading(make_cost(), 1, 0, 0)


def num_loads(link: Link, s_per_token: float, count: int, num_tokens: int = 1000) -> int:
    """Of so many requests, those that are loaded, on a link of this speed."""
    loads, cost = 0, make_cost()
    for _ in range(count):
        if link.is_worth_loading(cost, num_tokens, 0, 2):
            loads += 1
            link.observe(Report({1: 1}, load_s=num_tokens * s_per_token), num_tokens)
        else:
            link.count_refusal(cost, num_tokens, 0, 2)
    return loads


def test_short_loads_do_not_make_the_link_look_slow() -> None:
    """Each takes a millisecond or two whatever its length."""
    link, cost = Link(), make_cost()
    for _ in range(20):
        link.observe(Report({1: 1}, load_s=2000 * TOKEN_S / 4), 2000)
    long_s, long_crossover = link.s_per_token, link.crossover_tokens(cost, 4)
    for _ in range(40):
        link.observe(Report({1: 1}, load_s=8 * TOKEN_S / 4 + 0.002), 8)
    crossover = link.crossover_tokens(cost, 4)

    assert long_s == pytest.approx(TOKEN_S / 4)
    assert link.s_per_token is not None
    assert link.s_per_token < 1.5 * TOKEN_S / 4
    assert long_crossover is not None
    assert crossover is not None
    assert crossover <= 1.2 * long_crossover


def test_a_short_load_at_the_start_is_soon_outweighed() -> None:
    link = Link()
    link.observe(Report({1: 1}, load_s=0.01), 1)
    link.observe(Report({1: 1}, load_s=2000 * TOKEN_S), 2000)

    assert link.s_per_token == pytest.approx(TOKEN_S, rel=0.1)


def test_a_link_that_becomes_slower_is_noticed_within_a_few_loads() -> None:
    link = Link()
    for factor in (1, 10):
        for _ in range(15):
            link.observe(Report({1: 1}, load_s=2000 * factor * TOKEN_S), 2000)

    assert link.s_per_token == pytest.approx(10 * TOKEN_S, rel=0.1)


def test_asking_is_not_refusing() -> None:
    """A request that waits is asked about in each step."""
    link, cost = measured(100 * TOKEN_S), make_cost()
    for _ in range(10 * PATIENCE):
        assert not link.is_worth_loading(cost, 1000, 0, 2)

    assert link.s_per_token == 100 * TOKEN_S


def test_a_link_that_was_slow_once_is_used_again() -> None:
    link = measured(100 * TOKEN_S)

    assert num_loads(link, TOKEN_S / 10, 1000) > 1000 - 8 * PATIENCE


def test_one_that_stays_slow_is_tried_ever_more_rarely() -> None:
    link = measured(100 * TOKEN_S)

    assert 1 <= num_loads(link, 100 * TOKEN_S, 4000) <= 5
    assert num_loads(link, 100 * TOKEN_S, 2 * MOST_PATIENCE) <= 2


def test_a_load_that_no_speed_makes_worth_it_says_nothing_about_the_link() -> None:
    """A short one takes longer until it is noticed than computing its tokens does."""
    link = measured(100 * TOKEN_S)

    assert num_loads(link, 100 * TOKEN_S, 1000, num_tokens=10) == 0
    assert link.s_per_token == 100 * TOKEN_S
