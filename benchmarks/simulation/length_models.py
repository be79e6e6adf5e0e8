"""Schedulers that differ from `sola_sched.Scheduler` in what they know of output lengths only.

For comparison in virtual time; used as ``stock:engine.scheduler_cls=length_models:NAME``. The true
length is read off the request's name (``index:length``, see `sola_sched.bench.points`), which no
scheduler of the package does.
"""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist
from typing import Any

import numpy as np

from sola_sched.scheduler import Scheduler

#: Predicted by `Constant`; the mean of the histogram's prior.
CONSTANT_TOKENS = 256
#: Standard deviation of the logarithm of predicted / true length in `Noisy`.
NOISE_SIGMA = 0.5


class _KnownLengths:
    """A length per request instead of per class: every request is a class of its own.

    Args:
        sigma: Spread of the logarithm that the model admits to in its quantiles.
    """

    def __init__(self, sigma: float = 0.0) -> None:
        self.next_length = float(CONSTANT_TOKENS)  # of the request that is added next
        self._sigma = sigma
        self._lengths: list[float] = []
        self._table = np.empty(0)

    def class_of(self, num_prompt_tokens: int, max_tokens: int) -> int:
        self._lengths.append(self.next_length)
        return len(self._lengths) - 1

    def observe(self, class_id: int, num_output_tokens: int) -> None:
        pass

    def remaining(self, class_ids: Any, num_output: Any, max_tokens: Any) -> Any:
        return self._left(1.0, class_ids, num_output, max_tokens)

    def remaining_quantile(self, q: float, class_ids: Any, num_output: Any, max_tokens: Any) -> Any:
        factor = math.exp(self._sigma * NormalDist().inv_cdf(q))
        return self._left(factor, class_ids, num_output, max_tokens)

    def _left(self, factor: float, class_ids: Any, num_output: Any, max_tokens: Any) -> Any:
        if len(self._table) < len(self._lengths):
            self._table = np.array(self._lengths)
        left = self._table[class_ids] * factor - num_output
        return np.maximum(np.minimum(left, max_tokens - num_output), 1.0)


class _WithLengths(Scheduler):
    sigma = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known = _KnownLengths(self.sigma)
        self.sola_monitor.lengths = self._known

    def add_request(self, request: Any) -> None:
        self._known.next_length = self.predict(request.request_id)
        super().add_request(request)

    def predict(self, name: str) -> float:
        raise NotImplementedError


class Constant(_WithLengths):
    """No prediction: every output has `CONSTANT_TOKENS`, and one token once it has more."""

    def predict(self, name: str) -> float:
        return float(CONSTANT_TOKENS)


class Oracle(_WithLengths):
    """The true length."""

    def predict(self, name: str) -> float:
        # Warm-up requests do not tell theirs.
        return float(name.partition(":")[2] or CONSTANT_TOKENS)


class Noisy(Oracle):
    """The true length times a lognormal factor of median 1 that depends on the name alone."""

    sigma = NOISE_SIGMA

    def predict(self, name: str) -> float:
        rank = (zlib.crc32(name.encode()) + 0.5) / 2**32
        return max(1.0, super().predict(name) * math.exp(NOISE_SIGMA * NormalDist().inv_cdf(rank)))
