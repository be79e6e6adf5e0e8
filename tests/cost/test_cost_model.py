"""The cost model: what it predicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_costs import (
    make_model,
    make_shape,
    models,
    shapes,
)

from sola_sched.compiled.functions import as_it_stands
from sola_sched.cost import times
from sola_sched.cost.model import MAX_TOKENS, CostModel, StepShape


def test_each_phase_follows_its_equation() -> None:
    model = make_model()

    assert model.prefill_s(100.0, 50.0) == pytest.approx(
        2e-9 * 50 * 100 + 1e-9 * 100**2 + 6e-5 * 100 + 8e-3
    )
    assert model.decode_s(10.0, 5000.0) == pytest.approx(5e-5 * 10 + 1e-7 * 5000 + 9e-3)
    assert model.prefill_s(100.0, 50.0) - model.prefill_marginal_s(100.0, 50.0) == pytest.approx(
        8e-3
    )


def test_mixed_step_pays_the_shared_constant_once() -> None:
    model = make_model()
    shape = make_shape(num_decodes=10, ctx=5000, chunk=100, has=50)
    phases = model.prefill_s(100.0, 50.0) + model.decode_s(10.0, 5000.0)

    assert model.step_s(shape) == pytest.approx(phases - 7.5e-3)


@pytest.mark.parametrize("has", [0, 3000])
def test_a_prompt_in_chunks_takes_what_its_chunks_take(has: int) -> None:
    chunk_s, chunks_s = map(as_it_stands, (times.chunk_s, times.chunks_s))
    at = make_model()._times
    for most, starts in ((256, range(0, 1024, 256)), (4096, [0])):
        each = [chunk_s(at, min(most, 1024), has + start) for start in starts]
        assert chunks_s(at, 1024, has, most) == pytest.approx(sum(each))


def test_step_without_work_takes_no_time() -> None:
    assert make_model().step_s(make_shape()) == 0.0


def test_arrays_give_the_scalars_elementwise_without_overflow() -> None:
    model = make_model()
    new = np.array([1, 512, 100_000], dtype=np.int32)
    has = np.array([0, 10, 100_000], dtype=np.int32)

    assert model.prefill_s(new, has) == pytest.approx(
        [model.prefill_s(float(n), float(h)) for n, h in zip(new, has, strict=True)]
    )
    assert model.prefill_marginal_s(new) == pytest.approx(
        [model.prefill_marginal_s(float(n)) for n in new]
    )
    assert model.decode_s(new, has) == pytest.approx(
        [model.decode_s(float(n), float(h)) for n, h in zip(new, has, strict=True)]
    )


@given(models(), shapes, shapes)
def test_predictions_are_finite_and_monotone(
    model: CostModel, shape: StepShape, more: StepShape
) -> None:
    larger = StepShape(*(getattr(shape, name) + getattr(more, name) for name in StepShape._fields))

    predicted = model.step_s(shape)

    assert 0.0 <= predicted < math.inf
    assert predicted <= model.step_s(larger) * (1 + 1e-12)


@given(
    models(),
    st.floats(-1.0, 50.0),
    st.integers(0, 64),
    st.integers(0, 10**5),
    st.integers(0, 10**4),
)
def test_largest_chunk_fits_and_one_more_does_not(
    model: CostModel, budget: float, num_decodes: int, ctx: int, has: int
) -> None:
    chunk = model.max_prefill_tokens(budget, num_decodes, ctx, has)

    def step(tokens: float) -> float:
        return model.step_s(StepShape(num_decodes, ctx, tokens, tokens**2, has * tokens))  # type: ignore[arg-type]

    assert 0.0 <= chunk <= MAX_TOKENS
    if chunk > 0.0:
        assert step(chunk) <= budget + 1e-6 * abs(budget)
    if chunk < MAX_TOKENS:
        larger = chunk * 1.001 + 1e-3
        assert step(larger) >= budget - 1e-6 * abs(budget)


@pytest.mark.parametrize(
    ("budget", "expected"), [(math.inf, MAX_TOKENS), (math.nan, 0.0), (-1.0, 0.0), (0.0, 0.0)]
)
def test_largest_chunk_of_an_unusual_budget(budget: float, expected: float) -> None:
    assert make_model().max_prefill_tokens(budget, 4, 1000) == expected
    assert make_model().max_prefill_tokens(budget, 0, 0) == expected
