"""The bound itself: what it follows, what lowers it, what it refuses."""

from __future__ import annotations

import math

import pytest
from bound_traces import SLO, WIDE, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.config.slo import SloTarget
from sola_sched.simulator import (
    LLAMA_3_8B_A100,
)
from sola_sched.simulator.bound import program as bound_program
from sola_sched.simulator.bound.upper import BoundRequest, upper_bound


def test_all_requests_of_an_idle_engine_are_attainable():
    trace = make_trace(100, 0.2)

    bound = upper_bound(trace, LLAMA_3_8B_A100, max_num_batched_tokens=8192, **WIDE)

    assert (bound.num_attainable, bound.num_impossible) == (100, {})


@pytest.mark.parametrize(
    ("slo", "reason"),
    [
        (SloTarget(0.01, 1.0), "ttft"),
        (SloTarget(100.0, 0.01), "tpot"),
        (SloTarget(e2e_s=0.1), "e2e"),
    ],
)
def test_impossible_targets_give_zero_and_the_reason(slo, reason):
    trace = [BoundRequest(float(i), 200, 20, slo) for i in range(10)]

    bound = upper_bound(trace, LLAMA_3_8B_A100, **WIDE)

    assert (bound.num_attainable, bound.num_impossible) == (0, {reason: 10})


def test_a_request_larger_than_the_cache_is_impossible():
    trace = [BoundRequest(0.0, 90, 11, SloTarget()), BoundRequest(0.0, 90, 12, SloTarget())]

    bound = upper_bound(trace, LLAMA_3_8B_A100, max_num_seqs=8, num_kv_tokens=100)

    assert (bound.num_attainable, bound.num_impossible) == (1, {"kv": 1})


def test_requests_without_targets_are_always_attainable():
    trace = make_trace(300, 100.0, slo=SloTarget())

    assert upper_bound(trace, LLAMA_3_8B_A100, **WIDE).num_attainable == 300


def test_an_empty_trace_has_a_bound_of_zero():
    bound = upper_bound([], LLAMA_3_8B_A100, **WIDE)

    assert bound.num_attainable == 0
    assert math.isnan(bound.attainable_ratio)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 100),
    rate_per_s=st.floats(2.0, 40.0),
    ttft_s=st.floats(0.1, 3.0),
    tpot_s=st.floats(0.012, 0.3),
    ttft_factor=st.floats(1.0, 3.0),
    tpot_factor=st.floats(1.0, 3.0),
)
def test_looser_targets_never_lower_the_bound(
    seed, rate_per_s, ttft_s, tpot_s, ttft_factor, tpot_factor
):
    tight, loose = SloTarget(ttft_s, tpot_s), SloTarget(ttft_s * ttft_factor, tpot_s * tpot_factor)

    def bound(slo):
        trace = make_trace(60, rate_per_s, seed=seed, slo=slo)
        return upper_bound(trace, LLAMA_3_8B_A100, **WIDE)

    below, above = bound(tight), bound(loose)

    # Rows are added until they change less than this.
    assert below.relaxed <= above.relaxed + 0.1


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        ({"max_num_seqs": 4}, "slots"),
        ({"num_kv_tokens": 9000}, "kv"),
        ({"max_num_batched_tokens": 64}, "tokens"),
    ],
)
def test_a_limit_that_binds_lowers_the_bound_and_is_named(limit, kind):
    trace = make_trace(400, 6.0)

    free = upper_bound(trace, LLAMA_3_8B_A100, **WIDE)
    limited = upper_bound(trace, LLAMA_3_8B_A100, **(WIDE | limit))

    assert limited.num_attainable < 0.97 * free.num_attainable
    assert limited.num_binding[kind] >= 1


def test_tight_tpot_costs_steps():
    # The same work, but steps of 10 ms must come every 14 ms instead of every 100 ms.
    def bound(tpot_s):
        trace = make_trace(300, 7.0, slo=SloTarget(0.5, tpot_s))
        return upper_bound(trace, LLAMA_3_8B_A100, **WIDE)

    tight = bound(0.014)

    assert tight.num_attainable < 0.9 * bound(0.1).num_attainable
    assert tight.num_binding["pace"] >= 1


def test_a_burst_is_limited_by_its_prefill_work():
    # 0.8 s less one step hold 8 prompts of 1,000 tokens (95 ms each).
    trace = [BoundRequest(5.0, 1000, 1, SLO) for _ in range(50)]

    assert upper_bound(trace, LLAMA_3_8B_A100, **WIDE).num_attainable == 8


def test_stopping_early_keeps_the_bound_valid(monkeypatch):
    trace = make_trace(150, 12.0)
    full = upper_bound(trace, LLAMA_3_8B_A100, **WIDE)
    monkeypatch.setattr(bound_program, "_MAX_ROUNDS", 1)

    early = upper_bound(trace, LLAMA_3_8B_A100, **WIDE)

    assert full.is_converged
    assert not early.is_converged
    assert full.num_attainable <= early.num_attainable < 150


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "'max_num_seqs' must be >= 1"),
        ({"num_kv_tokens": 0}, "'num_kv_tokens' must be >= 1"),
        ({"max_num_batched_tokens": 0}, "'max_num_batched_tokens' must be >= 1"),
    ],
)
def test_invalid_limits_name_the_rule(limits, message):
    with pytest.raises(ValueError, match=message):
        upper_bound([], LLAMA_3_8B_A100, **(WIDE | limits))


def test_a_request_without_tokens_is_refused():
    with pytest.raises(ValueError, match=">= 1 prompt and output token"):
        upper_bound([BoundRequest(0.0, 0, 1, SLO)], LLAMA_3_8B_A100, **WIDE)
