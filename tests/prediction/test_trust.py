"""Predictions are used unless they are much worse than the lengths of finished requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from states import FixedLengths, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import EngineLimits
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.prediction.length import LengthPrediction
from sola_sched.prediction.trust import PredictionTrust
from sola_sched.reports.log import engine_stats, summary_line


def test_errors_are_logarithmic_and_a_guess_beyond_the_limit_counts_as_the_limit() -> None:
    trust = PredictionTrust()
    trust.compare(predicted=50.0, usual=400.0, actual=100, limit=200)

    assert trust.error == pytest.approx(math.log(2))
    assert trust.usual_error == pytest.approx(math.log(2))
    assert trust.is_trusted


def test_worse_predictions_lose_trust_once_enough_were_compared() -> None:
    trust = PredictionTrust()
    changes = [trust.compare(1000.0, 150.0, 100, 10_000) for _ in range(30)]

    assert changes.index(True) == 19
    assert sum(changes) == 1
    assert not trust.is_trusted


def test_trust_comes_back_when_the_predictor_has_learned() -> None:
    trust = PredictionTrust()
    for _ in range(30):
        trust.compare(1000.0, 150.0, 100, 10_000)
    num_needed = 0
    while not trust.is_trusted:
        num_needed += 1
        trust.compare(100.0, 150.0, 100, 10_000)

    assert 50 < num_needed < 200  # the 30 wrong ones must fade first
    assert trust.error <= 1.35 * trust.usual_error


def test_somewhat_larger_errors_are_tolerated() -> None:
    """The predictor tells requests apart, the histogram does not."""
    trust = PredictionTrust()
    for _ in range(100):
        assert not trust.compare(130.0, 120.0, 100, 10_000)
    assert trust.is_trusted


def serve(monitor: StateMonitor, name: str, tokens: int, predicted: float | None) -> None:
    """One request from arrival to its end, alone."""
    row = monitor.add(
        name, num_prompt_tokens=10, max_tokens=5000, slo=SloTarget(1.0, 1.0), arrival_s=0.0
    )
    if predicted is not None:
        monitor.predicted(name, LengthPrediction.exactly(predicted))
    monitor.table.num_output[row] = tokens
    monitor.finished(name)


def test_a_monitor_stops_using_predictions_that_are_wrong() -> None:
    monitor = StateMonitor(make_cost(), LengthHistogram(), lambda: 0.0)
    for i in range(40):
        serve(monitor, f"r{i}", 100, 1000.0 if i % 2 else 10.0)
    row = monitor.add(
        "next", num_prompt_tokens=10, max_tokens=5000, slo=SloTarget(1.0, 1.0), arrival_s=0.0
    )
    before = monitor.table.epoch
    monitor.predicted("next", LengthPrediction.exactly(1000.0))

    state = monitor.state([], EngineLimits(1, 1, num_blocks=1, block_size=1), 1)
    assert monitor.table.epoch == before + 1
    assert state.remaining(np.array([row]))[0] == pytest.approx(100.0, rel=0.3)
    assert state.surely_remaining(np.array([row]))[0] <= 110.0
    counts = dict.fromkeys(("num_held", "num_preempted_by_policy", "short_of_slots"), 0)
    line = summary_line(engine_stats("attain", monitor) | counts, 0, 1)
    assert "length predictions not used (error 2.3" in line


def test_requests_without_a_prediction_or_cut_short_are_not_compared() -> None:
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: 0.0)
    serve(monitor, "none", 100, None)
    monitor.add("aborted", num_prompt_tokens=9, max_tokens=9, slo=SloTarget(), arrival_s=0.0)
    monitor.predicted("aborted", LengthPrediction.exactly(5.0))
    monitor.finished("aborted", by_itself=False)

    assert monitor.trust.num_compared == 0
    serve(monitor, "compared", 100, 90.0)
    assert monitor.trust.num_compared == 1
