"""The cost model: prediction, correction, learning and the profile file."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from sola_sched.cost.fit import NUM_FEATURES, solve_nonnegative
from sola_sched.cost.model import MAX_TOKENS, Coefficients, CostModel, StepShape
from sola_sched.errors import ProfileError

#: About Llama-3-8B on one A100: 17 ms a step, 15k prefill tokens a second.
TRUTH = Coefficients(a0=2e-9, b0=1e-9, c0=6e-5, d0=8e-3, a1=5e-5, b1=1e-7, c1=9e-3, overlap=7.5e-3)
#: The paper's step error (section 6.4) on every step, our target.
MAX_MEAN_ERROR = 0.06
NOISE = 0.05


def make_shape(*, num_decodes: int = 0, ctx: int = 0, chunk: int = 0, has: int = 0) -> StepShape:
    return StepShape(num_decodes, ctx, chunk, float(chunk) ** 2, float(has) * chunk)


def make_model(**changes: float) -> CostModel:
    values = {name: getattr(TRUTH, name) for name in TRUTH.__slots__}
    return CostModel.from_coefficients(Coefficients(**(values | changes)))


def scaled_model(factor: float) -> CostModel:
    """The truth, all of it too large by a factor."""
    return make_model(**{name: factor * getattr(TRUTH, name) for name in TRUTH.__slots__})


def random_shapes(rng: np.random.Generator) -> Iterator[StepShape]:
    """Mostly decode-only and mixed steps, as a loaded server computes them."""
    while True:
        kind = rng.random()
        num_decodes = int(rng.integers(1, 128)) if kind > 0.1 else 0
        yield make_shape(
            num_decodes=num_decodes,
            ctx=int(num_decodes * rng.integers(50, 3000)),
            chunk=int(rng.integers(1, 2048)) if kind < 0.5 else 0,
            has=int(rng.integers(0, 4000)) if rng.random() < 0.3 else 0,
        )


def random_steps(
    rng: np.random.Generator, count: int, *, slowdown: float = 1.0, noise: float = NOISE
) -> list[tuple[StepShape, float]]:
    truth = make_model()
    shapes = random_shapes(rng)
    return [
        (shape, slowdown * truth.step_s(shape) * rng.lognormal(0.0, noise))
        for shape, _ in zip(shapes, range(count), strict=False)
    ]


def mean_error(model: CostModel, steps: list[tuple[StepShape, float]]) -> float:
    return float(np.mean([abs(model.step_s(shape) - time) / time for shape, time in steps]))


tokens = st.integers(0, 8192)
shapes = st.builds(
    make_shape,
    num_decodes=st.integers(0, 256),
    ctx=st.integers(0, 10**6),
    chunk=tokens,
    has=st.integers(0, 10**5),
)
times = st.floats(1e-6, 100.0)


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    """Models with any coefficients and any gammas that steps can bring about."""
    value = st.floats(0.0, 1.0)
    overlap, own_prefill, own_decode = draw(value), draw(value), draw(value)
    model = CostModel.from_coefficients(
        Coefficients(
            a0=draw(value) * 1e-6,
            b0=draw(value) * 1e-6,
            c0=draw(value) * 1e-3,
            d0=overlap + own_prefill,
            a1=draw(value),
            b1=draw(value) * 1e-3,
            c1=overlap + own_decode,
            overlap=overlap,
        ),
        alpha=1.0,
    )
    for shape, time in draw(st.lists(st.tuples(shapes, times), max_size=6)):
        model.observe(shape, time)
    return model


# ---- prediction


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

    assert model.paper_step_s(shape) == pytest.approx(phases)
    assert model.step_s(shape) == pytest.approx(phases - 7.5e-3)


def test_step_without_work_takes_no_time() -> None:
    assert make_model().step_s(make_shape()) == 0.0
    assert make_model().paper_step_s(make_shape()) == 0.0


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


# ---- correction


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


# ---- learning


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


# ---- taking over from a profile


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


def test_coefficients_of_zero_are_learned_from_live_steps() -> None:
    model = CostModel.from_coefficients(Coefficients(*[0.0] * 8))

    for shape, time in random_steps(np.random.default_rng(13), 300):
        model.observe(shape, time)

    assert model.is_relearned
    assert mean_error(model, random_steps(np.random.default_rng(14), 300)) < MAX_MEAN_ERROR


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


# ---- profile file


def test_profile_round_trip_keeps_predictions_and_provenance(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = make_model()

    model.save(path, meta={"machine": "a100", "error": 0.05})
    loaded = CostModel.load(path, alpha=0.5)

    assert loaded.coefficients == TRUTH
    assert loaded.is_ready
    assert loaded.meta == {"machine": "a100", "error": 0.05}
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    make_model().save(path, meta={})
    before = path.read_text()

    with pytest.raises(TypeError):
        make_model().save(path, meta={"bad": object()})

    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_unfitted_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="must have been fitted"):
        CostModel().save(tmp_path / "profile.json", meta={})


def _scale(document: dict[str, Any], factor: float) -> None:
    for entry in document["coefficients"].values():
        entry["value"] *= factor


def _change(document: dict[str, Any], name: str, value: Any) -> None:
    document["coefficients"][name]["value"] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "'format' must be"),
        (lambda d: d.update(version=99), "'version' must be 1"),
        (lambda d: d.update(coefficients=[]), "'coefficients' must hold"),
        (lambda d: d["coefficients"].pop("c0"), "'coefficients' must hold"),
        (lambda d: d["coefficients"]["c0"].update(unit="ms"), "'c0' must be in s/token"),
        (lambda d: d["coefficients"].update(c0=1.0), "'c0' must be in s/token"),
        (lambda d: d.update(meta=3), "'meta' must be an object"),
        (lambda d: _change(d, "c0", -1.0), "'c0' must be finite and >= 0"),
        (lambda d: _change(d, "c0", math.nan), "'c0' must be finite and >= 0"),
        (lambda d: _change(d, "c0", None), "'c0' must be finite and >= 0"),
        (lambda d: _change(d, "c0", True), "'c0' must be finite and >= 0"),
        (lambda d: _change(d, "overlap", 1.0), "'overlap' must not exceed"),
        (lambda d: _scale(d, 0.0), r"one decode must take 1e-06 to 30 s \(got 0 s\)"),
        (lambda d: _scale(d, 1e-5), r"one decode must take 1e-06 to 30 s \(got 9.05\d*e-08 s\)"),
        (lambda d: _scale(d, 1e4), r"one decode must take 1e-06 to 30 s \(got 90.501 s\)"),
        (lambda d: _change(d, "d0", 31.0), "one prompt token must take 1e-06 to 30 s"),
        (lambda d: _change(d, "c0", 5.0), r"a prompt of 1,000 tokens must take 1e-06 to 3600 s"),
    ],
)
def test_wrong_profile_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    make_model().save(path, meta={})
    document = json.loads(path.read_text())

    change(document)
    path.write_text(json.dumps(document))

    with pytest.raises(ProfileError, match=message):
        CostModel.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_damaged_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)

    with pytest.raises(ProfileError, match=r"profile\.json"):
        CostModel.load(path)


def test_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"missing\.json"):
        CostModel.load(tmp_path / "missing.json")
