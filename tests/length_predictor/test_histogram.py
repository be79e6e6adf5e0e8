"""Length histogram: bounds, convergence, fallback and forgetting."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sola_sched.length_predictor.histogram import MAX_LENGTH, LengthHistogram

MAX_TOKENS = 4000
NUM_SAMPLES = 20_000
#: Pseudo-samples weigh 16 of 20,000 and a bin is 1/16 wide; the rest is sampling noise, which in
#: the bulk of the distribution (at least 1,000 samples remain) is about 3 %.
TOLERANCE = 0.10


def geometric(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return rng.geometric(1 / 200, count)


def lognormal(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return np.maximum(rng.lognormal(5.0, 0.8, count), 1.0).astype(np.int64)


def mean_of(
    histogram: LengthHistogram, class_id: int, output: int, limit: int = MAX_TOKENS
) -> float:
    return float(
        histogram.remaining(
            np.array([class_id], dtype=np.int32), np.array([output]), np.array([limit])
        )[0]
    )


def quantile_of(
    histogram: LengthHistogram, q: float, class_id: int, output: int, limit: int = MAX_TOKENS
) -> float:
    return float(
        histogram.remaining_quantile(
            q, np.array([class_id], dtype=np.int32), np.array([output]), np.array([limit])
        )[0]
    )


@pytest.mark.parametrize("draw", [geometric, lognormal])
@pytest.mark.parametrize("output", [0, 1, 17, 50, 100, 300])
def test_prediction_converges_to_the_empirical_residual_life(
    draw: Callable[[np.random.Generator, int], NDArray[np.int64]], output: int
) -> None:
    histogram = LengthHistogram(memory=10 * NUM_SAMPLES)
    class_id = histogram.class_of(100, MAX_TOKENS)
    for length in draw(np.random.default_rng(0), NUM_SAMPLES).tolist():
        histogram.observe(class_id, min(length, MAX_TOKENS))

    lengths = np.minimum(draw(np.random.default_rng(1), 200_000), MAX_TOKENS)
    residual = lengths[lengths > output] - output

    assert mean_of(histogram, class_id, output) == pytest.approx(residual.mean(), rel=TOLERANCE)
    for q in (0.1, 0.5, 0.9):
        assert quantile_of(histogram, q, class_id, output) == pytest.approx(
            np.quantile(residual, q), rel=TOLERANCE, abs=2.0
        )


def test_constant_lengths_are_known_exactly() -> None:
    histogram = LengthHistogram(memory=10**6)
    class_id = histogram.class_of(10, 100)
    for _ in range(50_000):
        histogram.observe(class_id, 20)

    assert mean_of(histogram, class_id, 5, 100) == pytest.approx(15.0, rel=0.01)
    assert quantile_of(histogram, 0.5, class_id, 5, 100) == 15.0


def test_prior_expects_256_tokens_and_then_as_many_as_it_has_seen() -> None:
    histogram = LengthHistogram()
    class_id = histogram.class_of(10, 1_000_000)

    assert mean_of(histogram, class_id, 0, 10**6) == pytest.approx(256, rel=0.05)
    assert mean_of(histogram, class_id, 1000, 10**6) == pytest.approx(1256, rel=0.05)


def test_prior_of_a_class_ends_at_its_limit() -> None:
    histogram = LengthHistogram()
    short = histogram.class_of(10, 16)

    assert mean_of(histogram, short, 0, 16) <= 16.0


def test_class_without_samples_takes_those_of_all_requests() -> None:
    histogram = LengthHistogram()
    seen, unseen = histogram.class_of(10, 1000), histogram.class_of(5000, 1000)
    for _ in range(2000):
        histogram.observe(seen, 50)

    assert mean_of(histogram, unseen, 0) == pytest.approx(50, rel=0.1)


def test_outputs_cut_by_a_small_limit_tell_other_classes_nothing() -> None:
    histogram, without = LengthHistogram(), LengthHistogram()
    for each in (histogram, without):
        each.class_of(700, MAX_TOKENS)
    checks = histogram.class_of(500, 1)
    for _ in range(2000):
        histogram.observe(checks, 1)

    assert mean_of(histogram, 0, 0) == pytest.approx(mean_of(without, 0, 0))
    assert mean_of(histogram, checks, 0, 1) == 1.0


def test_a_cut_output_teaches_its_own_class() -> None:
    histogram = LengthHistogram()
    class_id = histogram.class_of(500, 60)
    for _ in range(2000):
        histogram.observe(class_id, 60)

    assert mean_of(histogram, class_id, 0, 60) == pytest.approx(60, rel=0.02)


def test_a_cut_output_that_is_longer_than_most_tells_all_classes() -> None:
    histogram = LengthHistogram()
    class_id, other = histogram.class_of(500, 900), histogram.class_of(5000, MAX_TOKENS)
    for _ in range(2000):
        histogram.observe(class_id, 900)

    assert mean_of(histogram, other, 0) == pytest.approx(900, rel=0.1)


def test_whole_outputs_count_for_all_classes_whatever_else_was_cut() -> None:
    histogram = LengthHistogram()
    cut, whole = histogram.class_of(500, 16), histogram.class_of(500, MAX_TOKENS)
    other = histogram.class_of(5000, MAX_TOKENS)
    for _ in range(1000):
        histogram.observe(cut, 16)
        histogram.observe(whole, 400)

    assert mean_of(histogram, other, 0) == pytest.approx(400, rel=0.05)


def uniform_limits(rng: np.random.Generator) -> int:
    return int(rng.integers(1, 1001))


def lognormal_limits(rng: np.random.Generator) -> int:
    return int(np.clip(rng.lognormal(5.0, 1.0), 1, 4000))


@pytest.mark.parametrize(
    ("share_cut", "draw_limit", "most"),
    [(1.0, uniform_limits, 1.2), (1.0, lognormal_limits, 1.6), (0.9, uniform_limits, 1.2)],
)
def test_outputs_that_end_at_their_limits_do_not_climb_by_themselves(
    share_cut: float, draw_limit: Callable[[np.random.Generator], int], most: float
) -> None:
    rng, histogram = np.random.default_rng(0), LengthHistogram()
    lengths = []
    for _ in range(4000):
        is_cut = rng.random() < share_cut
        limit = draw_limit(rng) if is_cut else 4096
        lengths.append(limit if is_cut else min(4095, int(rng.geometric(1 / 100))))
        histogram.observe(histogram.class_of(100, limit), lengths[-1])

    unseen = histogram.class_of(5000, 8000)

    assert np.mean(lengths) <= mean_of(histogram, unseen, 0, 8000) <= most * np.mean(lengths)


def test_a_short_output_that_was_cut_is_at_least_so_long() -> None:
    rng, histogram = np.random.default_rng(0), LengthHistogram(memory=10**6)
    for _ in range(NUM_SAMPLES):
        limit = 40 if rng.random() < 0.5 else 3000
        class_id = histogram.class_of(100, limit)
        histogram.observe(class_id, min(limit, int(rng.geometric(1 / 200))))

    unseen = histogram.class_of(5000, MAX_TOKENS)

    # Those of limit 40 that ended before it are whole: alone they would make all seem short.
    assert mean_of(histogram, unseen, 0) == pytest.approx(200, rel=0.05)
    assert quantile_of(histogram, 0.5, unseen, 0) == pytest.approx(200 * np.log(2), rel=0.05)


@pytest.mark.parametrize("limit", [MAX_TOKENS, 400])
def test_short_outputs_that_were_cut_make_nobody_forget_the_others(limit: int) -> None:
    histogram = LengthHistogram(memory=100)
    long, checks = histogram.class_of(700, limit), histogram.class_of(500, 8)
    other = histogram.class_of(5000, MAX_TOKENS)
    for _ in range(500):
        histogram.observe(long, 400)
    before = mean_of(histogram, other, 0)
    for _ in range(2000):
        histogram.observe(checks, 8)
        mean_of(histogram, other, 0)

    assert before == pytest.approx(400, rel=0.05)
    assert mean_of(histogram, other, 0) == pytest.approx(before, rel=0.02)


def test_many_outputs_that_were_cut_are_forgotten_as_fast_as_others() -> None:
    histogram, without = LengthHistogram(memory=100), LengthHistogram(memory=100)
    cut = histogram.class_of(700, 60)
    for _ in range(20_000):
        histogram.observe(cut, 60)
        mean_of(histogram, cut, 0)
    for each in (histogram, without):
        whole = each.class_of(700, MAX_TOKENS)
        for _ in range(500):
            each.observe(whole, 20)

    assert mean_of(histogram, histogram.class_of(5000, MAX_TOKENS), 0) == pytest.approx(
        mean_of(without, without.class_of(5000, MAX_TOKENS), 0), rel=0.05
    )


def test_a_limit_that_is_used_again_is_remembered_as_the_latest() -> None:
    histogram = LengthHistogram()
    for limit in (*range(512, 512 + 256), 512, 1000):
        class_id = histogram.class_of(10, limit)

    assert 512 in histogram._limits[class_id]
    assert 513 not in histogram._limits[class_id]


def test_limits_that_are_remembered_are_bounded() -> None:
    histogram = LengthHistogram()
    for limit in range(2**15, 2**16):
        histogram.class_of(10, limit)

    assert [len(each) for each in histogram._limits] == [256]


def test_classes_keep_their_own_lengths() -> None:
    histogram = LengthHistogram()
    short, long = histogram.class_of(10, 1000), histogram.class_of(5000, 1000)
    for _ in range(2000):
        histogram.observe(short, 50)
        histogram.observe(long, 500)

    assert mean_of(histogram, short, 0) == pytest.approx(50, rel=0.1)
    assert mean_of(histogram, long, 0) == pytest.approx(500, rel=0.1)


def test_shift_in_mid_run_is_followed() -> None:
    histogram = LengthHistogram(memory=200)
    class_id = histogram.class_of(10, MAX_TOKENS)
    for _ in range(5000):
        histogram.observe(class_id, 400)
    before = mean_of(histogram, class_id, 0)

    for _ in range(1000):
        histogram.observe(class_id, 40)

    assert before == pytest.approx(400, rel=0.1)
    # exp(-1000 / 200) of the old mass is left, and 16 of 216 samples are everybody's.
    assert mean_of(histogram, class_id, 0) == pytest.approx(40, rel=0.15)


def test_forgetting_survives_a_rescale_of_the_weights() -> None:
    histogram = LengthHistogram(memory=1)
    class_id = histogram.class_of(10, MAX_TOKENS)

    for _ in range(5000):
        histogram.observe(class_id, 40)

    assert 40 / 2 < mean_of(histogram, class_id, 0) < 300


def test_class_is_a_pair_of_factor_two_ranges() -> None:
    histogram = LengthHistogram()

    first = histogram.class_of(1000, 300)

    assert histogram.class_of(600, 500) == first
    assert histogram.class_of(1024, 300) != first
    assert histogram.class_of(1000, 512) != first
    assert histogram.num_classes == 3


def test_number_of_classes_is_bounded() -> None:
    histogram = LengthHistogram()

    for prompt in range(40):
        for limit in range(40):
            histogram.class_of(2**prompt, 2**limit)

    assert histogram.num_classes <= 441


def test_unfinished_and_unknown_observations() -> None:
    histogram = LengthHistogram()
    class_id = histogram.class_of(10, 10)

    histogram.observe(class_id, 0)

    assert histogram.num_observed == 0
    for wrong in (-1, class_id + 1):
        with pytest.raises(ValueError, match="'class_id' must come from class_of"):
            histogram.observe(wrong, 5)


@pytest.mark.parametrize("memory", [0, -5])
def test_memory_outside_its_range_is_refused(memory: int) -> None:
    with pytest.raises(ValueError, match="'memory' must be >= 1"):
        LengthHistogram(memory=memory)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.5, float("nan")])
def test_quantile_outside_its_range_is_refused(q: float) -> None:
    histogram = LengthHistogram()
    class_id = histogram.class_of(10, 10)

    with pytest.raises(ValueError, match="'q' must be in"):
        quantile_of(histogram, q, class_id, 0)


def test_empty_batch_gives_an_empty_answer() -> None:
    empty = np.array([], dtype=np.int64)

    assert LengthHistogram().remaining(empty, empty, empty).shape == (0,)


requests = st.tuples(st.integers(0, 2**18), st.integers(1, 2**18), st.integers(1, 2**18))


@settings(deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=30),
    st.lists(st.integers(0, 2**18), min_size=1, max_size=20),
    st.integers(1, 2**18),
    st.lists(st.floats(0.001, 0.999), min_size=2, max_size=2),
)
def test_answers_are_bounded_and_monotone_in_q(
    finished: list[tuple[int, int, int]], outputs: list[int], limit: int, qs: list[float]
) -> None:
    histogram = LengthHistogram(memory=5)
    for prompt, max_tokens, length in finished:
        histogram.observe(histogram.class_of(prompt, max_tokens), length)
    num_output = np.array(outputs)
    ids = np.full(len(outputs), histogram.class_of(77, limit), dtype=np.int32)
    limits = np.full(len(outputs), limit)
    most = np.maximum(limits - num_output, 1)

    mean = histogram.remaining(ids, num_output, limits)
    low = histogram.remaining_quantile(min(qs), ids, num_output, limits)
    high = histogram.remaining_quantile(max(qs), ids, num_output, limits)

    assert mean.dtype == np.float64
    for answer in (mean, low, high):
        assert np.isfinite(answer).all()
        assert (answer >= 1.0).all()
        assert (answer <= most).all()
    assert (low <= high).all()


def test_batch_equals_single_questions() -> None:
    histogram = LengthHistogram()
    ids = [histogram.class_of(prompt, 2000) for prompt in (10, 100, 1000)]
    for length in range(1, 500):
        histogram.observe(ids[length % 3], length)
    outputs = np.array([0, 40, MAX_LENGTH + 5])

    together = histogram.remaining(np.array(ids, dtype=np.int32), outputs, np.full(3, MAX_TOKENS))

    assert together.tolist() == [
        mean_of(histogram, class_id, int(output))
        for class_id, output in zip(ids, outputs, strict=True)
    ]


def test_each_of_many_classes_has_the_quantiles_that_it_has_by_itself() -> None:
    rng = np.random.default_rng(3)
    together = LengthHistogram()
    ids = [together.class_of(2**i, 2**j) for i in range(0, 20, 3) for j in range(1, 21, 2)]
    for _ in range(3000):
        together.observe(int(rng.choice(ids)), int(rng.lognormal(4.0, 2.0)) + 1)
    output = np.array([0, 3, 40, 700])

    for q in (0.05, 0.5, 0.9):
        rows = np.repeat(ids, len(output))
        at_once = together.remaining_quantile(
            q, rows, np.tile(output, len(ids)), np.full(len(rows), 10**6)
        )
        apart = copy.deepcopy(together)
        apart._quantile_lines.clear()
        one_by_one = [
            apart.remaining_quantile(q, np.full(4, each), output, np.full(4, 10**6)) for each in ids
        ]
        np.testing.assert_array_equal(at_once, np.concatenate(one_by_one))


def test_quantiles_are_made_for_the_classes_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    histogram = LengthHistogram()
    ids = [histogram.class_of(2**i, 2**j) for i in range(12) for j in range(1, 13)]
    made: list[int] = []
    make = LengthHistogram._quantile_line

    def watched(self: LengthHistogram, q: float, rows: np.ndarray) -> np.ndarray:
        made.extend(rows.tolist())
        return make(self, q, rows)

    monkeypatch.setattr(LengthHistogram, "_quantile_line", watched)
    for asked in ([5, 5, 7], [7, 9], [5, 9]):
        classes = np.array([ids[each] for each in asked])
        histogram.remaining_quantile(0.5, classes, np.zeros(len(asked), dtype=int), classes + 100)

    assert made == [ids[5], ids[7], ids[9]]
