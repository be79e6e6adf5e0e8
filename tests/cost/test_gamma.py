"""The cost model's correction by what steps take."""

from __future__ import annotations

import math

import numpy as np
import pytest
from step_costs import (
    MAX_MEAN_ERROR,
    make_model,
    make_shape,
    mean_error,
    random_steps,
    scaled_model,
)

from sola_sched.cost.model import CostModel


def test_gamma_tracks_a_slowdown_within_fifty_steps() -> None:
    model = make_model()
    steps = random_steps(np.random.default_rng(1), 50, slowdown=1.5)

    for shape, time in steps:
        model.observe(shape, time)

    later = random_steps(np.random.default_rng(2), 300, slowdown=1.5)
    assert model.gamma.decode == pytest.approx(1.5, rel=0.1)
    assert model.gamma.mixed == pytest.approx(1.5, rel=0.1)
    assert mean_error(model, later) < 2 * MAX_MEAN_ERROR


def test_gamma_is_the_exponential_average_of_the_paper() -> None:
    model = make_model()
    shape = make_shape(num_decodes=4, ctx=1000)
    base = model.step_s(shape)

    model.observe(shape, 1.2 * base)
    model.observe(shape, 0.9 * base)

    assert model.gamma.decode == pytest.approx(0.1 * 0.9 + 0.9 * (0.1 * 1.2 + 0.9))


def test_gamma_of_an_unseen_kind_follows_a_seen_one_until_it_has_steps() -> None:
    model = make_model()
    decode, prefill = make_shape(num_decodes=4, ctx=1000), make_shape(chunk=512)
    base_decode, base_prefill = model.step_s(decode), model.step_s(prefill)

    model.observe(decode, 1.5 * base_decode)
    followed = model.gamma
    model.observe(prefill, base_prefill)

    assert followed == pytest.approx((1.05, 1.05, 1.05))
    assert model.gamma == pytest.approx((1.045, 1.05, 1.05))


@pytest.mark.parametrize("wrong", [0.1, 0.2, 5.0, 10.0])
@pytest.mark.parametrize("num_early", [1, 3, 6])
def test_a_kind_that_ran_a_few_times_early_follows_the_others(wrong: float, num_early: int) -> None:
    truth, model = make_model(), scaled_model(wrong)
    prefill, decode = make_shape(chunk=512), make_shape(num_decodes=8, ctx=4000)

    for shape in [prefill] * num_early + [decode] * 60:
        model.observe(shape, truth.step_s(shape))

    assert model.decode_s(8.0, 4000.0) == pytest.approx(truth.step_s(decode), rel=0.05)
    assert model.prefill_s(512.0) == pytest.approx(truth.step_s(prefill), rel=0.6)
    assert model.step_s(make_shape(num_decodes=8, ctx=4000, chunk=512)) == pytest.approx(
        truth.step_s(make_shape(num_decodes=8, ctx=4000, chunk=512)), rel=0.6
    )


@pytest.mark.parametrize("wrong", [0.1, 0.2, 5.0, 10.0])
def test_eight_steps_of_a_kind_far_off_to_one_side_correct_it_at_once(wrong: float) -> None:
    truth, model = make_model(), scaled_model(wrong)
    decode, chunk = make_shape(num_decodes=8, ctx=4000), make_shape(chunk=512)

    for _ in range(8):
        model.observe(decode, truth.step_s(decode))

    assert model.gamma == pytest.approx((1 / wrong,) * 3)
    assert model.step_s(chunk) == pytest.approx(truth.step_s(chunk))


def test_outliers_between_usual_steps_never_correct_at_once() -> None:
    model = make_model()
    shape = make_shape(num_decodes=8, ctx=4000)
    base = model.step_s(shape)

    for turn in range(20):
        for time in (*[50.0 * base] * 7, base):
            model.observe(shape, time)
            assert model.gamma.decode < 1.1 ** (7 * turn + 8)
        for _ in range(60):
            model.observe(shape, base)
        assert model.gamma.decode == pytest.approx(1.0, rel=0.01)


def test_a_kind_with_many_steps_keeps_its_own_factor() -> None:
    model = make_model()
    decode, chunk = make_shape(num_decodes=8, ctx=4000), make_shape(chunk=512)
    decode_s, chunk_s = model.step_s(decode), model.step_s(chunk)

    for _ in range(80):
        model.observe(chunk, 1.3 * chunk_s)
        model.observe(decode, decode_s)
    for _ in range(200):
        model.observe(decode, decode_s)

    assert model.gamma.prefill == pytest.approx(1.3, rel=0.01)
    assert model.gamma.decode == pytest.approx(1.0, rel=0.01)


def test_one_idle_gap_barely_moves_gamma() -> None:
    model = make_model()
    shape = make_shape(num_decodes=4, ctx=1000)

    model.observe(shape, 1000.0)

    assert model.gamma.decode == pytest.approx(1.1)


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(time: float) -> None:
    model = CostModel()

    model.observe(make_shape(num_decodes=1, ctx=1), time)
    model.observe(make_shape(), 1.0)

    assert model.num_observed == 0
    assert math.isnan(model.mean_abs_error)


def test_running_error_compares_the_prediction_before_the_update() -> None:
    model = make_model()
    shape = make_shape(num_decodes=4, ctx=1000)

    model.observe(shape, 2.0 * model.step_s(shape))

    assert model.mean_abs_error == pytest.approx(0.5)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, math.nan])
def test_alpha_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="'alpha' must be in"):
        CostModel(alpha=alpha)
