"""The lexical predictor: the model of the words, recalibrated, answering and learning.

Imports neither FAISS nor torch: a process that serves it stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sola_sched.length_predictor.calibration import Recalibration
from sola_sched.length_predictor.lexical.features import PromptFeatures, describe
from sola_sched.length_predictor.lexical.lexical import LexicalModel
from sola_sched.prediction.length import LengthPrediction

FloatArray = NDArray[np.float64]

_MAX_LOG_LENGTH = 17 * np.log(2.0)


@dataclass
class Pending:
    """What was known of a request when it was predicted; handed back when it has finished."""

    features: PromptFeatures
    vector: NDArray[np.float32] | None = None
    key: int = 0


def predictions(quantiles: FloatArray, sources: Sequence[str]) -> list[LengthPrediction]:
    """Predictions from log-quantiles [n, 10], rounded to what a length can be."""
    lengths = np.exp(np.clip(np.maximum.accumulate(quantiles, axis=1), 0.0, _MAX_LOG_LENGTH))
    return [LengthPrediction(row, source) for row, source in zip(lengths, sources, strict=True)]


class LexicalPredictor:
    """The lexical model with recalibration: 0.1 ms a prompt, no encoder, learns from traffic.

    Args:
        model: A fitted model; None starts from nothing.
    """

    kind = "lexical"

    def __init__(self, model: LexicalModel | None = None) -> None:
        self.model = model or LexicalModel()
        self.recalibration = Recalibration()

    def predict(
        self, texts: Sequence[str], num_chars: Sequence[int] | None = None
    ) -> list[LengthPrediction]:
        """Predict prompts; ``num_chars`` are their true lengths if the texts are cut."""
        return self.consider(texts, num_chars)[0]

    def consider(
        self, texts: Sequence[str], num_chars: Sequence[int] | None = None
    ) -> tuple[list[LengthPrediction], list[Pending]]:
        """Predict prompts, and return with each answer what ``learn`` needs later."""
        sizes = [len(text) for text in texts] if num_chars is None else num_chars
        features = [describe(text, size) for text, size in zip(texts, sizes, strict=True)]
        if not features:
            return [], []
        raw = self.model.quantiles(features)
        answers = predictions(self.recalibration.apply(raw), ["lexical"] * len(raw))
        return answers, [Pending(each) for each in features]

    def learn(
        self, pending: Sequence[Pending], lengths: Sequence[int], is_cut: Sequence[bool]
    ) -> None:
        """Take in finished requests.

        Args:
            pending: From ``consider``.
            lengths: Output tokens, >= 1.
            is_cut: Whether the request ended at its token limit. It would have gone on, so it
                says something only if more was generated than predicted.
        """
        for each, length, cut in zip(pending, lengths, is_cut, strict=True):
            self.learn_one(each.features, length, is_cut=cut)

    def learn_one(
        self, features: PromptFeatures, num_output_tokens: int, *, is_cut: bool
    ) -> FloatArray | None:
        """Take in one finished request; returns what the model had expected of it, or None.

        That is asked now and not when the request arrived: in between the model may have learned
        what the error of then would teach it a second time.
        """
        expected: FloatArray = self.model.quantiles([features])[0]
        if not says_something(expected, num_output_tokens, is_cut):
            return None
        self.recalibration.observe(expected, float(np.log(num_output_tokens)))
        self.model.learn(features, num_output_tokens)
        return expected


def says_something(expected: FloatArray, num_output_tokens: int, is_cut: bool) -> bool:
    """Whether a finished request teaches anything; one that was cut short may not.

    Args:
        expected: Log-quantiles [10] that were expected of it.
        num_output_tokens: Tokens it generated.
        is_cut: Whether its limit ended it.
    """
    middle = float(expected[4] + expected[5]) / 2.0
    return num_output_tokens >= 1 and (not is_cut or np.log(num_output_tokens) > middle)
