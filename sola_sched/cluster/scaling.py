"""How many instances a changing request rate needs, and when to say so.

Source: Aladdin, section 5.2:

    N_w = ceil(k5 r_a + c5),  r_a > R                                           (Eq. 7)

Below R too few requests come in a heartbeat to show the true lengths: the standard error of their
mean, sigma / sqrt(n), exceeds what is tolerated. The law is used from R on, and its value at R for
lower rates.

The rate is that since the last change point: `ruptures` finds where the counts of a heartbeat
changed. Counts of independent arrivals have a variance that is their mean; with square roots taken
it is 1/4 whatever the rate, which makes the penalty of a change point a plain number.

Hysteresis, which the paper leaves open: up as soon as the rate has changed; down to the most that
were needed at any time of the last `down_delay_s`, if these are fewer by more than `slack`.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import ConfigError

FloatArray = NDArray[np.float64]

#: Variance of the square root of a Poisson count.
_SQRT_VARIANCE = 0.25
#: Heartbeats without a count after which it begins anew what was enough for how long.
_GAP = 3.0


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """Eq. 7.

    Attributes:
        per_rate: k5, instances per request/s, >= 0.
        fixed: c5, instances.
        lowest_rate_per_s: R.
    """

    per_rate: float
    fixed: float
    lowest_rate_per_s: float = 0.0

    def instances(self, rate_per_s: float) -> int:
        """N_w for a rate, at least 1.

        Raises:
            ConfigError: The rate is negative or not finite.
        """
        if not 0.0 <= rate_per_s < math.inf:
            raise ConfigError(f"'rate_per_s' must be finite and >= 0 (got {rate_per_s!r}).")
        rate = max(rate_per_s, self.lowest_rate_per_s)
        # A rounding error above a whole number is no instance more.
        return max(1, math.ceil(self.per_rate * rate + self.fixed - 1e-9))

    @classmethod
    def fit(
        cls,
        rates_per_s: Sequence[float],
        instances: Sequence[int],
        *,
        lowest_rate_per_s: float = 0.0,
    ) -> ScalingLaw:
        """Least squares over what was needed at rates of `lowest_rate_per_s` and above.

        Raises:
            ConfigError: There are fewer than two different rates, or a number is out of range.
        """
        rates = np.asarray(rates_per_s, dtype=np.float64)
        needed = np.asarray(instances, dtype=np.float64)
        if rates.shape != needed.shape or not (rates > 0.0).all() or not (needed >= 1.0).all():
            raise ConfigError(
                f"Rates must be > 0 and instances >= 1, one for each (got {list(rates_per_s)!r} "
                f"and {list(instances)!r})."
            )
        used = rates >= lowest_rate_per_s
        if len(np.unique(rates[used])) < 2:
            raise ConfigError(
                f"Eq. 7 needs two different rates of {lowest_rate_per_s:g}/s or more "
                f"(got {rates[used].tolist()}); measure more."
            )
        slope, fixed = np.polyfit(rates[used], needed[used], 1)
        return cls(max(0.0, float(slope)), float(fixed), lowest_rate_per_s)


def change_points(
    counts: Sequence[float] | FloatArray, *, penalty: float = 3.0, min_size: int = 5
) -> list[int]:
    """Where the rate behind counts of arrivals changed.

    Args:
        counts: Arrivals in each of n equally long intervals, >= 0.
        penalty: Gain that a change point must bring, in units of variance x log n; smaller finds
            smaller changes and more false ones.
        min_size: Fewest intervals between two changes.

    Returns:
        First interval of each new rate, ascending; empty without a change.

    Raises:
        ConfigError: `ruptures` is missing, or a count is negative or NaN.
    """
    values = np.asarray(counts, dtype=np.float64)
    if not (np.isfinite(values) & (values >= 0.0)).all():
        raise ConfigError("Counts of arrivals must be finite and >= 0; drop what was not counted.")
    if len(values) < 2 * min_size:
        return []
    try:
        ruptures = importlib.import_module("ruptures")
    except ImportError as error:
        raise ConfigError(
            "Change points need the package ruptures (got none); "
            "run `pip install 'sola-sched[cluster]'`."
        ) from error
    signal = np.sqrt(values + 0.375)[:, None]
    search = ruptures.KernelCPD(kernel="linear", min_size=min_size).fit(signal)
    found = search.predict(pen=penalty * _SQRT_VARIANCE * 2.0 * math.log(len(values)))
    return [int(point) for point in found[:-1]]


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """How fast the number of instances follows the rate.

    Attributes:
        heartbeat_s: Length of an interval of counts, > 0.
        window: Intervals looked back on.
        penalty: Of a change point.
        margin_ratio: Rate added for what the estimate of it may miss.
        slack: Instances too many that are kept.
        down_delay_s: Seconds for all of which fewer must have been enough before they go.
        min_instances, max_instances: Bounds of the answer.
    """

    heartbeat_s: float = 1.0
    window: int = 300
    penalty: float = 3.0
    margin_ratio: float = 0.05
    slack: int = 0
    down_delay_s: float = 300.0
    min_instances: int = 1
    max_instances: int = 1000

    def __post_init__(self) -> None:
        for name, is_right, rule in (
            ("heartbeat_s", 0.0 < self.heartbeat_s < math.inf, "finite and > 0"),
            ("window", self.window >= 10, ">= 10"),
            ("penalty", self.penalty > 0.0, "> 0"),
            ("margin_ratio", 0.0 <= self.margin_ratio < math.inf, "finite and >= 0"),
            ("slack", self.slack >= 0, ">= 0"),
            ("down_delay_s", 0.0 <= self.down_delay_s < math.inf, "finite and >= 0"),
            ("min_instances", self.min_instances >= 1, ">= 1"),
            ("max_instances", self.max_instances >= self.min_instances, ">= 'min_instances'"),
        ):
            if not is_right:
                raise ConfigError(
                    f"'{name}' must be {rule} (got {getattr(self, name)!r}); correct it."
                )


class InstanceScaler:
    """Counts arrivals and says how many instances there should be.

    Args:
        law: Eq. 7 of the model, the instances and the targets.
        options: How fast it follows.

    Attributes:
        target: The last answer.
        rate_per_s: Requests per second since the last change point.
    """

    def __init__(self, law: ScalingLaw, options: ScalingOptions | None = None) -> None:
        self.law = law
        self.options = options or ScalingOptions()
        self.target = self.options.min_instances
        self.rate_per_s = 0.0
        self._counts: deque[float] = deque(maxlen=self.options.window)
        self._needed: deque[tuple[float, int]] = deque()  # when, and falling numbers
        self._since_s = self._last_s = -math.inf

    def observe(self, num_arrivals: float, now_s: float, *, is_whole: bool = True) -> int:
        """Take in the arrivals of one heartbeat; return how many instances there should be.

        Args:
            num_arrivals: Requests that came since the call before, >= 0; no whole number where a
                longer count was divided.
            now_s: Seconds on a clock that never goes back.
            is_whole: Whether all were counted. If not, the true rate may be higher, so the answer
                is no less than the last one.
        """
        if not num_arrivals >= 0:
            raise ConfigError(f"'num_arrivals' must be >= 0 (got {num_arrivals!r}).")
        options = self.options
        self._counts.append(float(num_arrivals))
        counts = np.array(self._counts)
        points = change_points(counts, penalty=options.penalty)
        current = counts[points[-1] :] if points else counts
        self.rate_per_s = float(current.mean()) / options.heartbeat_s
        wanted = self.law.instances(self.rate_per_s * (1.0 + options.margin_ratio))
        wanted = min(max(wanted, options.min_instances), options.max_instances)
        if not is_whole:
            wanted = max(wanted, self.target)
        most = self._most_needed(wanted, now_s)
        if wanted > self.target:
            self.target = wanted
        elif most < self.target - options.slack and now_s - self._since_s >= options.down_delay_s:
            self.target = most
        return self.target

    def _most_needed(self, wanted: int, now_s: float) -> int:
        """The largest of the answers of the last `down_delay_s`."""
        if now_s - self._last_s > _GAP * self.options.heartbeat_s:
            self._since_s = now_s  # of what was before nothing is known
        self._last_s = now_s
        while self._needed and self._needed[-1][1] <= wanted:
            self._needed.pop()
        self._needed.append((now_s, wanted))
        while self._needed[0][0] <= now_s - self.options.down_delay_s and len(self._needed) > 1:
            self._needed.popleft()
        return self._needed[0][1]
