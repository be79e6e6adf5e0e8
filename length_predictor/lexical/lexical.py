"""Output length from the words of a prompt: a linear model, in microseconds, that keeps learning.

Not in ALISE. It is the low-latency choice, the floor under the retrieval predictor, and by our
measurement hard to beat (see the folder's README). The model is

    score(x) = bias + w . words(x) + v . counts(x),      an estimate of log(output tokens),

with `words` the unit-length bag of hashed words and pairs, fitted by damped least squares. The
spread around a score is read off a table of quantiles of what was really generated in each range
of (cross-fitted) scores. Live traffic moves `w`, `v` and `bias` by one AdaGrad step a request, so
that the model also works without any file: it starts from a prior and learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.linalg import lsqr

from sola_sched.length_predictor.lexical.features import (
    NUM_BUCKETS,
    NUM_COUNTS,
    PromptFeatures,
    count_matrix,
    word_matrix,
)
from sola_sched.prediction.length import LEVELS, NUM_LEVELS

FloatArray = NDArray[np.float64]

# Damping of the least squares in units of one prompt: chosen on held-out Alpaca prompts.
_DAMPING = 0.9
_ITERATIONS = 60
_NUM_FOLDS = 4
_NUM_RANGES = 20
_MIN_PER_RANGE = 20
# The counts are logarithms around 0 to 6; this brings them to the scale of the words.
_COUNT_SCALE = 0.3
_LEARNING_RATE = 0.15
# Errors larger than this (a factor of e^2) are outliers for one step.
_MAX_ERROR = 2.0
_PRIOR_SCALE = 256.0


def prior_quantiles() -> FloatArray:
    """Log-quantiles [10] of the histogram's prior: Lomax of shape 2 and scale 256."""
    tail = 1.0 - np.array(LEVELS)
    quantiles: FloatArray = np.log(np.maximum(_PRIOR_SCALE * (tail**-0.5 - 1.0), 1.0))
    return quantiles


