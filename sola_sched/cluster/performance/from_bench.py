"""Samples from `vllm bench serve --save-result --save-detailed`.

The file has no steps, but each request's start, time to first token and gaps between tokens. From
these follows who decoded together:

- A request that came when nothing else was on the engine, and whose prefill nobody joined, took a
  prefill step of its prompt alone.
- A gap between two tokens of a request in which nobody prefilled was a decode step of all requests
  that were between their first and last token.

Rates that leave the engine idle now and then give the first kind, rates that keep many requests
running the second; give several files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sola_sched.cluster.performance.samples import DecodeSamples, FloatArray, PrefillSamples
from sola_sched.errors import ProfileError

_KEYS = ("input_lens", "output_lens", "ttfts", "itls", "start_times")
#: Gaps shorter than this share of the median come from tokens that arrived in one piece.
_BUNDLED = 0.2
#: Times of one step differ by no more than this through rounding.
_ROUNDING_S = 1e-6


def samples_of_bench(paths: Sequence[Path]) -> tuple[PrefillSamples, DecodeSamples]:
    """Prefill and decode steps of one or more detailed results of the same engine.

    Raises:
        ProfileError: A file cannot be read or lacks the details.
    """
    prefill: list[tuple[float, ...]] = []
    decode: list[tuple[float, ...]] = []
    for path in paths:
        runs = _Runs(_read(path))
        prefill += runs.prefill_rows()
        decode += runs.decode_rows()
    return PrefillSamples.of_rows(prefill), DecodeSamples.of_rows(decode)


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"Result {str(path)!r} must be a JSON file: {error}.") from error
    missing = [key for key in _KEYS if not isinstance(result, dict) or key not in result]
    if missing:
        raise ProfileError(
            f"Result {str(path)!r} must hold {', '.join(missing)}; "
            "run `vllm bench serve` with --save-result --save-detailed."
        )
    if len({len(result[key]) for key in _KEYS}) != 1:
        raise ProfileError(f"The lists of {str(path)!r} must be of one length.")
    return dict(result)


class _Runs:
    """The successful requests of one result, on a common clock."""

    def __init__(self, result: dict[str, Any]) -> None:
        ok = [i for i, gaps in enumerate(result["itls"]) if result["ttfts"][i] > 0.0]
        self.prompts: FloatArray = np.array([result["input_lens"][i] for i in ok], dtype=float)
        self.starts: FloatArray = np.array([result["start_times"][i] for i in ok], dtype=float)
        self.firsts: FloatArray = self.starts + np.array([result["ttfts"][i] for i in ok])
        self.gaps = [np.asarray(result["itls"][i], dtype=float) for i in ok]
        self.since_first = [np.cumsum(gaps) for gaps in self.gaps]
        lasts = [times[-1] if len(times) else 0.0 for times in self.since_first]
        self.ends: FloatArray = self.firsts + np.array(lasts, dtype=float)

    def prefill_rows(self) -> list[tuple[float, ...]]:
        rows: list[tuple[float, ...]] = []
        for i, (start, first) in enumerate(zip(self.starts, self.firsts, strict=True)):
            others = (self.starts < first) & (self.ends > start)
            if others.sum() == 1:
                rows.append((1.0, self.prompts[i], self.prompts[i], float(first - start)))
        return rows

    def decode_rows(self) -> list[tuple[float, ...]]:
        rows: list[tuple[float, ...]] = []
        for i, gaps in enumerate(self.gaps):
            if not len(gaps):
                continue
            times = self.firsts[i] + np.concatenate([[0.0], self.since_first[i]])
            shortest = _BUNDLED * float(np.median(gaps))
            for begin, end in pairwise(times):
                row = self._decode_row(i, begin, end) if end - begin > shortest else None
                if row is not None:
                    rows.append(row)
        return rows

    def _decode_row(self, owner: int, begin: float, end: float) -> tuple[float, ...] | None:
        begin, end = begin + _ROUNDING_S, end - _ROUNDING_S
        prefills = (self.starts < end) & (self.firsts > begin)
        decodes = (self.firsts <= begin) & (self.ends >= end)
        # All requests of a step see it as a gap of theirs: the first of them counts it.
        if prefills.any() or int(decodes.argmax()) != owner:
            return None
        (who,) = decodes.nonzero()
        tokens = [
            self.prompts[j] + 1 + np.searchsorted(self.since_first[j], begin - self.firsts[j])
            for j in who
        ]
        return (
            float(len(who)),
            float(max(tokens)),
            float(sum(tokens)),
            end - begin + 2 * _ROUNDING_S,
        )
