"""Latency, attainment and goodput: the only TTFT, TPOT and goodput formulas of the repository.

All times are seconds on one clock. TTFT runs from *arrival* to the first output token.
TPOT = (latency - TTFT) / (output tokens - 1); it is undefined (NaN) for a single token, which
counts as met. A request attains its SLO iff it completed and meets all of its targets: TTFT, TPOT
and the time to the last token, arrival to last token. A failed, lost or rejected request does not.
Goodput is attained requests per second of run, or the sum of what they are worth. The normalized
latency of a request is its latency (arrival to last token) / output tokens; that of a run is the
mean over its completed requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sola_sched.config.slo import DEFAULT_CLASS, SloTarget

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request.

    Attributes:
        req_id: Unique within the run.
        arrival_s: When the request arrived, whether or not it could be sent at once.
        num_prompt_tokens: Prompt length.
        token_times_s: Time of each output token, ascending.
        completed: All wanted tokens arrived.
        error: Why it did not complete; empty for a completed request.
        sent_s: When it was handed to the server; later than ``arrival_s`` if the client held it.
        slo: Its own targets, or None for those of the run.
        slo_class: Name it is reported under, or None.
    """

    req_id: str
    arrival_s: float
    num_prompt_tokens: int
    token_times_s: list[float] = field(default_factory=list)
    completed: bool = False
    error: str = ""
    sent_s: float | None = None
    slo: SloTarget | None = None
    slo_class: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; NaN before there is one."""
        return ttft_s(self.arrival_s, self.token_times_s[0]) if self.token_times_s else np.nan

    @property
    def latency_s(self) -> float:
        """Arrival to last token; NaN before there is one."""
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else np.nan

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; NaN for fewer than two tokens."""
        return tpot_s(self.latency_s, self.ttft_s, self.num_output_tokens)

    @property
    def normalized_latency_s(self) -> float:
        """Latency per output token; NaN before the first token."""
        return self.latency_s / self.num_output_tokens if self.token_times_s else np.nan

    @property
    def itls_s(self) -> list[float]:
        """Gaps between consecutive output tokens."""
        return np.diff(self.token_times_s).tolist() if len(self.token_times_s) > 1 else []

    def attains(self, default: SloTarget) -> bool:
        """True if the request completed and met all of its targets.

        Args:
            default: Targets of the run, used when the request has none of its own.
        """
        return meets_slo(
            self.ttft_s, self.tpot_s, self.latency_s, self.slo or default, self.completed
        )


def ttft_s(arrival_s: float, first_token_s: float) -> float:
    """Time to first token."""
    return first_token_s - arrival_s


def tpot_s(latency_s: float, ttft_s: float, num_output_tokens: int) -> float:
    """Mean time per output token after the first; NaN (undefined) for fewer than two tokens."""
    if num_output_tokens < 2:
        return float("nan")
    return (latency_s - ttft_s) / (num_output_tokens - 1)


def meets_slo(
    ttft_s: float, tpot_s: float, latency_s: float, slo: SloTarget, completed: bool = True
) -> bool:
    """True if a completed request meets all targets; an undefined TPOT (NaN) counts as met."""
    is_in_time = ttft_s <= slo.ttft_s and latency_s <= slo.e2e_s
    return bool(completed and is_in_time and not tpot_s > slo.tpot_s)


def attained(records: Iterable[RequestRecord], default: SloTarget) -> BoolArray:
    """One flag per request, in order. See ``RequestRecord.attains``."""
    return np.array([record.attains(default) for record in records], dtype=np.bool_)


def attainment_ratio(flags: ArrayLike) -> float:
    """Share of requests that attained their SLO, over *all* requests; NaN for none."""
    flags = np.asarray(flags, dtype=np.bool_)
    return float(flags.mean()) if flags.size else float("nan")


def weights(records: Iterable[RequestRecord], default: SloTarget) -> FloatArray:
    """What each request is worth that attains its SLO, in order."""
    return np.array([(record.slo or default).weight for record in records], dtype=np.float64)


def weighted_ratio(flags: ArrayLike, worth: ArrayLike) -> float:
    """Share of what all requests are worth that the attained ones are; NaN for none.

    Args:
        flags, worth: One each per request; see `attained` and `weights`.
    """
    flags, worth = np.asarray(flags, dtype=np.bool_), np.asarray(worth, dtype=np.float64)
    return float(worth[flags].sum() / worth.sum()) if flags.size else float("nan")


