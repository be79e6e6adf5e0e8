"""When an engine's next step has to start."""

from __future__ import annotations

import math

import pytest
from states import DECODE_S, NOW, STEP_S, TOKEN_S, StateBuilder, make_cost

from sola_sched.colocation.urgency import latest_start_s, least_product_s2
from sola_sched.config.slo import SloTarget
from sola_sched.cost.model import CostModel


def slack_s(builder: StateBuilder, cost: CostModel | None = None) -> float:
    cost = make_cost() if cost is None else cost
    return latest_start_s(builder.table, builder.lengths, cost, NOW) - NOW


def test_without_requests_or_targets_nothing_is_urgent() -> None:
    builder = StateBuilder()
    assert slack_s(builder) == math.inf

    builder.waiting("free", waited_s=5.0, slo=SloTarget())
    builder.decode("too", first_ago_s=5.0, out=3, slo=SloTarget())

    assert slack_s(builder) == math.inf


def test_a_decode_must_start_a_step_before_its_token_is_due() -> None:
    builder = StateBuilder()
    builder.decode("a", first_ago_s=0.1, out=3)  # the next one 0.3 s after the first

    assert slack_s(builder) == pytest.approx(0.2 - STEP_S - DECODE_S, rel=5e-3)


def test_the_most_urgent_counts() -> None:
    builder = StateBuilder()
    builder.decode("a", first_ago_s=0.1, out=3)
    builder.decode("b", first_ago_s=0.1, out=2)
    builder.waiting("c", waited_s=0.2, prompt=100)

    assert slack_s(builder) == pytest.approx(0.1 - STEP_S - 2 * DECODE_S, rel=5e-3)


def test_prompts_are_computed_one_after_the_other() -> None:
    builder = StateBuilder()
    builder.waiting("a", waited_s=0.5, prompt=2000)
    builder.prefill("b", waited_s=0.4, computed=1000, prompt=3000)

    assert slack_s(builder) == pytest.approx(0.6 - 4000 * TOKEN_S - STEP_S, rel=5e-3)


@pytest.mark.parametrize("out", [1, 30], ids=["first token too late", "too slow"])
def test_a_lost_decode_is_not_urgent(out: int) -> None:
    builder = StateBuilder()
    late = SloTarget(1.0, 0.1) if out == 1 else SloTarget(1.0, 0.005)
    builder.decode("a", first_ago_s=0.1 * out, out=out, slo=late, arrived_ago_s=0.1 * out + 2.0)

    assert slack_s(builder) == math.inf


def test_a_decode_that_is_behind_may_catch_up_by_the_end_that_is_expected() -> None:
    step_s = STEP_S + DECODE_S
    behind_s = {}
    for left in (20.0, 2.0):
        builder = StateBuilder(left=left)
        builder.decode("a", first_ago_s=0.5, out=3)  # the next one was due 0.2 s ago
        behind_s[left] = slack_s(builder)

    assert behind_s[20.0] == pytest.approx(-0.2 - step_s + 19 * (0.1 - step_s), rel=5e-3)
    assert behind_s[2.0] == math.inf  # lost: not even with every step from now on


def test_a_prompt_that_cannot_be_in_time_is_not_urgent() -> None:
    builder = StateBuilder()
    builder.waiting("a", waited_s=0.9, prompt=2000)

    assert slack_s(builder) == math.inf


def test_while_step_times_are_learned_any_target_is_urgent() -> None:
    builder = StateBuilder()
    builder.waiting("a", waited_s=0.0)

    assert slack_s(builder, CostModel()) == 0.0


def test_the_least_product_is_that_of_remaining_and_whole_time() -> None:
    builder = StateBuilder(left=10.0)
    builder.waiting("alone", waited_s=0.0, prompt=100)
    whole_s = 100 * TOKEN_S + 10 * (STEP_S + DECODE_S)

    product = least_product_s2(builder.table, builder.lengths, make_cost())

    assert product == pytest.approx(whole_s**2, rel=5e-3)


def test_a_request_that_is_nearly_done_goes_before_a_new_one() -> None:
    builder = StateBuilder(left=10.0)
    builder.waiting("new", waited_s=0.0, prompt=1000)
    before = least_product_s2(builder.table, builder.lengths, make_cost())
    builder.decode("old", first_ago_s=0.1, out=3, prompt=10)

    assert least_product_s2(builder.table, builder.lengths, make_cost()) < before


def test_without_requests_or_step_times_products_say_all_or_nothing() -> None:
    builder = StateBuilder()
    assert least_product_s2(builder.table, builder.lengths, make_cost()) == math.inf

    builder.waiting("a", waited_s=0.0)

    assert least_product_s2(builder.table, builder.lengths, CostModel()) == 0.0