class LexicalModel:
    """Log-quantiles of the output length from the words of a prompt. Not thread-safe."""

    def __init__(self) -> None:
        self._weights = np.zeros(NUM_BUCKETS, dtype=np.float32)
        self._count_weights = np.zeros(NUM_COUNTS)
        prior = prior_quantiles()
        self._bias = float(prior.mean())
        # Quantiles minus score at these scores, ascending; constant beyond the ends.
        self._scores = np.array([self._bias])
        self._spread = (prior - self._bias)[None, :]
        self._count_offset = np.zeros(NUM_COUNTS)
        # Sums of squared gradients: what AdaGrad divides by.
        self._energy = np.full(NUM_BUCKETS, 1e-3, dtype=np.float32)
        self._count_energy = np.full(NUM_COUNTS, 1e-1)
        self._bias_energy = 1e-1
        self.num_learned = 0

    def fit(self, features: Sequence[PromptFeatures], lengths: NDArray[Any]) -> FloatArray:
        """Fit to prompts and their output tokens; about 1 s for 40,000.

        Returns:
            Cross-fitted scores [n]: each from a model that has not seen the prompt.
        """
        target = np.log(np.maximum(np.asarray(lengths, dtype=np.float64), 1.0))
        counts = count_matrix(features).astype(np.float64)
        self._count_offset = counts.mean(axis=0)
        design = scipy.sparse.hstack(
            [
                word_matrix(features),
                scipy.sparse.csr_matrix((counts - self._count_offset) * _COUNT_SCALE),
            ]
        ).tocsr()
        unseen = np.full(len(target), target.mean())
        fold = np.arange(len(target)) % _NUM_FOLDS
        for number in range(_NUM_FOLDS):
            inside, outside = fold != number, fold == number
            if inside.any() and outside.any():
                weights, bias = _least_squares(design[inside], target[inside])
                unseen[outside] = design[outside] @ weights + bias
        weights, self._bias = _least_squares(design, target)
        self._weights = weights[:NUM_BUCKETS].astype(np.float32)
        self._count_weights = weights[NUM_BUCKETS:]
        self._scores, self._spread = _spread_table(unseen, target)
        # As if AdaGrad had seen these prompts: live traffic then corrects instead of overwriting.
        squares = (target - unseen) ** 2
        energy = design.multiply(design).T @ squares
        self._energy = (energy[:NUM_BUCKETS] + 1e-3).astype(np.float32)
        self._count_energy = energy[NUM_BUCKETS:] + 1e-1
        self._bias_energy = float(squares.sum()) + 1e-1
        self.num_learned = len(target)
        return unseen

    def score(self, features: PromptFeatures) -> float:
        """Estimate of log(output tokens)."""
        buckets = features.buckets
        counts = (features.counts - self._count_offset) * _COUNT_SCALE
        words = float(self._weights[buckets].sum()) / max(1, len(buckets)) ** 0.5
        return float(self._bias + words + self._count_weights @ counts)

    def quantiles(self, features: Sequence[PromptFeatures]) -> FloatArray:
        """Logarithms of the quantiles at ``LEVELS`` [n, 10], ascending."""
        scores = np.array([self.score(each) for each in features])
        return scores[:, None] + self._spread_at(scores)

    def learn(self, features: PromptFeatures, num_output_tokens: int) -> None:
        """Move the model towards one finished request; about 20 µs."""
        error = float(np.log(max(1, num_output_tokens))) - self.score(features)
        error = min(_MAX_ERROR, max(-_MAX_ERROR, error))
        buckets = features.buckets
        value = 1.0 / max(1, len(buckets)) ** 0.5
        self._energy[buckets] += (error * value) ** 2
        self._weights[buckets] += _LEARNING_RATE * error * value / np.sqrt(self._energy[buckets])
        counts = (features.counts - self._count_offset) * _COUNT_SCALE
        self._count_energy += (error * counts) ** 2
        self._count_weights += _LEARNING_RATE * error * counts / np.sqrt(self._count_energy)
        self._bias_energy += error**2
        self._bias += _LEARNING_RATE * error / self._bias_energy**0.5
        self.num_learned += 1

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that ``from_arrays`` needs."""
        return {
            "weights": self._weights,
            "count_weights": self._count_weights,
            "count_offset": self._count_offset,
            "scores": self._scores,
            "spread": self._spread,
            "energy": self._energy,
            "count_energy": self._count_energy,
            "scalars": np.array([self._bias, self._bias_energy, float(self.num_learned)]),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> LexicalModel:
        """Inverse of ``to_arrays``."""
        model = cls()
        model._weights = arrays["weights"].copy()
        model._count_weights = arrays["count_weights"].copy()
        model._count_offset = arrays["count_offset"].copy()
        model._scores, model._spread = arrays["scores"], arrays["spread"]
        model._energy = arrays["energy"].copy()
        model._count_energy = arrays["count_energy"].copy()
        bias, bias_energy, num_learned = arrays["scalars"].tolist()
        model._bias, model._bias_energy = bias, bias_energy
        model.num_learned = int(num_learned)
        return model

    def _spread_at(self, scores: FloatArray) -> FloatArray:
        known = self._scores
        if len(known) == 1:
            return np.repeat(self._spread, len(scores), axis=0)
        place = np.clip(np.searchsorted(known, scores) - 1, 0, len(known) - 2)
        share = (scores - known[place]) / np.maximum(known[place + 1] - known[place], 1e-9)
        share = np.clip(share, 0.0, 1.0)[:, None]
        result: FloatArray = (1.0 - share) * self._spread[place] + share * self._spread[place + 1]
        return result


def _least_squares(design: Any, target: FloatArray) -> tuple[FloatArray, float]:
    bias = float(target.mean())
    weights = lsqr(design, target - bias, damp=_DAMPING, iter_lim=_ITERATIONS)[0]
    return weights, bias


def _spread_table(scores: FloatArray, target: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Quantiles of log-length minus score, in ranges of about equally many prompts."""
    num_ranges = int(np.clip(len(scores) // _MIN_PER_RANGE, 1, _NUM_RANGES))
    ranges = np.array_split(np.argsort(scores, kind="stable"), num_ranges)
    middles = np.array([scores[each].mean() for each in ranges])
    spread = np.array([np.quantile(target[each], LEVELS) for each in ranges]) - middles[:, None]
    assert spread.shape == (num_ranges, NUM_LEVELS)
    return middles, spread
