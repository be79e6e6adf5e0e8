"""Output lengths of finished requests, and what they say about running ones.

Source: SOLA (Hong et al., MLSys 2025), section 4.3 (4): finished requests are classified by the
ranges of input length and of maximum output length, and each range pair has a distribution of
output lengths. The paper leaves open what a class without data does, how old data leaves, and
which statistic of the distribution is used; here:

- A class's measure is its own samples plus a few pseudo-samples of all requests' lengths, which
  have a few pseudo-samples of a prior themselves. Few samples thus fall back smoothly, and so
  does the far tail of a class, where even many samples leave few.
- An output that ended at its limit would have gone on: to other classes it says only that it is at
  least so long. Those shorter than half of the outputs that ended by themselves are shared out over
  all longer ones (Kaplan and Meier, 1958); longer ones count as they are, as hardly anything says
  how they would have gone on.
- Old samples fade exponentially, on the clock of their own class.
- The statistics are conditional on what a request has generated: E[L - l | L > l] and quantiles
  of it.

The prior is a Lomax distribution of shape 2, P(L > l) = (1 + l / 256)^-2, cut at the class's
maximum output length: 256 tokens are expected at the start, 256 + l after l tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sola_sched.prediction.length import LengthLines

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.integer]

#: Longer outputs count as this long.
MAX_LENGTH = 2**17
_EXACT_LENGTHS = 32
_BINS_PER_OCTAVE = 16
_PRIOR_MEAN = 256.0
# Pseudo-samples of all lengths in a class, and of the prior in all lengths.
_GLOBAL_SAMPLES = 16.0
_PRIOR_SAMPLES = 8.0
_REBUILD_EVERY = 64
_MAX_CACHED_QUANTILES = 8
_RESCALE_AT = 1e100
_MAX_RANGE = 20
# Limits of a class's requests that are remembered: one that ended at its own is known by it.
_MAX_LIMITS = 256


def _bin_starts() -> NDArray[np.int64]:
    # One bin per length up to 32, then 16 per factor of two: at most 1/16 wide.
    starts = list(range(1, _EXACT_LENGTHS))
    base = _EXACT_LENGTHS
    while base < MAX_LENGTH:
        starts += [base + i * base // _BINS_PER_OCTAVE for i in range(_BINS_PER_OCTAVE)]
        base *= 2
    return np.array([*starts, MAX_LENGTH], dtype=np.int64)


_START = _bin_starts()  # [num_bins], first length of each bin
_NUM_BINS = len(_START)
_WIDTH = np.diff(_START, append=MAX_LENGTH + 1)  # [num_bins]
_HALVES = tuple(2**power for power in range(_NUM_BINS.bit_length() - 1, -1, -1))
_MIDDLE = _START + (_WIDTH - 1) / 2.0  # [num_bins]
_WHOLE, _CUT, _FIRST_CLASS = 0, 1, 2  # rows


def _prior() -> NDArray[np.float64]:
    survival = (1.0 + np.append(_START - 1, MAX_LENGTH) / _PRIOR_MEAN) ** -2.0
    prior: NDArray[np.float64] = -np.diff(survival)
    prior[-1] += survival[-1]
    return prior


_PRIOR = _prior()  # [num_bins], mass of each


class LengthHistogram:
    """Distribution of output lengths per class of requests, with forgetting.

    Memory is bounded: 441 classes of each service at most, 224 bins each. Not thread-safe.

    Args:
        memory: Samples after which an old one has faded to 1/e, per class, >= 1.
    """

    def __init__(self, *, memory: int = 1000) -> None:
        if memory < 1:
            raise ValueError(f"'memory' must be >= 1 (got {memory!r}).")
        self._memory = memory
        self._growth = 1.0 + 1.0 / memory
        self._bin_of = np.searchsorted(_START, np.arange(MAX_LENGTH + 1), side="right") - 1
        self._ids: dict[tuple[int, int, int], int] = {}
        self._caps: list[int] = []
        self._limits: list[dict[int, None]] = []  # of each class, latest last
        # Row 0 is all requests that ended by themselves, row 1 all that ended at their limit, on
        # one clock; row 2 + class_id is a class.
        self._weights = np.zeros((_FIRST_CLASS, _NUM_BINS))
        self._lengths = np.zeros((_FIRST_CLASS, _NUM_BINS))  # sum of weight * length
        self._next_weight = [1.0]  # of rows 0 and 1, then of each class
        self._half = _half_of(_PRIOR_SAMPLES * _PRIOR)
        self._num_observed = 0
        self._rebuild_at = 0
        self._tail = np.zeros((0, _NUM_BINS + 1))  # [class, bin], mass of lengths >= start
        self._mean_line = np.zeros((2, 0))
        self._quantile_lines: dict[float, FloatArray] = {}

    @property
    def num_observed(self) -> int:
        """Finished requests taken in so far."""
        return self._num_observed

    @property
    def num_classes(self) -> int:
        """Classes seen so far."""
        return len(self._ids)

    def class_of(self, num_prompt_tokens: int, max_tokens: int, service: int = 0) -> int:
        """The class of a request: log2 ranges of input length and of maximum output length.

        Args:
            num_prompt_tokens: Prompt length, >= 0.
            max_tokens: Most tokens it may generate, >= 1.
            service: Number of its service; those of each are apart.

        Returns:
            A small integer, counted from 0 in order of first use; stable for this object.
        """
        key = (
            min(int(num_prompt_tokens).bit_length(), _MAX_RANGE),
            min(int(max_tokens).bit_length(), _MAX_RANGE),
            service,
        )
        class_id = self._ids.get(key)
        if class_id is None:
            class_id = self._ids[key] = len(self._ids)
            self._caps.append(min(2 ** key[1] - 1, MAX_LENGTH))
            self._limits.append({})
            self._weights = np.pad(self._weights, ((0, 1), (0, 0)))
            self._lengths = np.pad(self._lengths, ((0, 1), (0, 0)))
            self._next_weight.append(1.0)
            self._rebuild_at = 0
        limits = self._limits[class_id]
        limits.pop(max_tokens, None)
        limits[max_tokens] = None
        if len(limits) > _MAX_LIMITS:
            del limits[next(iter(limits))]
        return class_id

    def observe(self, class_id: int, num_output_tokens: int) -> None:
        """Take in a request that ended by itself or by its limit; not for aborted ones.

        One that has as many tokens as a limit of its class counts as cut by it.

        Args:
            class_id: From ``class_of``.
            num_output_tokens: Tokens generated; less than 1 is ignored.
        """
        if num_output_tokens < 1:
            return
        if not 0 <= class_id < len(self._ids):
            raise ValueError(
                f"'class_id' must come from class_of() (got {class_id!r} of {len(self._ids)})."
            )
        length = min(num_output_tokens, MAX_LENGTH)
        column = self._bin_of[length]
        is_cut = num_output_tokens in self._limits[class_id]
        # A short one that was cut says little, which is no reason to forget what others said.
        self._add(_CUT if is_cut else _WHOLE, 0, length, not is_cut or column >= self._half)
        self._add(_FIRST_CLASS + class_id, 1 + class_id, length, True)
        self._num_observed += 1

    def _add(self, row: int, clock: int, length: int, fades: bool) -> None:
        """Count a length in a row; one that ``fades`` makes all on the row's clock older."""
        column, weight = self._bin_of[length], self._next_weight[clock]
        self._weights[row, column] += weight
        self._lengths[row, column] += weight * length
        if not fades:
            return
        # Newer samples weigh more instead of older ones less: one cell changes, not all.
        weight *= self._growth
        if weight > _RESCALE_AT:
            rows = slice(row, row + 1) if clock else slice(_FIRST_CLASS)
            self._weights[rows] /= weight
            self._lengths[rows] /= weight
            weight = 1.0
        self._next_weight[clock] = weight

    def remaining(
        self, class_ids: IntArray, num_output: IntArray, max_tokens: IntArray
    ) -> FloatArray:
        """Expected tokens still to come, E[L - l | L > l], elementwise.

        Args:
            class_ids: Classes [n] from ``class_of``.
            num_output: Tokens generated so far [n], l >= 0.
            max_tokens: Most tokens each request may generate [n].

        Returns:
            Tokens [n], at least 1 and at most ``max_tokens - num_output`` (but 1).
        """
        self._refresh()
        return self._evaluate(self._mean_line, class_ids, num_output, max_tokens)

    def lines(self) -> LengthLines:
        """What `remaining` goes by now, for compiled code."""
        self._refresh()
        return LengthLines(self._bin_of, self._mean_line.reshape(2, -1, _NUM_BINS))

    def remaining_quantile(
        self, q: float, class_ids: IntArray, num_output: IntArray, max_tokens: IntArray
    ) -> FloatArray:
        """Quantile of the tokens still to come, given L > l; arguments as ``remaining``.

        Args:
            q: Probability in (0, 1). A table is kept for each of the last few values used.
            class_ids: Classes [n] from ``class_of``.
            num_output: Tokens generated so far [n].
            max_tokens: Most tokens each request may generate [n].

        Returns:
            Tokens [n], at least 1 and at most ``max_tokens - num_output`` (but 1), monotone in q.
        """
        if not 0.0 < q < 1.0:
            raise ValueError(f"'q' must be in (0, 1) (got {q!r}).")
        self._refresh()
        line = self._quantile_lines.get(q)
        if line is None:
            if len(self._quantile_lines) >= _MAX_CACHED_QUANTILES:
                del self._quantile_lines[next(iter(self._quantile_lines))]
            line = self._quantile_lines[q] = np.full((2, self._tail.shape[0] * _NUM_BINS), np.nan)
        # Classes are added as somebody asks for them: of hundreds, few have requests at a time.
        lacks = np.isnan(line[0].take(class_ids * _NUM_BINS))
        if lacks.any():
            rows = np.unique(np.asarray(class_ids)[lacks])
            cells = (rows[:, None] * _NUM_BINS + np.arange(_NUM_BINS)).ravel()
            line[:, cells] = self._quantile_line(q, rows)
        return self._evaluate(line, class_ids, num_output, max_tokens)

    def _evaluate(
        self, line: FloatArray, class_ids: IntArray, num_output: IntArray, max_tokens: IntArray
    ) -> FloatArray:
        # A request with l tokens has L >= l + 1: it sits in the bin of length l + 1.
        cell = self._bin_of.take(num_output + 1, mode="clip")
        cell += class_ids * _NUM_BINS
        result: FloatArray = line[1].take(cell)
        result *= num_output
        result += line[0].take(cell)
        np.minimum(result, max_tokens - num_output, out=result)
        return np.maximum(result, 1.0, out=result)

    def _refresh(self) -> None:
        if self._num_observed < self._rebuild_at:
            return
        weights, lengths = self._class_measures()
        self._tail = np.zeros((len(weights), _NUM_BINS + 1))
        self._tail[:, :-1] = _sum_from_end(weights)
        # Below the smallest normal numbers the ratio of two sums means nothing.
        mass = np.maximum(self._tail[:, :-1], 1e-290)
        self._mean_line = _line(_sum_from_end(lengths) / mass - (_START - 1))
        self._quantile_lines.clear()
        # Early samples change much, later ones little.
        self._rebuild_at = self._num_observed + min(_REBUILD_EVERY, 1 + self._num_observed // 8)

    def _class_measures(self) -> tuple[FloatArray, FloatArray]:
        """Mass and mass times length [num_classes, num_bins], fallbacks mixed in."""
        self._bound_cut()
        scale = np.array([self._next_weight[0], *self._next_weight])[:, None]
        weights = self._weights / scale
        lengths = self._lengths / scale
        ends = weights[_WHOLE] + _PRIOR_SAMPLES * _PRIOR
        self._half = _half_of(ends)
        cut = weights[_CUT].copy()
        ends[self._half :] += cut[self._half :]
        cut[self._half :] = 0.0
        end_lengths = lengths[_WHOLE] + _PRIOR_SAMPLES * _PRIOR * _MIDDLE
        end_lengths[self._half :] += lengths[_CUT, self._half :]
        # An end also stands for its share of all that were cut at most where it is.
        at_least, cut_later = _sum_from_end(ends), _sum_from_end(cut)
        stands_for = at_least + cut_later
        stands_for /= at_least + np.append(cut_later[1:], 0.0)
        np.cumprod(stands_for, out=stands_for)
        global_mass = at_least[0] + cut_later[0]
        all_weights = ends * stands_for / global_mass
        all_lengths = end_lengths * stands_for / global_mass
        class_weights = weights[_FIRST_CLASS:] + _GLOBAL_SAMPLES * all_weights
        class_lengths = lengths[_FIRST_CLASS:] + _GLOBAL_SAMPLES * all_lengths
        # A request stops at its limit: longer lengths of others are that limit here.
        caps = np.array(self._caps, dtype=np.int64)
        last, rows = self._bin_of[caps], np.arange(len(caps))
        is_beyond = np.arange(_NUM_BINS) > last[:, None]
        excess = np.where(is_beyond, class_weights, 0.0).sum(axis=1)
        class_weights[is_beyond] = class_lengths[is_beyond] = 0.0
        class_weights[rows, last] += excess
        class_lengths[rows, last] += excess * caps
        return class_weights, class_lengths

    def _bound_cut(self) -> None:
        """Short ones do not fade what is on their clock: here their own mass is kept in bounds."""
        most = self._memory * self._next_weight[0]
        mass = self._weights[_CUT, : self._half].sum()
        if mass > most:
            self._weights[_CUT, : self._half] *= most / mass
            self._lengths[_CUT, : self._half] *= most / mass

    def _quantile_line(self, q: float, rows: IntArray) -> FloatArray:
        """The line of some classes, as `_line`."""
        tail = self._tail[rows]
        target = (1.0 - q) * tail[:, :-1]
        first = np.arange(len(rows))[:, None] * (_NUM_BINS + 1)
        # The last bin whose tail, the mass of its lengths and longer ones, exceeds the target.
        # Tails descend: it is found by halving, for all at once.
        column = np.zeros(target.shape, dtype=np.int64)
        for step in _HALVES:
            further = column + step
            is_above = tail.take(first + np.minimum(further, _NUM_BINS)) > target
            column = np.where(is_above & (further < _NUM_BINS), further, column)
        above, below = tail.take(first + column), tail.take(first + column + 1)
        inside = above - below
        share = (above - target) / np.where(inside > 0.0, inside, 1.0)
        length = _START[column] - 1 + np.ceil(_WIDTH[column] * np.clip(share, 0.0, 1.0))
        return _line(length - (_START - 1))


def _sum_from_end(values: FloatArray) -> FloatArray:
    result: FloatArray = np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]
    return result


def _half_of(mass: FloatArray) -> int:
    """The bin up to which half of the mass is reached."""
    up_to = np.cumsum(mass)
    return int(np.searchsorted(up_to, up_to[-1] / 2.0))


def _line(residual: FloatArray) -> FloatArray:
    """Intercepts and slopes [2, num_classes * num_bins] of residuals known at bin starts."""
    residual = np.maximum(residual, 1.0)
    slope = np.diff(residual, axis=1, append=residual[:, -1:]) / _WIDTH
    return np.stack([(residual - slope * (_START - 1)).ravel(), slope.ravel()])
