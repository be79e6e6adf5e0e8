"""The cost model is fitted to steps, offline and live."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls
from step_costs import (
    MAX_MEAN_ERROR,
    NOISE,
    TRUTH,
    make_model,
    make_shape,
    mean_error,
    random_steps,
    shapes,
    times,
)

from sola_sched.cost.fit import NUM_FEATURES, solve_nonnegative
from sola_sched.cost.model import CostModel, StepShape
from sola_sched.errors import ProfileError


def test_live_steps_recover_the_truth_despite_warm_up_outliers() -> None:
    model = CostModel()
    steps = random_steps(np.random.default_rng(3), 600)

    for index, (shape, time) in enumerate(steps):
        model.observe(shape, time * 30 if index < 5 else time)

    assert model.is_ready
    assert model.is_learning
    exact = [(shape, make_model().step_s(shape)) for shape, _ in steps]
    assert mean_error(model, exact) < MAX_MEAN_ERROR
    assert model.mean_abs_error < MAX_MEAN_ERROR


def test_offline_fit_recovers_the_truth() -> None:
    steps = random_steps(np.random.default_rng(4), 300)

    model = CostModel.fit(steps)

    exact = [(shape, make_model().step_s(shape)) for shape, _ in steps]
    assert model.is_ready
    assert not model.is_learning
    assert mean_error(model, exact) < MAX_MEAN_ERROR / 2
    assert model.coefficients.c0 == pytest.approx(TRUTH.c0, rel=0.05)


def test_mostly_mixed_steps_are_fitted_with_one_shared_constant() -> None:
    rng = np.random.default_rng(5)
    mixed = [
        step for step in random_steps(rng, 1000) if step[0].num_decodes and step[0].prefill_tokens
    ]

    model = CostModel.fit(mixed)

    found = model.coefficients
    assert mean_error(model, mixed) < MAX_MEAN_ERROR
    assert found.overlap > 0.8 * max(found.d0, found.c1)


def test_model_is_ready_only_with_both_phases() -> None:
    model = CostModel()
    truth = make_model()
    decode, mixed = make_shape(num_decodes=4, ctx=999), make_shape(num_decodes=4, ctx=9, chunk=64)

    for _ in range(100):
        model.observe(decode, truth.step_s(decode))
    with_decodes_only = model.is_ready
    for _ in range(3):
        model.observe(mixed, truth.step_s(mixed))
    with_three_prefills = model.is_ready
    model.observe(mixed, truth.step_s(mixed))

    assert not with_decodes_only
    assert not with_three_prefills
    assert model.is_ready


def test_where_nothing_decodes_prompts_alone_are_enough() -> None:
    model, truth, random = CostModel(), make_model(), np.random.default_rng(1)
    for number in range(64):
        assert not model.is_ready, number
        prompt = make_shape(chunk=int(random.integers(1, 2000)))
        model.observe(prompt, truth.step_s(prompt))
    prompt, decode = make_shape(chunk=777), make_shape(num_decodes=4, ctx=999)
    assert model.is_ready
    assert model.step_s(prompt) == pytest.approx(truth.step_s(prompt), rel=0.05)

    for number in range(10):  # they come all the same
        model.observe(decode, truth.step_s(decode))
        assert model.is_ready == (number >= 3), "until then they are guessed"
    assert model.step_s(decode) == pytest.approx(truth.step_s(decode), rel=0.05)
    assert model.step_s(prompt) == pytest.approx(truth.step_s(prompt), rel=0.05)


@pytest.mark.parametrize("lengths", [(8, 8), (8, 100), (700, 2000)])
def test_prompts_of_nearly_one_length_say_too_little(lengths: tuple[int, int]) -> None:
    """As health checks do: nobody knows what a token takes and what a step."""
    model, truth = CostModel(), make_model()
    for number in range(500):
        prompt = make_shape(chunk=lengths[number % 2])
        model.observe(prompt, truth.step_s(prompt))
    assert not model.is_ready


def test_model_is_not_ready_before_sixteen_steps() -> None:
    model = CostModel()

    for index, (shape, time) in enumerate(random_steps(np.random.default_rng(6), 40)):
        assert not model.is_ready or index >= 16
        model.observe(shape, time)

    assert model.is_ready


def test_steps_of_one_shape_are_predicted_and_prefill_is_not_free() -> None:
    shape = make_shape(num_decodes=4, ctx=1000)

    model = CostModel.fit([(shape, 0.01)] * 20)

    assert model.step_s(shape) == pytest.approx(0.01, rel=0.01)
    assert not model.is_ready
    assert model.prefill_marginal_s(100.0) > 0.0


def test_free_prefill_tokens_stay_free() -> None:
    """A step time that does not depend on prefill tokens is an answer, not a gap in the data."""
    steps = [(make_shape(chunk=chunk), 0.01) for chunk in (8, 64, 480)]
    steps += [(make_shape(num_decodes=n, ctx=100 * n), 1e-3 + 2e-4 * n) for n in (1, 4, 16)]

    model = CostModel.fit(steps * 20)

    assert model.prefill_s(480.0) == pytest.approx(0.01, rel=0.05)


def test_one_late_step_with_little_context_does_not_price_long_contexts() -> None:
    truth = make_model()
    model = CostModel()
    shapes = [make_shape(num_decodes=4, ctx=400), make_shape(num_decodes=4, ctx=400, chunk=64)]
    steps = [(shape, truth.step_s(shape)) for shape in shapes * 10]
    late = make_shape(num_decodes=4, ctx=400, chunk=64, has=4)
    steps.insert(3, (late, 5 * truth.step_s(late)))

    for shape, time in steps:
        model.observe(shape, time)

    assert model.is_ready
    assert model.prefill_s(1000.0, 4000.0) < 10 * truth.prefill_s(1000.0, 4000.0)


def test_surprising_steps_bring_the_next_fit_forward() -> None:
    model = CostModel()
    truth = make_model()
    for shape, time in random_steps(np.random.default_rng(8), 520):
        model.observe(shape, time)
    before = model.coefficients

    for ctx in (800, 80_000) * 80:
        # Context tokens now cost 20 times as much; no factor on the whole step explains that.
        shape = make_shape(num_decodes=8, ctx=ctx)
        model.observe(shape, truth.step_s(shape) + 19 * TRUTH.b1 * ctx)

    assert model.num_observed < 1024
    assert model.coefficients != before


def test_an_hour_of_decodes_does_not_unlearn_prefill() -> None:
    model = CostModel()
    rng = np.random.default_rng(7)
    truth = make_model()
    for shape, time in random_steps(rng, 600):
        model.observe(shape, time)

    for _ in range(3000):
        shape = make_shape(num_decodes=8, ctx=int(rng.integers(8000, 9000)))
        model.observe(shape, truth.step_s(shape) * rng.lognormal(0.0, NOISE))

    assert model.prefill_s(1000.0) == pytest.approx(truth.prefill_s(1000.0), rel=0.1)
    assert model.decode_s(100.0, 100_000.0) == pytest.approx(
        truth.decode_s(100.0, 100_000.0), rel=0.1
    )


@given(st.lists(st.tuples(shapes, times), min_size=1, max_size=40))
def test_learning_from_anything_keeps_predictions_finite(
    steps: list[tuple[StepShape, float]],
) -> None:
    model = CostModel()

    for shape, time in steps:
        model.observe(shape, time)

    for shape, _ in steps:
        assert 0.0 <= model.step_s(shape) < math.inf
    assert all(0.0 < gamma < math.inf for gamma in model.gamma)


def test_fit_without_a_usable_step_is_refused() -> None:
    with pytest.raises(ProfileError, match="2 steps, 0 usable"):
        CostModel.fit([(make_shape(), 1.0), (make_shape(chunk=1), math.nan)])


@given(st.integers(0, 2**32 - 1))
def test_solver_agrees_with_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(12, NUM_FEATURES))
    right = rng.normal(size=12)
    start = np.maximum(rng.normal(size=NUM_FEATURES), 0.0)

    found = solve_nonnegative(matrix.T @ matrix, matrix.T @ right, start)

    expected, _ = nnls(matrix, right)
    assert (found >= 0.0).all()
    # Both stop within rounding of the same optimum; normal equations square the condition number.
    assert np.linalg.norm(matrix @ found - right) == pytest.approx(
        np.linalg.norm(matrix @ expected - right), rel=1e-6
    )
