"""Whether a comparison on a real machine can be trusted: equal speed, and long enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sola_sched.core.metrics import RequestRecord

#: The reference batch may take so much longer beside one scheduler than beside the other.
MAX_UNEVEN = 0.05
#: And its slowest time may be so many times its fastest.
MAX_RANGE = 1.3
#: Who keeps the targets of fewer requests does not sustain the rate.
MOST = 0.5
#: Share of the requests, those that arrive last, whose wait tells of the queue.
_LAST = 0.1
_MIN_LAST = 5


@dataclass(frozen=True)
class Evenness:
    """How equal the machine was beside the runs that are compared.

    Attributes:
        uneven: Largest relative difference of the reference batch's mean time between our runs and
            those of the stock setting compared with, over the loads; NaN if nobody measured it.
        range: Slowest over fastest reference batch.
    """

    uneven: float
    range: float

    @property
    def is_even(self) -> bool:
        """Whether schedulers and not the machine made the difference."""
        return not (self.uneven > MAX_UNEVEN or self.range > MAX_RANGE)


def evenness(times_s: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Evenness:
    """Compare the times of the reference batch.

    Args:
        times_s: For each load: beside our runs, and beside those of the stock setting.
    """
    pairs = [(ours, others) for ours, others in times_s if len(ours) and len(others)]
    if not pairs:
        return Evenness(math.nan, math.nan)
    ratios = [float(np.mean(ours) / np.mean(others)) for ours, others in pairs]
    every = [time_s for pair in pairs for group in pair for time_s in group]
    return Evenness(max(max(r, 1.0 / r) - 1.0 for r in ratios), max(every) / min(every))


def end_wait_s(records: Sequence[RequestRecord]) -> float:
    """How long those who arrive last wait for a first token: the median, seconds.

    Without any answer the wait is infinite.
    """
    count = max(_MIN_LAST, round(_LAST * len(records)))
    last = sorted(records, key=lambda record: record.arrival_s)[-count:]
    waits_s = [r.ttft_s if r.token_times_s else math.inf for r in last]
    return float(np.median(waits_s))


def is_saturated(
    waits_s: Mapping[str, Sequence[float]], attained: Mapping[str, Sequence[float]], ttft_s: float
) -> bool:
    """Whether no stock setting sustained the rate.

    Either those who came last were all late, or most requests missed a target in every run.

    Args:
        waits_s: `end_wait_s` of the runs of each stock setting.
        attained: Share of the requests of each of these runs within both targets.
        ttft_s: Target, seconds.
    """
    waits = [wait_s for group in waits_s.values() for wait_s in group]
    shares = [share for group in attained.values() for share in group]
    return bool(waits) and (min(waits) > ttft_s or max(shares) < MOST)
