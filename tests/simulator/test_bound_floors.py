"""What no step can be shorter than, and the bound that rests on it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from bound_traces import ROOFLINE, WIDE, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.cost.file import Coefficients
from sola_sched.cost.model import CostModel
from sola_sched.simulator import (
    LLAMA_3_8B_A100,
    MeasuredStepTime,
    StepTimeModel,
    load_step_profile,
    profile_names,
)
from sola_sched.simulator.bound.floors import StepFloor, floors_of
from sola_sched.simulator.bound.upper import upper_bound


def test_every_floor_of_a_step_time_counts():
    compute, memory = StepFloor(0.001, per_prefill_token_s=1e-4), StepFloor(0.01)

    class Roofline:
        def floors(self):
            return [compute, memory]

    trace = make_trace(200, 15.0)

    both = upper_bound(trace, Roofline(), **WIDE).num_attainable

    assert both <= upper_bound(trace, compute, **WIDE).num_attainable
    assert both <= upper_bound(trace, memory, **WIDE).num_attainable


def test_a_step_time_without_floors_is_refused():
    with pytest.raises(TypeError, match=r"method floors\(\) \(got function\)"):
        upper_bound([], lambda output, requests: 1.0, **WIDE)


MEASURED = MeasuredStepTime(
    CostModel.from_coefficients(
        Coefficients(a0=2e-8, b0=5e-9, c0=1e-4, d0=4e-3, a1=3e-5, b1=1e-7, c1=7e-3, overlap=3e-3)
    )
)
STEP_TIMES = {
    "linear": LLAMA_3_8B_A100,
    "measured": MEASURED,
    "smooth": replace(ROOFLINE, overlap_power=2.0),
    **{name: load_step_profile(name).step_time for name in profile_names()},
}


@pytest.mark.parametrize("name", sorted(STEP_TIMES))
@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(
        st.tuples(st.just(1) | st.integers(1, 3000), st.integers(0, 5000), st.booleans()),
        min_size=1,
        max_size=300,
    )
)
def test_no_step_is_shorter_than_its_floors(name, batch):
    step_time = STEP_TIMES[name]
    scheduled = {str(i): n for i, (n, _, _) in enumerate(batch)}
    requests = {}
    for i, (n, has, decodes) in enumerate(batch):
        total = has + n
        num_prompt = max(1, has) if decodes and n == 1 else total + 1
        requests[str(i)] = SimpleNamespace(
            num_computed_tokens=total,
            num_prompt_tokens=num_prompt,
            num_tokens=max(num_prompt, total),
        )
    measured_s = step_time(SimpleNamespace(num_scheduled_tokens=scheduled), requests)

    for floor in floors_of(step_time):
        low_s = floor.base_s
        for n, has, _ in batch:
            prefill_s = floor.per_prefill_token_s * n
            prefill_s += floor.per_prefill_attn_s * n * (has + 0.5 * n)
            decode_s = floor.per_decode_s + floor.per_ctx_s * has
            low_s += prefill_s if n > 1 else min(decode_s, prefill_s)
        assert low_s <= measured_s * (1 + 1e-9)


def test_a_roofline_is_bounded_by_both_of_its_sides():
    def bound(**terms):
        model = StepTimeModel(base_s=1e-3, per_ctx_s=8e-8, **terms)
        return upper_bound(make_trace(300, 12.0), model, **WIDE).num_attainable

    both = bound(weights_s=1e-2, per_token_s=9e-5)

    assert both <= bound(per_token_s=9e-5) < 300
    assert both <= bound(weights_s=1e-2)
    # Less than the sum of both sides costs.
    assert both > bound(weights_s=1e-2, per_decode_s=9e-5, per_prefill_token_s=9e-5)
