"""A correction whose kind of step does not run, perhaps because of it, does not rule for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_costs import make_model, make_shape, random_shapes

from sola_sched.cost import gamma, online
from sola_sched.cost.fit import kind_of
from sola_sched.cost.gamma import MOST_PATIENCE, PATIENCE
from sola_sched.cost.model import CostModel, StepShape

PREFILL = make_shape(chunk=300)
DECODE = make_shape(num_decodes=10, ctx=5000)
MIXED = make_shape(num_decodes=10, ctx=5000, chunk=300)
SHAPES = (PREFILL, DECODE, MIXED)
#: Right steps after which a planner knows what it knew: see `Correction.far`.
ENOUGH = 2 * PATIENCE
#: A factor of a kind that does not run may stay 5 % off; a few bits are rounding.
CLOSE = 1.055

kinds = st.sampled_from(range(3))
#: Steps of a kind that are all wrong by a factor: slow ones while something is compiled, or idle
#: time, or quick ones. Three rows of 20 at most: nothing is old yet when the right steps begin.
wrong_starts = st.lists(
    st.tuples(kinds, st.floats(0.01, 1000.0), st.integers(1, 20)), min_size=1, max_size=3
)


class Correction:
    """The factors of a cost model by themselves."""

    def __init__(self) -> None:
        self._model = online.new_model(0.1)
        self.gamma = self._model["gamma"][0]

    def update(self, kind: int, ratio: float) -> None:
        gamma.update(self._model[0], kind, ratio)

    def replay(self, ratios: list[list[float]]) -> None:
        rows = np.zeros((3, max(map(len, ratios))))
        for row, values in zip(rows, ratios, strict=True):
            row[: len(values)] = values
        online.replay(self._model, rows, np.array([len(values) for values in ratios]))


def observe(model: CostModel, truth: CostModel, shape: StepShape, factor: float = 1.0) -> None:
    model.observe(shape, factor * truth.step_s(shape))


def room(model: CostModel) -> list[float]:
    """Tokens for which a planner finds time beside decodes, beside few, and alone."""
    return [model.max_prefill_tokens(0.08, *decodes) for decodes in ((10, 5000), (1, 10), (0, 0))]


@settings(max_examples=25)
@given(wrong_starts, st.sets(kinds, min_size=1), st.integers(0, 10))
def test_right_steps_of_any_kinds_bring_planning_back_from_any_wrong_start(
    start: list[tuple[int, float, int]], running: set[int], seed: int
) -> None:
    truth, model = make_model(), make_model()
    for kind, factor, count in start:
        for _ in range(count):
            observe(model, truth, SHAPES[kind], factor)

    for shape in steps_of(running, seed):
        observe(model, truth, shape)

    assert room(model) == pytest.approx(room(truth), rel=0.12)
    for kind in running:
        assert model.step_s(SHAPES[kind]) == pytest.approx(truth.step_s(SHAPES[kind]), rel=0.12)


def steps_of(running: set[int], seed: int) -> Iterator[StepShape]:
    """`ENOUGH` steps, all of these kinds."""
    shapes = random_shapes(np.random.default_rng(seed))
    return itertools.islice((s for s in shapes if kind_of(s) in running), ENOUGH)


def test_slow_lone_prompts_at_start_do_not_keep_prompts_from_decodes() -> None:
    truth, model = make_model(), make_model()
    for _ in range(8):
        observe(model, truth, PREFILL, 60.0)
    for _ in range(10):
        observe(model, truth, DECODE)
    assert model.max_prefill_tokens(0.08, 10, 5000) == 0.0

    num_steps = 10
    while model.max_prefill_tokens(0.08, 10, 5000) < 0.3 * truth.max_prefill_tokens(0.08, 10, 5000):
        observe(model, truth, DECODE)
        num_steps += 1
        assert num_steps <= PATIENCE + 10


@pytest.mark.parametrize("apart", [100, 300, 500, 2000])
@pytest.mark.parametrize("factor", [0.7, 1.3, 1.8])
def test_a_rare_kind_that_is_right_about_its_factor_keeps_it(apart: int, factor: float) -> None:
    """A single user: a prompt alone, then nothing but decodes."""
    truth, model = make_model(), make_model()

    for _ in range(40):
        observe(model, truth, PREFILL, factor)
        for _ in range(apart):
            observe(model, truth, DECODE)

    assert model.gamma.prefill == pytest.approx(factor, rel=0.06)


def test_a_slow_first_step_after_a_long_while_restores_a_stale_factor_by_one_steps_worth() -> None:
    truth, model = make_model(), make_model()
    for _ in range(8):
        observe(model, truth, PREFILL, 60.0)
    for _ in range(ENOUGH):
        observe(model, truth, DECODE)

    observe(model, truth, PREFILL, 60.0)

    # Twice the factor that had faded, and a tenth of that by Eq. 5.
    assert model.gamma.prefill <= CLOSE * 2.0 * 1.1


def test_a_kind_that_was_confirmed_again_and_again_is_corrected_in_the_end() -> None:
    correction = Correction()
    for _ in range(20):
        correction.update(0, 1.8)
        for _ in range(1000):
            correction.update(1, 1.0)
    assert correction.gamma[0] == pytest.approx(1.8, rel=0.06)

    for _ in range(2 * MOST_PATIENCE):
        correction.update(1, 1.0)

    assert correction.gamma[0] <= CLOSE


def test_a_stale_factor_stays_one_when_coefficients_are_fitted_anew() -> None:
    correction = Correction()
    for _ in range(8):
        correction.update(0, 60.0)
    for _ in range(ENOUGH):
        correction.update(1, 1.0)

    correction.replay([[60.0] * 8, [1.0] * 32, []])

    assert correction.gamma[0] <= CLOSE


def test_a_kind_that_runs_does_not_lean_on_a_stale_one_when_coefficients_are_fitted_anew() -> None:
    correction = Correction()
    for _ in range(8):
        correction.update(2, 200.0)
    for _ in range(ENOUGH):
        correction.update(1, 1.0)

    correction.replay([[1.0] * 20, [1.0] * 32, [200.0] * 10])

    assert correction.gamma[1] == pytest.approx(1.0)
    assert correction.gamma[2] <= CLOSE


@pytest.mark.parametrize("slow", [PREFILL, MIXED], ids=["alone", "beside decodes"])
@pytest.mark.parametrize("count", [8, 40])
def test_a_model_that_has_seen_slow_prompts_only_learns_them_anew(
    slow: StepShape, count: int
) -> None:
    """Without a profile, what is wrong is in the coefficients, and no factor corrects them."""
    truth, model = make_model(), CostModel()
    for _ in range(count):
        observe(model, truth, slow, 60.0)
    for _ in range(ENOUGH):
        observe(model, truth, DECODE)
    assert not model.is_ready, "so prompts are let in as by the engine itself"

    for chunk in (100, 200, 300, 400, 500, 600, 700, 800):
        observe(model, truth, make_shape(num_decodes=10, ctx=5000, chunk=chunk))

    assert model.is_ready
    for shape in (MIXED, DECODE):
        assert model.step_s(shape) == pytest.approx(truth.step_s(shape), rel=0.12)


def test_prompts_that_are_no_slower_than_they_are_stay_known_however_rare_they_are() -> None:
    truth, model = make_model(), CostModel()
    for chunk in range(100, 900, 20):
        observe(model, truth, make_shape(chunk=chunk))

    for _ in range(10 * ENOUGH):
        observe(model, truth, DECODE)

    assert model.is_ready
    assert model.step_s(PREFILL) == pytest.approx(truth.step_s(PREFILL), rel=0.06)
