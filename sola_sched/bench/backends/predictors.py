"""Length predictions in virtual time, where the true length is known and the prompt's text is not.

A predictor is named where the scheduler is: ``sola:policy=alise,sim.predictor=oracle``.

- ``none``: none; the scheduler has its own histogram of finished requests.
- ``constant:TOKENS``: the same length for every request.
- ``oracle``: the true length.
- ``given``: the request's own `RequestSpec.prediction`, made from its text beforehand.
- ``noisy:SIGMA``: the true length x a lognormal factor of median 1; the quantiles admit to SIGMA.
- ``wrong:FACTOR``: the true length times FACTOR for half of the requests, divided by it for the
  others, in full confidence.
- ``recorded:FILE``: with the errors of a real predictor on other prompts, see `RecordedErrors`.

Each depends on the request and the seed alone, not on the order of arrival.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.bench.values import positive_number
from sola_sched.errors import ConfigError
from sola_sched.prediction.length import LEVELS, NUM_LEVELS, LengthPrediction
from sola_sched.workloads.workload import RequestSpec

#: A request to its prediction, or None.
Predict = Callable[[RequestSpec], LengthPrediction | None]

FloatArray = NDArray[np.float64]

_NORMAL = NormalDist()
_SPREAD = np.array([_NORMAL.inv_cdf(level) for level in LEVELS])
#: Recorded pairs nearest in true length among which one is drawn.
_NUM_NEAREST = 64


def make_predictor(name: str, seed: int = 0) -> Predict | None:
    """The predictor of a name from the list above; None for ``none``.

    Raises:
        ConfigError: There is no such predictor, or its argument is wrong.
    """
    kind, _, argument = name.partition(":")
    if kind == "none" and not argument:
        return None
    if kind == "oracle" and not argument:
        return lambda request: LengthPrediction.exactly(request.output_tokens)
    if kind == "given" and not argument:
        return lambda request: request.prediction
    if kind in ("constant", "noisy", "wrong"):
        number = positive_number(argument, f"sim.predictor={name}")
        if kind == "constant":
            return lambda request: LengthPrediction.exactly(number, "histogram")
        return _noisy(number, seed) if kind == "noisy" else _wrong(number, seed)
    if kind == "recorded" and argument:
        return RecordedErrors.read(Path(argument)).predictor(seed)
    raise ConfigError(
        "'sim.predictor' must be none, constant:TOKENS, oracle, given, noisy:SIGMA, wrong:FACTOR "
        f"or recorded:FILE (got {name!r})."
    )


class RecordedErrors:
    """Predictions whose errors are those of a real predictor on real prompts.

    A request gets the errors of one recorded pair: of the `_NUM_NEAREST` pairs whose true length is
    nearest to its own, one at random. Its quantiles are the recorded ones x its own length over
    the recorded one. That keeps what the predictor knows at each length - its bias towards the
    middle, its spread, how far its quantiles can be trusted - on a workload without text.

    Args:
        lengths: True output tokens [n], >= 1.
        quantiles: Predicted quantiles [n, 10].
        source: What the predictions rest on; one of `sola_sched.prediction.length.SOURCES`.
    """

    def __init__(self, lengths: FloatArray, quantiles: FloatArray, source: str) -> None:
        if quantiles.shape != (len(lengths), NUM_LEVELS) or not len(lengths):
            raise ConfigError(
                f"Recorded predictions must be [n, {NUM_LEVELS}] quantiles of n >= 1 lengths "
                f"(got {quantiles.shape} for {len(lengths)})."
            )
        order = np.argsort(lengths, kind="stable")
        self.lengths = lengths[order].astype(np.float64)
        self.ratios = np.sort(quantiles[order], axis=1) / self.lengths[:, None]
        self.source = source

    @classmethod
    def read(cls, path: Path) -> RecordedErrors:
        """Read ``{"source": ..., "lengths": [n], "quantiles": [n][10]}`` (JSON).

        Raises:
            ConfigError: The file is missing or not of this form.
        """
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            lengths = np.array(raw["lengths"], dtype=np.float64)
            quantiles = np.array(raw["quantiles"], dtype=np.float64)
            return cls(lengths, quantiles, raw["source"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} must hold recorded predictions, JSON with source, lengths and quantiles "
                f"({type(error).__name__}: {error})."
            ) from error

    def predictor(self, seed: int = 0) -> Predict:
        """Predictions with these errors."""
        num_pairs = len(self.lengths)
        width = min(_NUM_NEAREST, num_pairs)

        def predict(request: RequestSpec) -> LengthPrediction:
            length = request.output_tokens
            place = int(np.searchsorted(self.lengths, length))
            first = min(max(0, place - width // 2), num_pairs - width)
            pick = first + int(_share(request.req_id, seed) * width)
            return LengthPrediction(np.maximum(self.ratios[pick] * length, 1.0), self.source)

        return predict


def _noisy(sigma: float, seed: int) -> Predict:
    def predict(request: RequestSpec) -> LengthPrediction:
        error = sigma * _NORMAL.inv_cdf(_share(request.req_id, seed))
        tokens = request.output_tokens * np.exp(error + sigma * _SPREAD)
        return LengthPrediction(np.maximum(tokens, 1.0), "neighbours")

    return predict


def _wrong(factor: float, seed: int) -> Predict:
    def predict(request: RequestSpec) -> LengthPrediction:
        is_long = _share(request.req_id, seed) < 0.5
        wrong = request.output_tokens * (factor if is_long else 1.0 / factor)
        return LengthPrediction.exactly(max(1.0, wrong), "neighbours")

    return predict


def _share(name: str, seed: int) -> float:
    """A number in (0, 1) that the name and the seed decide."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**32
