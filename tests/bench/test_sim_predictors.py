"""Predictions in virtual time: what each predictor knows, and how it reaches the scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.backends.predictors import RecordedErrors, make_predictor
from sola_sched.errors import ConfigError
from sola_sched.prediction.length import LEVELS, LengthPrediction
from sola_sched.workloads.workload import RequestSpec


def request(index: int, output_tokens: int = 100) -> RequestSpec:
    return RequestSpec(f"r{index}", (5, 6, 7), output_tokens)


def medians(name: str, num_requests: int = 2000) -> np.ndarray:
    predict = make_predictor(name)
    assert predict is not None
    predictions = [predict(request(i)) for i in range(num_requests)]
    return np.array([p.median for p in predictions if p is not None])


def test_the_oracle_knows_and_none_is_none():
    assert make_predictor("none") is None
    assert set(medians("oracle", 10)) == {100.0}


def test_a_constant_is_one():
    assert set(medians("constant:256", 10)) == {256.0}


def test_noise_has_the_median_and_the_spread_it_admits_to():
    logs = np.log(medians("noisy:0.5") / 100.0)

    assert np.median(logs) == pytest.approx(0.0, abs=0.05)
    assert logs.std() == pytest.approx(0.5, rel=0.05)
    predict = make_predictor("noisy:0.5")
    assert predict is not None
    quantiles = np.array([p.quantiles for i in range(2000) if (p := predict(request(i)))])
    covered = (quantiles >= 100.0).mean(axis=0)
    assert covered == pytest.approx(LEVELS, abs=0.04)


def test_wrong_predictions_are_wrong_by_the_factor_either_way():
    values, counts = np.unique(medians("wrong:10"), return_counts=True)

    assert values.tolist() == [10.0, 1000.0]
    assert counts == pytest.approx([1000, 1000], rel=0.1)


def test_given_predictions_are_those_of_the_requests():
    predict = make_predictor("given")
    assert predict is not None
    prediction = LengthPrediction.exactly(7, "lexical")

    assert predict(RequestSpec("a", (5,), 100, prediction=prediction)) is prediction
    assert predict(request(0)) is None


def test_a_seed_changes_the_draws_and_equal_ones_do_not():
    first, again, other = (make_predictor("noisy:0.5", seed) for seed in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None

    values = [[p.median for i in range(5) if (p := f(request(i)))] for f in (first, again, other)]

    assert values[0] == values[1] != values[2]


def test_recorded_errors_are_drawn_from_lengths_like_the_requests(tmp_path: Path):
    """Short outputs were predicted twice as long, long ones half as long."""
    lengths = np.array([10.0] * 200 + [1000.0] * 200)
    quantiles = np.array([np.full(10, 20.0)] * 200 + [np.full(10, 500.0)] * 200)
    path = tmp_path / "recorded.json"
    path.write_text(
        json.dumps(
            {"source": "lexical", "lengths": lengths.tolist(), "quantiles": quantiles.tolist()}
        )
    )
    predict = make_predictor(f"recorded:{path}")
    assert predict is not None

    short, long = predict(request(0, 9)), predict(request(0, 1200))

    assert short is not None
    assert long is not None
    assert (short.median, long.median, long.source) == (18.0, 600.0, "lexical")


@pytest.mark.parametrize(
    "name",
    ["orcale", "oracle:1", "constant", "noisy", "noisy:x", "noisy:0", "wrong:-1", "recorded"],
)
def test_an_unknown_predictor_is_refused(name):
    with pytest.raises(ConfigError, match=r"sim\.predictor"):
        make_predictor(name)


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "foreign.json"
    path.write_text("[1, 2]")

    with pytest.raises(ConfigError, match="must hold recorded predictions"):
        make_predictor(f"recorded:{path}")
    with pytest.raises(ConfigError, match="got \\(2, 9\\) for 2"):
        RecordedErrors(np.ones(2), np.ones((2, 9)), "lexical")


def test_a_schedulers_predictor_is_no_option_of_it():
    spec = parse_scheduler("sola:policy=alise,sim.predictor=noisy:0.5")

    assert spec.options == {"policy": "alise"}
    assert spec.predictor == "noisy:0.5"


@pytest.mark.parametrize("text", ["stock:sim.predictor=oracle", "sjf:sim.predictor=oracle"])
def test_only_our_scheduler_takes_predictions(text):
    with pytest.raises(ConfigError):
        parse_scheduler(text)
