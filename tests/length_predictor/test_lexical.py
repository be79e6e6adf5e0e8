"""Features, lexical model and recalibration."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompts import TASKS, make_corpus

from sola_sched.length_predictor.calibration import Recalibration
from sola_sched.length_predictor.evaluation.scoring import score
from sola_sched.length_predictor.lexical.features import (
    MAX_CHARS,
    NUM_BUCKETS,
    describe,
    word_matrix,
)
from sola_sched.length_predictor.lexical.lexical import LexicalModel, prior_quantiles
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.prediction.length import LEVELS

#: The made-up lengths spread by a factor of e^0.2 around what the words say.
NOISE = 0.2
#: Of a shift of log 4 a 33rd is held back (16 of 528 requests are the prior's), and the median
#: of 512 lengths that spread by a factor of e^1.5 is off by up to 3 x 1.25 x 1.5 / sqrt(512).
SHIFT_ERROR = 0.3


@given(st.text(max_size=400))
def test_any_text_has_features(text: str) -> None:
    features = describe(text)

    assert (np.diff(features.buckets) > 0).all()
    assert ((features.buckets >= 0) & (features.buckets < NUM_BUCKETS)).all()
    assert np.isfinite(features.counts).all()
    length = word_matrix([features]).power(2).sum()
    assert length == pytest.approx(1.0 if len(features.buckets) else 0.0, abs=1e-5)


def test_features_are_the_same_in_every_process() -> None:
    code = (
        "from sola_sched.length_predictor.lexical.features import describe;"
        "print(describe('Write a poem about the sea?').buckets.tolist())"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "77"},
    )

    assert done.stdout.strip() == str(describe("Write a poem about the sea?").buckets.tolist())


def test_only_the_ends_of_a_long_prompt_are_read_but_its_length_counts() -> None:
    middle = "nothing here matters " * 10_000
    head, tail = "a" * (MAX_CHARS // 2), "b" * (MAX_CHARS // 2)

    one, other = describe(head + middle + tail), describe(head + middle.upper() + tail)

    assert one.buckets.tolist() == other.buckets.tolist()
    assert one.counts[0] == pytest.approx(np.log1p(len(middle) + MAX_CHARS))
    part = describe(f"{head} {tail}", num_chars=len(middle) + MAX_CHARS)
    assert part.buckets.tolist() == one.buckets.tolist()
    assert part.counts[0] == one.counts[0]


def test_fitted_model_finds_the_lengths_that_words_give() -> None:
    train, test = make_corpus(2000, seed=1), make_corpus(300, seed=2)
    model = LexicalModel()
    model.fit([describe(prompt) for prompt in train.prompts], train.lengths)

    quantiles = np.exp(model.quantiles([describe(prompt) for prompt in test.prompts]))

    figures = score(quantiles, test.lengths)
    assert figures.median_relative_error < 1.5 * NOISE
    assert figures.kendall_tau > 0.8
    assert figures.coverage == pytest.approx(0.7, abs=0.15)


def test_model_learns_from_nothing_but_traffic() -> None:
    corpus = make_corpus(1500, seed=3)
    predictor = LexicalPredictor()
    errors = []
    for prompt, length in zip(corpus.prompts, corpus.lengths.tolist(), strict=True):
        answers, pending = predictor.consider([prompt])
        errors.append(abs(np.log(answers[0].median) - np.log(length)))
        predictor.learn(pending, [length], [False])

    assert np.median(errors[:20]) > 0.5
    assert np.median(errors[-300:]) < 1.5 * NOISE


def test_cut_request_teaches_only_that_it_is_longer() -> None:
    predictor = LexicalPredictor()
    answers, pending = predictor.consider(["write a story"])
    before = answers[0].median

    predictor.learn(pending, [3], [True])
    assert predictor.predict(["write a story"])[0].median == before

    predictor.learn(pending, [4000], [True])
    assert predictor.predict(["write a story"])[0].median > before


def test_stored_model_predicts_and_learns_alike() -> None:
    corpus = make_corpus(200)
    model = LexicalModel()
    features = [describe(prompt) for prompt in corpus.prompts]
    model.fit(features, corpus.lengths)

    copy = LexicalModel.from_arrays(model.to_arrays())
    for each in (model, copy):
        each.learn(features[0], 9999)

    np.testing.assert_array_equal(copy.quantiles(features), model.quantiles(features))


def test_single_prompt_is_enough_to_fit() -> None:
    model = LexicalModel()

    model.fit([describe("hello there")], np.array([12]))

    quantiles = np.exp(model.quantiles([describe("hello there")]))
    np.testing.assert_allclose(quantiles, 12.0, rtol=1e-3)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_recalibration_moves_the_level_of_a_shifted_model(factor: float) -> None:
    recalibration, rng = Recalibration(), np.random.default_rng(0)
    quantiles = prior_quantiles()
    for _ in range(500):
        length = float(np.interp(rng.random(), LEVELS, quantiles)) + np.log(factor)
        recalibration.observe(quantiles, length)

    corrected = recalibration.apply(quantiles[None])[0]

    shift = (corrected - quantiles)[4:6].mean()
    assert shift == pytest.approx(np.log(factor), abs=SHIFT_ERROR)
    assert recalibration.factor == pytest.approx(1.0, abs=0.2)


def test_recalibration_widens_what_is_too_sure_of_itself() -> None:
    recalibration, rng = Recalibration(), np.random.default_rng(0)
    narrow = np.linspace(4.9, 5.1, 10)
    for _ in range(400):
        recalibration.observe(narrow, 5.0 + rng.normal(0.0, 0.5))

    low, high = np.interp([0.25, 0.75], LEVELS, recalibration.apply(narrow[None])[0])

    # The quartiles of a normal distribution lie 0.67 deviations from the middle. Four is the limit
    # of the factor, of whose logarithm 400 requests get four fifths.
    assert high - low == pytest.approx(min(4**0.8 * 0.111, 2 * 0.674 * 0.5), rel=0.25)


def test_task_words_are_the_ones_the_helpers_promise() -> None:
    corpus = make_corpus(400)
    by_task = {task: [] for task in TASKS}
    for prompt, length in zip(corpus.prompts, corpus.lengths.tolist(), strict=True):
        by_task[prompt.split()[0]].append(length)

    for task, lengths in by_task.items():
        assert np.median(lengths) == pytest.approx(TASKS[task], rel=0.2)
