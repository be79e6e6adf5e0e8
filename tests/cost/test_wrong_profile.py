"""Live steps take over from a profile that is wrong, and from no other."""

from __future__ import annotations

import re

import numpy as np
import pytest
from step_costs import (
    MAX_MEAN_ERROR,
    NOISE,
    TRUTH,
    make_model,
    mean_error,
    random_steps,
)

from sola_sched.cost.model import Coefficients, CostModel


@pytest.mark.parametrize(
    "wrong",
    [
        {"c0": 10 * TRUTH.c0},
        {"c0": TRUTH.c0 / 10},
        {"a1": 20 * TRUTH.a1, "b1": 20 * TRUTH.b1},
        {"d0": 10 * TRUTH.d0, "c1": 10 * TRUTH.c1, "overlap": 10 * TRUTH.overlap},
    ],
    ids=["dear tokens", "cheap tokens", "dear decodes", "slow steps"],
)
def test_live_steps_take_over_from_a_profile_whose_error_stays_high(
    wrong: dict[str, float],
) -> None:
    model = make_model(**wrong)
    said: list[str] = []
    model.on_relearned = said.append
    assert not model.is_learning

    for shape, time in random_steps(np.random.default_rng(9), 600):
        model.observe(shape, time)

    assert model.is_relearned
    assert model.is_learning
    later = random_steps(np.random.default_rng(10), 300)
    assert mean_error(model, later) < 1.2 * MAX_MEAN_ERROR
    [message] = said
    assert re.search(r"profile are off by \d+\.\d%.* by \d+\.\d%.*learned from live", message)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_a_right_profile_stays_whatever_the_noise(noise: float, seed: int) -> None:
    model = make_model()

    for shape, time in random_steps(np.random.default_rng(seed), 3000, noise=noise):
        model.observe(shape, time)

    assert not model.is_relearned
    assert model.coefficients == TRUTH


def test_a_right_profile_stays_when_the_machine_becomes_slower() -> None:
    model, rng = make_model(), np.random.default_rng(11)

    for slowdown in (1.0, 1.6, 0.8, 3.0, 1.0):
        for shape, time in random_steps(rng, 300, slowdown=slowdown):
            model.observe(shape, time)

    assert not model.is_relearned


def test_what_live_steps_never_show_stays_as_the_profile_has_it() -> None:
    model, truth = make_model(c0=10 * TRUTH.c0), make_model()
    rng = np.random.default_rng(12)

    for shape, _ in random_steps(rng, 600):  # without any context before a chunk
        shape = shape._replace(prefill_ctx_tokens=0.0)
        model.observe(shape, truth.step_s(shape) * rng.lognormal(0.0, NOISE))

    assert model.is_relearned
    assert model.coefficients.a0 > 0.1 * TRUTH.a0


def test_prompts_alone_do_not_take_what_a_profile_knows_of_decodes() -> None:
    model, truth = make_model(c0=10 * TRUTH.c0), make_model()
    for shape, _ in random_steps(np.random.default_rng(15), 2000):  # answers of one token
        shape = shape._replace(num_decodes=0, decode_ctx_tokens=0)
        if shape.prefill_tokens:
            model.observe(shape, truth.step_s(shape))

    assert model.is_ready
    assert not model.is_relearned
    assert (model.coefficients.a1, model.coefficients.b1) == (TRUTH.a1, TRUTH.b1)


def test_coefficients_of_zero_are_learned_from_live_steps() -> None:
    model = CostModel.from_coefficients(Coefficients(*[0.0] * 8))

    for shape, time in random_steps(np.random.default_rng(13), 300):
        model.observe(shape, time)

    assert model.is_relearned
    assert mean_error(model, random_steps(np.random.default_rng(14), 300)) < MAX_MEAN_ERROR
