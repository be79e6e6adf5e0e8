"""What is predicted of one request's output length, and what is left of it after some tokens.

A prediction is a distribution, not a number: output lengths are heavy-tailed, and a request that
has outlived the middle of its distribution has not ended for that. Ten quantiles are few enough to
keep one row per request in a table and to ask for all rows at every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sola_sched.errors import PredictionError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Probabilities of the quantiles of a prediction: the middles of ten equal parts of the mass.
LEVELS = tuple(round(0.05 + 0.1 * part, 2) for part in range(10))
NUM_LEVELS = len(LEVELS)

#: What a prediction rests on: similar prompts, the decoder for prompts without any, the words of
#: the prompt, the lengths of other requests, the truth (benchmarks only).
SOURCES = ("neighbours", "decoder", "lexical", "histogram", "oracle")


class LengthLines(NamedTuple):
    """Expected lengths for compiled code: straight lines between bins of lengths.

    Attributes:
        bin_of: Bin of each number of generated tokens, the last one's for more, [n].
        line: Intercepts and slopes, [2, num_classes, num_bins].
    """

    bin_of: IntArray
    line: FloatArray


#: Of a model that has none.
NO_LINES = LengthLines(np.zeros(1, dtype=np.int64), np.empty((2, 0, 1)))


@dataclass(frozen=True, eq=False)
class LengthPrediction:
    """The predicted number of output tokens of one request.

    Attributes:
        quantiles: Total output tokens [10], ascending, >= 1, finite; the quantiles at `LEVELS`.
            Each stands for a tenth of the mass. Any sequence of ten numbers is accepted.
        source: One of `SOURCES`.

    Raises:
        PredictionError: A value breaks one of these rules.
    """

    quantiles: FloatArray
    source: str

    def __post_init__(self) -> None:
        values = np.array(self.quantiles, dtype=np.float64)
        if values.shape != (NUM_LEVELS,):
            raise PredictionError(
                f"'quantiles' must be {NUM_LEVELS} numbers, one for each of LEVELS "
                f"(got shape {values.shape})."
            )
        if not (values >= 1.0).all() or not np.isfinite(values).all():
            raise PredictionError(
                f"'quantiles' must be finite token counts >= 1 (got {values.tolist()})."
            )
        if (np.diff(values) < 0.0).any():
            raise PredictionError(f"'quantiles' must ascend (got {values.tolist()}); sort them.")
        if self.source not in SOURCES:
            raise PredictionError(
                f"'source' must be one of {', '.join(SOURCES)} (got {self.source!r})."
            )
        values.setflags(write=False)
        object.__setattr__(self, "quantiles", values)

    @classmethod
    def exactly(cls, num_tokens: float, source: str = "oracle") -> LengthPrediction:
        """All mass on one length, >= 1 token."""
        return cls(np.full(NUM_LEVELS, float(num_tokens)), source)

    @classmethod
    def of_samples(
        cls, lengths: ArrayLike, source: str, weights: ArrayLike | None = None
    ) -> LengthPrediction:
        """The quantiles of observed lengths.

        Args:
            lengths: Output tokens [n], n >= 1; less than 1 counts as 1.
            source: One of `SOURCES`.
            weights: Weights [n], >= 0 with a sum > 0; equal if None.
        """
        values = np.maximum(np.asarray(lengths, dtype=np.float64), 1.0)
        if weights is None:
            return cls(np.quantile(values, LEVELS), source)
        order = np.argsort(values, kind="stable")
        mass = np.cumsum(np.asarray(weights, dtype=np.float64)[order])
        places = np.searchsorted(mass, np.array(LEVELS) * mass[-1])
        return cls(values[order[np.minimum(places, len(order) - 1)]], source)

    @cached_property
    def mean(self) -> float:
        """Expected output tokens."""
        return float(self.quantiles.mean())

    @property
    def median(self) -> float:
        """Output tokens that half of such requests do not exceed."""
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """Output tokens that a share `q` of such requests does not exceed.

        Linear between `LEVELS`; the first and the last quantile beyond them.
        """
        if not 0.0 <= q <= 1.0:
            raise PredictionError(f"'q' must be in [0, 1] (got {q!r}).")
        return float(np.interp(q, LEVELS, self.quantiles))

    def remaining(self, num_output: int) -> float:
        """Expected tokens left (>= 1) after `num_output`; doubles when it is overrun."""
        quantiles, output = self.quantiles[None, :], np.array([num_output])
        return float(np.maximum(remaining_mean(quantiles, output, None)[0], 1.0))


def remaining_mean(
    quantiles: FloatArray, num_output: IntArray, otherwise: FloatArray | None
) -> FloatArray:
    """E[L - l | L > l] of each row, before limits are applied.

    Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1, takes one number per request and
    doubles it when the request exceeds it. Here the parts of the mass that the request has outlived
    are dropped first; only when none is left is the largest quantile doubled, as often as needed,
    and that answer loses weight to `otherwise` as the request goes on: after m times the
    largest quantile it counts for 1 / m.

    Args:
        quantiles: As in `LengthPrediction`, [n, 10].
        num_output: Tokens generated, l, [n].
        otherwise: Residual life by another model [n], e.g. the histogram's; None for none.

    Returns:
        Tokens [n], > 0.
    """
    lives = quantiles > num_output[:, None]
    num_lives = lives.sum(axis=1)
    mass = np.einsum("ij,ij->i", quantiles, lives)
    left: FloatArray = mass / np.maximum(num_lives, 1) - num_output
    over = num_lives == 0
    if over.any():
        left[over] = _overrun(
            quantiles[over, -1], num_output[over], None if otherwise is None else otherwise[over]
        )
    return left


def remaining_at(
    q: float, quantiles: FloatArray, num_output: IntArray, otherwise: FloatArray
) -> FloatArray:
    """Quantile `q` of L - l given L > l of each row, before limits are applied.

    Between `LEVELS` the distribution function is linear; the mass beyond them sits on the first
    and the last quantile. An overrun estimate is taken as the mean of a uniform distribution.

    Args:
        q: Probability in (0, 1).
        quantiles, num_output, otherwise: As in `remaining_mean`; `otherwise` is a quantile.
    """
    num_dead = (quantiles <= num_output[:, None]).sum(axis=1)
    rows = np.arange(len(quantiles))
    below = quantiles[rows, np.maximum(num_dead - 1, 0)]
    above = quantiles[rows, np.minimum(num_dead, NUM_LEVELS - 1)]
    inside = (num_output - below) / np.maximum(above - below, 1e-9)
    # Share of the mass up to l, in tenths.
    dead = np.where(num_dead > 0, num_dead - 0.5 + np.clip(inside, 0.0, 1.0), 0.0)
    place = np.clip(dead + q * (NUM_LEVELS - dead) - 0.5, 0.0, NUM_LEVELS - 1.0)
    first = np.minimum(place.astype(np.int64), NUM_LEVELS - 2)
    share = place - first
    left: FloatArray = (
        (1.0 - share) * quantiles[rows, first] + share * quantiles[rows, first + 1] - num_output
    )
    over = num_dead == NUM_LEVELS
    if over.any():
        left[over] = _overrun(quantiles[over, -1], num_output[over], otherwise[over], share=2.0 * q)
    return left


def _overrun(
    largest: FloatArray, num_output: IntArray, otherwise: FloatArray | None, share: float = 1.0
) -> FloatArray:
    # The next doubling that lies above l.
    doublings = np.floor(np.log2(num_output / largest)) + 1.0
    left: FloatArray = share * (largest * 2.0**doublings - num_output)
    if otherwise is not None:
        weight = largest / num_output
        left = weight * left + (1.0 - weight) * otherwise
    return left
