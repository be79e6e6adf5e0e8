"""A workload: requests with lengths and arrival times, the same for every scheduler compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError
from sola_sched.prediction.length import LengthPrediction

#: Ids below this are left out of random prompts: special tokens live there in most vocabularies.
FIRST_PLAIN_TOKEN = 3


@dataclass(frozen=True)
class RequestSpec:
    """One request to send.

    Attributes:
        req_id: Unique within the workload.
        prompt_token_ids: The prompt.
        output_tokens: Tokens to generate, exactly, >= 1; end-of-text is ignored.
        arrival_s: Seconds from the start of the run.
        slo: Its own targets, or None for those of the run.
        slo_class: Name it is reported under, or None.
        priority: As vLLM's, smaller is more urgent; in virtual time only, and read only with
            ``engine.scheduling_policy=priority``.
        prediction: Of its output length, made from its text beforehand; for virtual time only.
        after: ``req_id`` of the request whose end it waits for, as the next turn of a conversation
            does; ``arrival_s`` then counts from that end. In virtual time only.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    arrival_s: float = 0.0
    slo: SloTarget | None = None
    slo_class: str | None = None
    priority: int = 0
    prediction: LengthPrediction | None = None
    after: str | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        requests: Sorted by ``arrival_s``, those left out that wait for another's end.
        request_rate: Mean arrivals per second asked for; ``inf`` sends all at once.
        burstiness: Shape of the gamma-distributed gaps; 1 is a Poisson process.
        notes: What was changed on the way from the data set, in sentences for the report.
    """

    requests: tuple[RequestSpec, ...]
    request_rate: float = math.inf
    burstiness: float = 1.0
    notes: tuple[str, ...] = ()

    def at_rate(self, request_rate: float, *, burstiness: float = 1.0, seed: int = 0) -> Workload:
        """The same requests in the same order with new arrival times."""
        arrivals = arrival_times(len(self.requests), request_rate, burstiness, seed)
        requests = tuple(
            replace(request, arrival_s=float(at))
            for request, at in zip(self.requests, arrivals, strict=True)
        )
        return replace(self, requests=requests, request_rate=request_rate, burstiness=burstiness)

    def stretched_to(self, request_rate: float) -> Workload:
        """The recorded arrivals, stretched in time to a mean of ``request_rate`` per second.

        Raises:
            ConfigError: All come at once, so that there is nothing to stretch.
        """
        if math.isinf(request_rate) or not self.requests:
            return self
        span_s = self.requests[-1].arrival_s
        if span_s <= 0 and len(self.requests) == 1:
            return replace(self, request_rate=request_rate)  # there is no gap to stretch
        if span_s <= 0:
            raise ConfigError(
                "Arrival times must be finite, >= 0 and not all at once "
                f"(all {len(self.requests)} requests have that of the first); leave --self-timed "
                "out."
            )
        factor = (len(self.requests) / request_rate) / span_s
        requests = tuple(replace(r, arrival_s=r.arrival_s * factor) for r in self.requests)
        return replace(self, requests=requests, request_rate=request_rate)


def arrival_times(
    num_requests: int, request_rate: float, burstiness: float = 1.0, seed: int = 0
) -> NDArray[np.float64]:
    """Arrival times of a gamma renewal process whose last arrival is at ``n / rate``.

    Gaps are drawn from a gamma distribution of shape ``burstiness``; 1 gives a Poisson process,
    less is burstier, ``inf`` is evenly spaced. As in ``vllm bench serve`` all times are then
    scaled by one factor so that the realised rate is the rate asked for, whatever the seed.

    Args:
        num_requests: >= 1.
        request_rate: Requests per second, > 0; ``inf`` gives zeros.
        burstiness: > 0.
        seed: Of the gaps.

    Returns:
        [num_requests] seconds, ascending.
    """
    if not request_rate > 0:
        raise ConfigError(f"'request_rate' must be > 0 (got {request_rate!r}).")
    if not burstiness > 0:
        raise ConfigError(f"'burstiness' must be > 0 (got {burstiness!r}).")
    if math.isinf(request_rate):
        return np.zeros(num_requests)
    if math.isinf(burstiness):
        return np.arange(1, num_requests + 1) / request_rate
    rng = np.random.default_rng([seed, 1])
    times = np.cumsum(rng.gamma(shape=burstiness, scale=1.0 / burstiness, size=num_requests))
    if not (0.0 < times[-1] < math.inf and num_requests / request_rate < math.inf):
        raise ConfigError(
            "Arrivals must lie at finite times (got 'request_rate' "
            f"{request_rate!r} and 'burstiness' {burstiness!r}); raise the smaller one."
        )
    return np.asarray(times * (num_requests / request_rate) / times[-1], dtype=np.float64)


def random_token_ids(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Uniform token ids of the vocabulary, without its first few (special) ids."""
    return tuple(rng.integers(FIRST_PLAIN_TOKEN, vocab_size, size=num_tokens).tolist())


@dataclass(frozen=True)
class SloClass:
    """A share of the requests that has its own targets.

    Attributes:
        share: Weight among the classes, > 0.
        slo: Its targets.
    """

    name: str
    share: float
    slo: SloTarget


def assign_classes(workload: Workload, classes: Sequence[SloClass], seed: int) -> Workload:
    """Give each request one of ``classes`` at random, by share; unchanged if there are none."""
    if not classes:
        return workload
    shares = np.array([c.share for c in classes], dtype=np.float64)
    picks = np.random.default_rng([seed, 2]).choice(
        len(classes), size=len(workload.requests), p=shares / shares.sum()
    )
    requests = tuple(
        replace(request, slo=classes[pick].slo, slo_class=classes[pick].name)
        for request, pick in zip(workload.requests, picks, strict=True)
    )
    return replace(workload, requests=requests)
