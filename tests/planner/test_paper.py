"""Step tables for `policy="paper"` (SOLA, section 4.4).

The builder's cost model: a step takes 10 ms + 1 ms per decode + 0.1 ms per prefill token.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import StateBuilder

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.planner.base import num_that_fit, peak_tokens
from sola_sched.planner.paper import PaperPlanner

SLO = SloTarget(1.0, 0.1)


def make_paper(**options: object) -> PaperPlanner:
    return PaperPlanner(SolaConfig(policy="paper", **{"window": 1, **options}))


def test_ttft_behind_tpot_puts_prefills_first_within_eq1() -> None:
    b = StateBuilder()
    # TPOT so far 50 ms of 100 ms over 8 tokens: prefills may take (0.1 - 0.05) x 8 = 0.4 s
    b.decode("d", first_ago_s=0.4, out=8, slo=SLO)
    b.waiting("w", waited_s=0.8, prompt=6000, slo=SLO)
    plan = make_paper().plan(b.build(max_num_tokens=8192))
    assert plan.problem == "ttft"
    assert b.names(plan.admit) == ["w"]
    assert plan.run is not None
    assert not len(plan.run), "all of k goes to the prefill"
    assert plan.token_budget == 30 * 128  # 10 ms + 0.1 ms x 3840 <= 0.4 s; 31 tiles are too many


def test_left_over_tokens_of_k_go_to_decodes_by_predicted_tpot() -> None:
    b = StateBuilder()
    b.decode("slow", first_ago_s=0.35, out=5, slo=SLO)
    b.decode("fast", first_ago_s=0.05, out=5, slo=SLO)
    b.waiting("w", waited_s=0.8, prompt=127, slo=SLO)
    plan = make_paper().plan(b.build())
    assert plan.problem == "ttft"
    assert plan.token_budget == 128
    assert b.names(plan.run) == ["slow"]


def test_tpot_behind_ttft_runs_all_decodes_and_the_fewest_prefills_of_eq2() -> None:
    b = StateBuilder()
    b.decode("d", first_ago_s=0.9, out=10, slo=SLO)  # 90 % of its target
    b.waiting("close", waited_s=0.8, prompt=1000, slo=SLO)
    b.waiting("far", waited_s=0.1, prompt=1000, slo=SLO)
    plan = make_paper().plan(b.build())
    assert plan.problem == "tpot"
    assert b.names(plan.run) == ["d"]
    assert b.names(plan.admit) == []  # after this step "close" still meets 1 s
    b.table.arrival_s[b.table.row_of["close"]] -= 0.09
    plan = make_paper().plan(b.build())
    assert b.names(plan.admit) == ["close"]


def test_prefills_are_ordered_by_predicted_ttft() -> None:
    b = StateBuilder()
    b.waiting("short, early", waited_s=0.50, prompt=10)
    b.waiting("long, late", waited_s=0.45, prompt=2000)  # its prefill adds 200 ms
    plan = make_paper().plan(b.build())
    assert b.names(plan.admit) == ["long, late", "short, early"]


def test_when_both_fail_the_level_ignores_requests_that_are_lost() -> None:
    b = StateBuilder()
    b.decode("lost", first_ago_s=20.0, out=10, slo=SLO)
    b.decode("fine", first_ago_s=0.1, out=10, slo=SLO)
    b.waiting("w", waited_s=2.0, prompt=2000, slo=SLO)
    plan = make_paper().plan(b.build())
    assert plan.problem == "ttft"  # half of the decodes meet TPOT, none of the waiting TTFT
    assert b.names(plan.admit) == ["w"]  # "lost" alone would allow no prefill at all


def test_the_window_damps_a_single_odd_step() -> None:
    planner = make_paper(window=8)
    for _ in range(7):
        b = StateBuilder()
        b.decode("d", first_ago_s=0.9, out=10, slo=SLO)
        b.waiting("w", waited_s=0.1, slo=SLO)
        assert planner.plan(b.build()).problem == "tpot"
    b = StateBuilder()
    b.decode("d", first_ago_s=0.1, out=10, slo=SLO)
    b.waiting("w", waited_s=0.9, slo=SLO)
    assert planner.plan(b.build()).problem == "tpot"


def test_peak_memory_of_two_requests_by_hand() -> None:
    # After 10 steps the first ends: 100 + 50 + 2 x 10 = 170; then 50 + 100 = 150.
    assert peak_tokens(np.array([100, 50]), np.array([10.0, 100.0])) == 170.0
    assert peak_tokens(np.empty(0), np.empty(0)) == 0.0


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 300)),
        min_size=1,
        max_size=12,
    )
)
def test_peak_memory_equals_a_step_by_step_count(requests: list[tuple[int, int]]) -> None:
    used = np.array([u for u, _ in requests])
    left = np.array([n for _, n in requests])
    brute = max(
        sum(int(u) + step for u, n in requests if n >= step) for step in range(left.max() + 1)
    )
    assert peak_tokens(used, left.astype(float)) == brute


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.lists(st.integers(0, 300), min_size=3, max_size=3)),
        min_size=1,
        max_size=12,
    )
)
def test_the_peak_of_the_expected_need_is_that_of_a_step_by_step_mean(
    requests: list[tuple[int, list[int]]],
) -> None:
    used = np.array([u for u, _ in requests])
    left = np.array([values for _, values in requests], dtype=np.float64)
    brute = max(
        sum((u + step) * sum(n >= step for n in values) / 3 for u, values in requests)
        for step in range(301)
    )
    assert peak_tokens(used, left) == pytest.approx(brute)
    assert peak_tokens(used, left) <= peak_tokens(used, left.max(axis=1)) + 1e-6


def test_admission_counts_requests_until_the_predicted_peak_is_full() -> None:
    b = StateBuilder(left=160.0, num_blocks=100)
    for i in range(10):
        b.waiting(f"w{i}", waited_s=0.0, prompt=160)
    state = b.build()
    none, all_of_them = state.running, np.arange(10)
    assert num_that_fit(state, none, all_of_them, np.full(10, 160.0)) == 4
    assert num_that_fit(state, none, all_of_them, np.full((10, 5), 160.0)) == 4
    assert num_that_fit(state, none, all_of_them, np.full(10, 9000.0)) == 1
    assert num_that_fit(state, none, np.arange(0), np.empty(0)) == 0


def test_admission_counts_the_outputs_of_a_request_that_came_back_once() -> None:
    b = StateBuilder(num_blocks=100)
    row = b.decode("back", first_ago_s=1.0, out=700, prompt=100)
    b.table.prefill_target[row] = 790  # its prompt and 690 outputs were computed again
    b.waiting("w", waited_s=0.0, prompt=160)
    left, waiting = np.full(2, 100.0), np.arange(1)
    # Of 1552 tokens 800 + 160 + 2 x 100 and as many more as are in flight.
    assert num_that_fit(b.build(), b.build().running, waiting, left) == 1
    assert num_that_fit(b.build(), b.build().running, waiting, left, np.array([392, 0])) == 1
    assert num_that_fit(b.build(), b.build().running, waiting, left, np.array([393, 0])) == 0


@pytest.mark.parametrize(("num_free_blocks", "is_ordered"), [(50, False), (7, True)])
def test_full_slots_the_decodes_are_ordered_only_where_memory_may_end(
    num_free_blocks: int, is_ordered: bool
) -> None:
    b = StateBuilder(max_num_running=2, num_blocks=1000, num_free_blocks=num_free_blocks)
    b.decode("fast", first_ago_s=0.05, out=5, slo=SLO)
    b.decode("slow", first_ago_s=0.35, out=5, slo=SLO)
    b.waiting("w", waited_s=0.8, prompt=127, slo=SLO)
    plan = make_paper().plan(b.build())
    assert not len(plan.admit)
    if is_ordered:
        assert b.names(plan.run) == ["slow", "fast"]
    else:
        assert plan.run is None


@pytest.mark.parametrize("decodes", [False, True])
def test_without_ttft_targets_prompts_get_what_tpot_leaves(decodes: bool) -> None:
    b = StateBuilder()
    if decodes:
        b.decode("d", first_ago_s=0.4, out=8, slo=SloTarget(tpot_s=0.1))
    b.waiting("w", waited_s=0.8, prompt=6000, slo=SloTarget(tpot_s=0.1))
    plan = make_paper().plan(b.build(max_num_tokens=8192))
    assert b.names(plan.admit) == ["w"]
    assert plan.token_budget == (30 * 128 if decodes else 47 * 128)


def test_where_nobody_decodes_one_prompt_at_least_is_computed() -> None:
    """The window still says that TPOT is what lags."""
    b = StateBuilder()
    paper = make_paper(window=8)
    b.decode("d", first_ago_s=9.0, out=2, slo=SLO)
    paper.plan(b.build())
    b.table.remove("d")
    b.running.clear()
    b.waiting("far", waited_s=0.0, slo=SloTarget(100.0, 0.1))
    b.waiting("none", waited_s=0.0, slo=SloTarget(tpot_s=0.1))
    plan = paper.plan(b.build())
    assert plan.problem == "tpot"
    assert b.names(plan.admit) == ["far"]