def goodput_per_s(flags: ArrayLike, duration_s: float, worth: ArrayLike = 1.0) -> float:
    """Attained requests per second of run, each counted as what it is worth.

    Raises:
        ValueError: ``duration_s`` is not > 0.
    """
    if not duration_s > 0:
        raise ValueError(f"'duration_s' must be > 0 (got {duration_s!r}).")
    return float((np.asarray(flags, dtype=np.bool_) * np.asarray(worth)).sum()) / duration_s


def mean_normalized_latency_s(records: Iterable[RequestRecord]) -> float:
    """Mean over the completed requests of latency / output tokens; NaN for none."""
    values = [record.normalized_latency_s for record in records if record.completed]
    return float(np.mean(values)) if values else float("nan")


def attainment_by_class(
    records: Sequence[RequestRecord], default: SloTarget
) -> dict[str, dict[str, float]]:
    """Attainment, number of requests and mean weight of each SLO class, sorted by name."""
    by_class: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_class.setdefault(record.slo_class or DEFAULT_CLASS, []).append(record)
    return {
        name: {
            "attainment": attainment_ratio(attained(members, default)),
            "num_requests": len(members),
            "weight": float(weights(members, default).mean()),
        }
        for name, members in sorted(by_class.items())
    }


def worst_class(by_class: Mapping[str, Mapping[str, float]]) -> str:
    """Of `attainment_by_class`, at least one, the class with the lowest attainment."""
    return min(by_class, key=lambda name: by_class[name]["attainment"])


def crossing_rate(
    rates_per_s: Sequence[float], attainments: Sequence[float], level: float = 0.9
) -> float:
    """Request rate at which attainment falls through ``level``, linear between measured rates.

    Attainment is noisy, so the crossing taken is the last one: the highest rate up to which the
    interpolated curve stays at or above ``level`` is where it crosses for good.

    Args:
        rates_per_s: Measured rates, any order.
        attainments: Attainment at each rate, in [0, 1].
        level: Attainment asked for, in (0, 1].

    Returns:
        Requests per second. 0.0 if no measured rate reaches ``level`` (the crossing lies
        below the lowest rate), ``inf`` if the highest still does (it lies above).
    """
    if len(rates_per_s) != len(attainments) or not len(rates_per_s):
        raise ValueError(
            "'rates_per_s' and 'attainments' must be of one length >= 1 "
            f"(got {len(rates_per_s)} and {len(attainments)})."
        )
    order = np.argsort(np.asarray(rates_per_s, dtype=np.float64), kind="stable")
    rates = np.asarray(rates_per_s, dtype=np.float64)[order]
    ratios = np.asarray(attainments, dtype=np.float64)[order]
    reached = np.flatnonzero(ratios >= level)
    if not reached.size:
        return 0.0
    last = int(reached[-1])
    if last == len(rates) - 1:
        return float("inf")
    share = (ratios[last] - level) / (ratios[last] - ratios[last + 1])
    return float(rates[last] + share * (rates[last + 1] - rates[last]))


def describe(values_s: Iterable[float], percentiles: Sequence[float]) -> Mapping[str, float]:
    """Mean, median, standard deviation and percentiles of the finite values; NaN for none.

    Returns:
        Keys ``mean``, ``median``, ``std`` and ``p<N>`` for each percentile, unit of the input.
    """
    values = np.asarray(list(values_s), dtype=np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        values = np.array([np.nan])
    row = {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std()),
    }
    for percentile in percentiles:
        row[f"p{percentile:g}"] = float(np.percentile(values, percentile))
    return row


def peak_rates(records: Sequence[RequestRecord]) -> tuple[float, int]:
    """Busiest second: most output tokens, and most completed requests in flight.

    Both are counted in one-second buckets from the first arrival, as ``vllm bench serve`` does.
    """
    done = [record for record in records if record.completed]
    if not done:
        return 0.0, 0
    start_s = min(record.arrival_s for record in done)
    tokens_s = np.concatenate([np.asarray(record.token_times_s) for record in done])
    _, num_tokens = np.unique(np.floor(tokens_s - start_s), return_counts=True)
    first = np.floor([record.arrival_s - start_s for record in done])
    after = np.floor([record.token_times_s[-1] - start_s for record in done]) + 1.0
    # Only the buckets in which something changes: between rare arrivals lie millions of others.
    _, places = np.unique(np.concatenate([first, after]), return_inverse=True)
    changes = np.bincount(places, weights=np.repeat([1.0, -1.0], len(done)))
    return float(num_tokens.max()), int(np.cumsum(changes).max())
