"""Lower priority classes give way where a higher one finds no memory."""

from __future__ import annotations

import pytest
from states import StateBuilder, as_lists, make_attain

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.planner import make_planner

#: Nobody waits for anything else than memory.
EASY = SloTarget(10.0, 1.0)
NUM_BLOCKS = 100
#: A decode holds 288 tokens, 18 blocks.
PROMPT, OUT = 284, 4


def full_memory() -> StateBuilder:
    """Five decodes, the later the lower their class, fill the memory but for ten blocks."""
    b = StateBuilder(num_blocks=NUM_BLOCKS, num_free_blocks=10, left=1.0)
    for i, priority in enumerate((1, 1, 2, 2, 3)):
        ago_s = 1.0 - 0.1 * i
        b.decode(f"d{i}", first_ago_s=ago_s, out=OUT, prompt=PROMPT, slo=EASY, priority=priority)
    return b


@pytest.mark.parametrize("policy", ["attain", "paper"])
@pytest.mark.parametrize(
    ("prompt", "gone"),
    [(200, ["d4"]), (500, ["d4", "d3"]), (900, ["d4", "d3", "d2"]), (50, []), (2000, [])],
)
def test_the_fewest_of_the_lowest_classes_give_way(
    policy: str, prompt: int, gone: list[str]
) -> None:
    """A prompt that fits as it is, or not even in place of all below it, displaces nobody."""
    b = full_memory()
    high = b.waiting("high", waited_s=0.1, prompt=prompt, slo=EASY)
    plan = make_planner(SolaConfig(policy=policy)).plan(b.build())
    assert b.names(plan.preempt) == gone
    if gone:
        assert plan.admit is not None
        assert plan.admit.tolist() == [high]


@pytest.mark.parametrize("policy", ["attain", "paper"])
def test_nobody_gives_way_for_the_memory_of_an_equal_or_a_lower_class(policy: str) -> None:
    b = full_memory()
    b.waiting("equal", waited_s=0.1, prompt=200, slo=EASY, priority=3)
    b.waiting("lower", waited_s=0.1, prompt=200, slo=EASY, priority=4)
    assert not len(make_planner(SolaConfig(policy=policy)).plan(b.build()).preempt)


def hurried(prompt: int) -> StateBuilder:
    """The decode of the highest class has no time for a prompt, whoever else leaves."""
    b = StateBuilder(num_blocks=NUM_BLOCKS, num_free_blocks=2, elapsed_s=0.1)
    b.decode("hurried", first_ago_s=0.0, out=1, slo=SloTarget(1.0, 0.0124))
    b.decode("big", first_ago_s=0.1, out=1, prompt=1300, slo=EASY, priority=3)
    b.decode("lost", first_ago_s=1.0, out=1, slo=SloTarget(0.5, 1.0), arrived_ago_s=3.0, priority=3)
    b.waiting("high", waited_s=0.1, prompt=prompt, slo=EASY)
    return b


def test_nobody_gives_way_for_one_that_is_not_admitted_then() -> None:
    fits_in_place_of_others, fits_nowhere = hurried(prompt=500), hurried(prompt=5000)
    tried, not_tried = make_attain(best_effort_share=0.2), make_attain(best_effort_share=0.2)
    plan = tried.plan(fits_in_place_of_others.build())
    other = not_tried.plan(fits_nowhere.build())
    assert not len(plan.preempt)
    assert as_lists(plan) == as_lists(other)
    assert tried.account.tobytes() == not_tried.account.tobytes(), "time is booked twice"
    assert tried.account.credit_s != 0.0


@pytest.mark.parametrize("policy", ["attain", "paper"])
@pytest.mark.parametrize(("num_leaving", "gone"), [(18, []), (8, ["d3"])])
def test_nobody_else_gives_way_while_the_memory_of_who_left_is_copied(
    policy: str, num_leaving: int, gone: list[str]
) -> None:
    """A prompt of 20 blocks finds 10 that are free, and those whose copies are under way."""
    b = full_memory()
    b.table.remove("d4")
    b.running.pop()
    b.waiting("high", waited_s=0.1, prompt=310, slo=EASY)
    state = b.build(num_leaving_blocks=num_leaving)
    assert b.names(make_planner(SolaConfig(policy=policy)).plan(state).preempt) == gone
