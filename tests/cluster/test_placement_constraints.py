"""Aladdin's constraints (b) to (e), Algorithm 1 and the optimum on small cases."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import is_allowed, make_model

from sola_sched.cluster.placement import (
    Demand,
    Fleet,
    Phase,
    Tightness,
    best_fit,
    least_pressed,
    pack,
    place_exactly,
    why_infeasible,
)
from sola_sched.cluster.placement.kv_peak import peak_tokens
from sola_sched.errors import ConfigError, InfeasibleError

STRICT = Tightness(gamma=1.0, theta=1.0)

demands = st.builds(
    Demand,
    prompt_tokens=st.integers(1, 800),
    output_tokens=st.integers(1, 300).map(float),
    ttft_s=st.just(0.3),
    tpot_s=st.just(0.02),
)


def test_figure_3_best_fit_pairs_a_long_prompt_with_a_long_output() -> None:
    # Memory of 9: two long prompts (5 + 1) together would need 12, a long prompt and a long
    # output (1 + 5) at their worst 5 + 1 + 1 + 1 = 8 while both run, then 6.
    model = make_model(capacity=9.0, per_ctx_s=1e-9)
    fleet = Fleet([model, model])
    prompt, output = Demand(5, 1.0), Demand(1, 5.0)

    placed = pack(fleet, [prompt, output, prompt, output])

    assert placed == [0, 0, 1, 1]


def test_context_constraint_is_that_of_eq_4() -> None:
    # theta l_d(2) = 0.9 (0.02 - 0.01 - 2e-4) / 1e-6 = 8820 tokens.
    fleet = Fleet([make_model(capacity=1e6)], tightness=Tightness(gamma=0.5, theta=0.9))
    fleet.add(0, Demand(4000, 820.0, tpot_s=0.02))  # 4410 with half of its output

    assert best_fit(fleet, Demand(4000, 820.0, tpot_s=0.02)) == 0
    assert best_fit(fleet, Demand(4001, 820.0, tpot_s=0.02)) is None
    assert "(b) context for TPOT 0.02 s would be 8821 of 8820 tokens" in why_infeasible(
        fleet, Demand(4001, 820.0, tpot_s=0.02)
    )


def test_the_tightest_target_on_an_instance_holds_for_all() -> None:
    fleet = Fleet([make_model(capacity=1e6)], tightness=STRICT)
    fleet.add(0, Demand(5000, 1.0, tpot_s=0.02))

    assert best_fit(fleet, Demand(9000, 1.0, tpot_s=10.0)) is None
    assert best_fit(Fleet([make_model(capacity=1e6)]), Demand(9000, 1.0, tpot_s=10.0)) == 0


def test_prompts_must_be_computed_before_the_ttft_target() -> None:
    # 0.01 + 1e-4 x (1000 + 900) = 0.2 s.
    fleet = Fleet([make_model()])
    fleet.add(0, Demand(1000, 10.0))

    assert best_fit(fleet, Demand(900, 10.0, ttft_s=0.2)) == 0
    assert best_fit(fleet, Demand(901, 10.0, ttft_s=0.2)) is None
    assert "(c) prompts before TTFT" in why_infeasible(fleet, Demand(901, 10.0, ttft_s=0.2))


def test_a_late_request_is_feasible_nowhere_and_goes_to_the_shortest_prompts() -> None:
    fleet = Fleet([make_model()] * 3)
    for i, tokens in enumerate((500, 100, 300)):
        fleet.add(i, Demand(tokens, 10.0))
    late = Demand(100, 10.0, ttft_s=-1.0)

    assert best_fit(fleet, late) is None
    assert least_pressed(fleet, late) == 1


def test_prompts_must_fit_in_theta_times_the_bank() -> None:
    # theta x 0.1 s = 0.09 s hold 0.01 + 1e-4 x 800.
    fleet = Fleet([make_model()], tightness=Tightness(theta=0.9))
    fleet.set_requests(0, np.array([50.0]), np.array([20.0]), bank_s=0.1)

    assert best_fit(fleet, Demand(800, 10.0)) == 0
    assert best_fit(fleet, Demand(801, 10.0)) is None
    assert "(d) prompts within the bank" in why_infeasible(fleet, Demand(801, 10.0))


def test_chunked_prompts_run_beside_decodes_that_keep_their_pace() -> None:
    # One decode of 100 tokens takes 0.0102 s a token of 0.0204 allowed: half of the time is free.
    fleet = Fleet([make_model()], tightness=STRICT, is_chunked=True)
    fleet.set_requests(0, np.array([100.0]), np.array([9.0]), bank_s=0.02, tpot_s=0.0204)

    # Until the first token is due, 0.2 s: 0.1 s and the bank of 0.02 s hold 0.01 + 1e-4 x 1100.
    assert best_fit(fleet, Demand(1100, 10.0, ttft_s=0.2, tpot_s=0.0204)) == 0
    assert best_fit(fleet, Demand(1101, 10.0, ttft_s=0.2, tpot_s=0.0204)) is None
    assert "(c, d) prompts beside" in why_infeasible(fleet, Demand(1101, 10.0, ttft_s=0.2))


def test_slots_are_a_constraint() -> None:
    fleet = Fleet([make_model()], max_requests=2)
    pack(fleet, [Demand(1, 1.0), Demand(1, 1.0)])

    with pytest.raises(InfeasibleError, match="slots would be 3 of 2 requests"):
        pack(fleet, [Demand(1, 1.0)])


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=12))
def test_peak_memory_is_the_largest_over_all_steps(requests: list[tuple[int, int]]) -> None:
    held, left = (np.array(x, dtype=np.float64) for x in zip(*requests, strict=True))

    by_steps = max(
        sum(h + step for h, n in requests if n >= step) for step in range(int(left.max()) + 1)
    )

    assert peak_tokens(held, left) == by_steps


def test_memory_is_checked_at_every_future_step() -> None:
    # The long one ends with 100 tokens, when the short one has gone; while both run, the short one
    # at its end, there are 10 + 5 + prompt + 5.
    model = make_model(capacity=100.0)
    fleet = Fleet([model])
    fleet.add(0, Demand(10, 90.0))

    assert best_fit(fleet, Demand(35, 5.0)) == 0
    assert best_fit(fleet, Demand(80, 5.0)) == 0
    assert best_fit(fleet, Demand(81, 5.0)) is None
    assert "(e) KV memory would be 101 of 100 tokens" in why_infeasible(fleet, Demand(81, 5.0))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(demands, min_size=1, max_size=14),
    st.floats(0.0, 1.0),
    st.floats(0.3, 1.0),
    st.integers(900, 6000),
    st.integers(2, 20),
    st.booleans(),
)
def test_no_placement_breaks_a_constraint(
    requests: list[Demand], gamma: float, theta: float, capacity: int, slots: int, relative: bool
) -> None:
    tightness = Tightness(gamma, theta)
    models = [make_model(capacity=float(capacity)), make_model(capacity=2.0 * capacity)] * 4
    fleet = Fleet(models, slots, tightness=tightness)
    placed: list[list[Demand]] = [[] for _ in models]

    for demand in requests:
        i = best_fit(fleet, demand, is_relative=relative)
        feasible = [
            k
            for k, model in enumerate(models)
            if is_allowed(model, [*placed[k], demand], tightness, slots)
        ]
        assert (i is None) == (not feasible)
        if i is not None:
            assert i in feasible
            fleet.add(i, demand)
            placed[i].append(demand)


@settings(max_examples=60, deadline=None)
@given(st.lists(demands, min_size=1, max_size=20), st.integers(1200, 6000))
def test_best_fit_opens_an_instance_only_when_no_open_one_can_take_the_request(
    requests: list[Demand], capacity: int
) -> None:
    model = make_model(capacity=float(capacity))
    fleet = Fleet([model] * len(requests))

    for demand in requests:
        used = fleet.num_requests > 0
        can_join = [k for k in np.flatnonzero(used) if _takes(fleet, int(k), demand)]
        i = best_fit(fleet, demand)
        assert i is not None  # an instance of its own takes every one of these
        assert used[i] == bool(can_join)
        if can_join:
            norms = np.hypot(fleet.num_requests, fleet.context)
            assert norms[i] == max(norms[k] for k in can_join)
        fleet.add(i, demand)

    assert np.count_nonzero(fleet.num_requests) <= len(requests)


def _takes(fleet: Fleet, i: int, demand: Demand) -> bool:
    return bool(fleet.feasible(demand)[i]) and fleet.kv_fits(i, demand)


@settings(max_examples=12, deadline=None)
@given(st.lists(demands, min_size=3, max_size=7), st.integers(1200, 3000))
def test_the_optimum_is_feasible_and_never_above_best_fit(
    requests: list[Demand], capacity: int
) -> None:
    model = make_model(capacity=float(capacity))
    tightness = Tightness(gamma=0.5, theta=0.9)
    empty = Fleet([model] * 4, tightness=tightness)

    try:
        used = len(set(pack(Fleet([model] * 4, tightness=tightness), requests)))
    except InfeasibleError:
        used = 5
    try:
        exact = place_exactly(empty, requests)
    except InfeasibleError:
        assert used == 5
        return

    assert exact.is_optimal
    assert exact.num_used <= used
    for i in range(4):
        mine = [d for d, k in zip(requests, exact.instances, strict=True) if k == i]
        assert is_allowed(model, mine, tightness)


def test_the_optimum_respects_what_runs_already() -> None:
    model = make_model(capacity=1000.0)
    fleet = Fleet([model] * 3, tightness=STRICT)
    fleet.set_requests(0, np.array([500.0]), np.array([300.0]), bank_s=0.5)
    fleet.set_requests(1, np.array([100.0]), np.array([10.0]), bank_s=0.015)
    new = [Demand(150, 40.0, ttft_s=1.0, tpot_s=0.05)]

    exact = place_exactly(fleet, new)

    # Instance 1 has a bank for 50 prompt tokens only; 0 has room: 500 + 40 + 190 < 1000.
    assert exact.instances == [0]
    assert exact.num_used == 2
    assert best_fit(fleet, new[0]) == 0


def test_the_optimum_takes_the_cheapest_instances() -> None:
    slow = make_model(capacity=1000.0)
    fast = make_model(capacity=3000.0)
    new = [Demand(300, 100.0, ttft_s=1.0, tpot_s=0.05)] * 4

    cheap = place_exactly(Fleet([slow, slow, fast]), new, prices=[1.0, 1.0, 5.0])
    dear = place_exactly(Fleet([slow, slow, fast]), new, prices=[1.0, 1.0, 1.5])

    assert set(cheap.instances) == {0, 1}
    assert set(dear.instances) == {2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prices": [1.0, -2.0]}, "finite number > 0"),
        ({"prices": [1.0]}, "each of 2 instances"),
        ({"demands": [Demand(5, 5.0, 1.0, 0.05), Demand(5, 5.0, 2.0, 0.05)]}, "same targets"),
    ],
)
def test_the_program_refuses_what_it_cannot_solve(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"demands": [Demand(5, 5.0, 1.0, 0.05)]} | change

    with pytest.raises(ConfigError, match=message):
        place_exactly(Fleet([make_model()] * 2), **arguments)  # type: ignore[arg-type]


def test_a_model_that_fits_nowhere_is_said_with_numbers() -> None:
    with pytest.raises(InfeasibleError, match=r"\(e\) KV memory would be 12000 of 10000 tokens"):
        pack(Fleet([make_model()] * 3), [Demand(11_000, 1000.0)])
    with pytest.raises(InfeasibleError, match="1 requests must fit on 3 instances"):
        place_exactly(Fleet([make_model()] * 3), [Demand(11_000, 1000.0)])


def test_split_phase_pools_check_their_own_constraints() -> None:
    model = make_model(capacity=2000.0)
    prefill = Fleet([model], phase=Phase.PREFILL)
    decode = Fleet([model], phase=Phase.DECODE)
    tight = Demand(500, 400.0, ttft_s=0.07, tpot_s=0.011)

    # Prefill: (c) alone: 0.01 + 0.05 s of 0.07; a second prompt would be late.
    assert best_fit(prefill, tight) == 0
    prefill.add(0, tight)
    assert best_fit(prefill, tight) is None
    # Decode: (b) and (e): theta (0.011 - 0.01 - 1e-4) / 1e-6 = 810 tokens hold one, no second.
    assert best_fit(decode, replace(tight, ttft_s=-5.0)) == 0
    decode.add(0, tight)
    assert best_fit(decode, tight) is None
    assert best_fit(decode, replace(tight, tpot_s=0.012)) is None  # the one there is tighter


def test_unequal_instances_are_ranked_by_what_they_allow() -> None:
    # 30 requests of 100 tokens are half of a small GPU's memory, and little for a large one.
    small, large = make_model(capacity=6_000.0), make_model(capacity=60_000.0)
    fleet = Fleet([large, small], [256, 64])
    for _ in range(20):
        fleet.add(0, Demand(50, 50.0, tpot_s=0.05))
    for _ in range(15):
        fleet.add(1, Demand(50, 50.0, tpot_s=0.05))

    assert best_fit(fleet, Demand(50, 50.0, tpot_s=0.05)) == 0
    assert best_fit(fleet, Demand(50, 50.0, tpot_s=0.05), is_relative=True) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Demand(0, 5.0),
        lambda: Demand(5, math.nan),
        lambda: Demand(5, -1.0),
        lambda: Demand(5, 5.0, tpot_s=0.0),
        lambda: Demand(5, 5.0, ttft_s=math.nan),
        lambda: Tightness(gamma=1.5),
        lambda: Tightness(theta=0.0),
        lambda: Fleet([]),
        lambda: Fleet([make_model()], 0),
    ],
)
def test_values_out_of_range_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="must"):
        wrong()  # type: ignore[operator]
