"""Length predictions and what they say after some tokens, against sums over their ten parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import StateBuilder

from sola_sched.core.state import DECODE
from sola_sched.errors import PredictionError
from sola_sched.prediction.length import LEVELS, LengthPrediction, remaining_at, remaining_mean

QUANTILES = st.lists(st.integers(1, 3000), min_size=10, max_size=10).map(sorted)
#: Sums of ten floats below 1e5 differ by less than this between orders of addition.
ROUNDING = 1e-6


def make_prediction(*quantiles: float) -> LengthPrediction:
    return LengthPrediction(np.array(quantiles, dtype=float), "neighbours")


def test_levels_are_the_middles_of_ten_equal_parts():
    assert LEVELS == (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)


@pytest.mark.parametrize(
    ("quantiles", "match"),
    [
        ([1.0] * 9, r"10 numbers.*got shape \(9,\)"),
        ([0.5] + [1.0] * 9, ">= 1"),
        ([1.0] * 9 + [math.inf], "finite"),
        ([math.nan] * 10, "finite"),
        ([2.0] + [1.0] * 9, "ascend"),
    ],
)
def test_quantiles_that_break_a_rule_are_refused(quantiles, match):
    with pytest.raises(PredictionError, match=match):
        LengthPrediction(np.array(quantiles), "neighbours")


def test_an_unknown_source_is_refused_with_the_known_ones():
    with pytest.raises(PredictionError, match=r"neighbours.*got 'guess'"):
        LengthPrediction(np.ones(10), "guess")


def test_a_prediction_keeps_its_own_read_only_copy():
    values = np.ones(10)
    prediction = LengthPrediction(values, "lexical")

    values[0] = 7.0

    assert prediction.quantiles[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        prediction.quantiles[0] = 7.0


def test_samples_give_their_weighted_quantiles():
    prediction = LengthPrediction.of_samples([100, 10, 1000], "neighbours", [1.0, 8.0, 1.0])

    assert prediction.quantiles.tolist() == [10.0] * 8 + [100.0, 1000.0]
    assert prediction.median == 10.0
    assert prediction.mean == pytest.approx(118.0)


def test_an_exact_prediction_counts_down_and_then_doubles():
    prediction = LengthPrediction.exactly(100)

    left = [prediction.remaining(n) for n in (0, 99, 100, 199, 200, 399, 400)]

    assert left == [100.0, 1.0, 100.0, 1.0, 200.0, 1.0, 400.0]


@given(QUANTILES, st.integers(0, 6000))
def test_the_mean_left_is_that_of_the_parts_that_are_not_outlived(quantiles, output):
    left = remaining_mean(np.array([quantiles], dtype=float), np.array([output]), None)[0]

    lives = [value for value in quantiles if value > output]
    if lives:
        expected = sum(lives) / len(lives) - output
    else:
        total = quantiles[-1]
        while total <= output:
            total *= 2
        expected = total - output
    assert left == pytest.approx(expected, abs=ROUNDING)
    assert left > 0


@given(QUANTILES, st.integers(0, 6000), st.floats(1, 5000))
def test_an_overrun_prediction_loses_weight_to_the_other_model(quantiles, output, otherwise):
    rows, outputs = np.array([quantiles], dtype=float), np.array([output])

    left = remaining_mean(rows, outputs, np.array([otherwise]))[0]

    alone = remaining_mean(rows, outputs, None)[0]
    share = min(1.0, quantiles[-1] / max(output, 1))
    if output < quantiles[-1]:
        assert left == pytest.approx(alone, abs=ROUNDING)
    else:
        assert left == pytest.approx(share * alone + (1 - share) * otherwise, abs=ROUNDING)


@given(QUANTILES, st.integers(0, 2999), st.floats(0.01, 0.99))
def test_a_quantile_left_inverts_the_conditional_distribution(quantiles, output, q):
    """Against bisection on F(x) = P(L <= x), piecewise linear, jumps where quantiles coincide."""
    rows, outputs = np.array([quantiles], dtype=float), np.array([output])
    if output >= quantiles[-1]:
        return

    left = remaining_at(q, rows, outputs, np.array([1.0]))[0]

    def mass_up_to(x: float) -> float:
        if x < quantiles[0]:
            return 0.0
        if x >= quantiles[-1]:
            return 1.0
        last = max(place for place, value in enumerate(quantiles) if value <= x)
        step = quantiles[last + 1] - quantiles[last]
        return LEVELS[last] + 0.1 * (x - quantiles[last]) / step

    dead = mass_up_to(output)
    target = dead + q * (1.0 - dead)
    assert output < output + left <= quantiles[-1] + ROUNDING
    assert mass_up_to(output + left + 1e-3) >= target - 1e-3
    if output + left - 1e-3 > max(output, quantiles[0]):
        assert mass_up_to(output + left - 1e-3) <= target + 1e-3


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), QUANTILES), st.integers(0, 9999), st.integers(0, 2)),
        min_size=1,
        max_size=20,
    )
)
def test_every_row_is_answered_by_its_own_prediction_within_its_limit(requests):
    builder = StateBuilder(left=50.0)
    rows, ahead = [], []
    for index, (quantiles, output, num_ahead) in enumerate(requests):
        row = builder.decode(f"r{index}", first_ago_s=1.0, out=output)
        builder.table.max_tokens[row] = 4000
        if quantiles is not None:
            builder.table.predict(row, make_prediction(*quantiles))
        rows.append(row)
        ahead.append(num_ahead)
    state = builder.build()

    mean = state.remaining(np.array(rows), np.array(ahead))
    surely = state.surely_remaining(np.array(rows), np.array(ahead))

    for place, (quantiles, output, num_ahead) in enumerate(requests):
        done = output + num_ahead
        assert mean[place] >= 1.0
        assert surely[place] >= 1.0
        if quantiles is None:
            assert mean[place] == 50.0
            continue
        for value in (mean[place], surely[place]):
            assert value <= max(1.0, 4000 - done)
        if done < quantiles[-1]:
            lives = [value for value in quantiles if value > done]
            expected = np.clip(sum(lives) / len(lives) - done, 1.0, max(1.0, 4000 - done))
            assert mean[place] == pytest.approx(expected, abs=ROUNDING)
    builder.table.check_integrity()


def test_a_row_that_is_reused_forgets_its_prediction():
    builder = StateBuilder(left=50.0)
    builder.table.predict(builder.waiting("a", waited_s=0.0), make_prediction(*[7.0] * 10))
    builder.table.remove("a")

    row = builder.waiting("b", waited_s=0.0)

    assert builder.table.num_predicted == 0
    assert builder.build().remaining(np.array([row])).tolist() == [50.0]


def test_predictions_survive_the_growth_of_the_table():
    builder = StateBuilder()
    builder.table.predict(builder.waiting("a", waited_s=0.0), make_prediction(*[7.0] * 10))
    for index in range(300):
        builder.waiting(f"r{index}", waited_s=0.0)

    row = builder.table.row_of["a"]

    assert builder.table.phase[row] != DECODE
    assert builder.build().remaining(np.array([row])).tolist() == [7.0]
    builder.table.check_integrity()


def test_without_predictions_only_the_length_model_is_asked(monkeypatch):
    builder = StateBuilder(left=50.0)
    row = builder.waiting("a", waited_s=0.0)

    def fail(*_: object) -> None:
        raise AssertionError("nothing is predicted")

    monkeypatch.setattr("sola_sched.core.state.remaining_mean", fail)
    monkeypatch.setattr("sola_sched.core.state.remaining_at", fail)

    state = builder.build()
    assert state.remaining(np.array([row])).tolist() == [50.0]
    assert state.surely_remaining(np.array([row])).tolist() == [50.0]
