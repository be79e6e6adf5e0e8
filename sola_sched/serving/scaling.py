"""How many replicas Ray Serve runs: Aladdin's Eq. 7 as a policy of Serve's autoscaler.

Source: Aladdin, section 5.2, Eq. 7; `cluster/scaling.py` has the law, the change points and the
hysteresis. Departure: the paper counts arrivals where it places them. Here each replica counts its
own (`arrivals.py`), and Serve brings the counts to its controller, seconds later and those of each
replica at another time. So a heartbeat is counted once all replicas have told of it, and between
two counts of a replica its requests are taken to have come evenly.

Serve makes one policy for each deployment and asks it at every turn of its control loop, ten times
a second. The policy must not wait, and must not raise: that would end the turn of all applications.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sola_sched.cluster.scaling import (
    FloatArray,
    InstanceScaler,
    ScalingLaw,
    ScalingOptions,
    change_points,
)
from sola_sched.errors import ConfigError, ReportError
from sola_sched.serving.arrivals import ARRIVED

logger = logging.getLogger(__name__)

#: Serve's `min_replicas` and `max_replicas` say that.
_BOUNDS = {"min_instances", "max_instances"}


class ScalingPolicy:
    """For `AutoscalingPolicy(policy_function="sola_sched.serving.scaling:ScalingPolicy")`.

    Args:
        rates_per_s: Requests per second that were measured to be served in time [n], n >= 2 of
            them different.
        replicas: By so many replicas [n], >= 1; Eq. 7 is the line through these points.
        lowest_rate_per_s: R: the value of Eq. 7 there holds for lower rates.
        options: Fields of `ScalingOptions`, except its bounds.

    Attributes:
        num_ignored: Reports of replicas that could not be true.

    Raises:
        ConfigError: An argument is wrong, or `ruptures` is missing.
    """

    def __init__(
        self,
        rates_per_s: Sequence[float],
        replicas: Sequence[int],
        lowest_rate_per_s: float = 0.0,
        **options: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(ScalingOptions)} - _BOUNDS
        if unknown := options.keys() - known:
            raise ConfigError(
                "'policy_kwargs' must be rates_per_s, replicas, lowest_rate_per_s, "
                f"{', '.join(sorted(known))} (got {', '.join(sorted(unknown))}); bounds are "
                "Serve's 'min_replicas' and 'max_replicas'."
            )
        law = ScalingLaw.fit(rates_per_s, replicas, lowest_rate_per_s=lowest_rate_per_s)
        self.options = ScalingOptions(max_instances=sys.maxsize, **options)
        self.num_ignored = 0
        self._scaler = InstanceScaler(law, self.options)
        change_points(np.zeros(self.options.window))  # loads `ruptures` now, or says that it lacks
        self._until_s = -math.inf
        self._read: dict[Any, tuple[Any, _Counts | None]] = {}

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be; Serve keeps it within its bounds.

        Args:
            ctx: Serve's `AutoscalingContext`.

        Returns:
            The number, that of now until something has been counted; and no state of Serve's.
        """
        if self._until_s == -math.inf:  # what runs is reason enough until more is known
            self._scaler.target = ctx.target_num_replicas
        reports = (ctx.raw_metrics or {}).get(ARRIVED) or {}
        window_s = ctx.config.look_back_period_s
        heard = self._heard(reports, ctx.current_time, window_s)
        running = getattr(ctx, "running_replicas", None) or reports
        self._count(heard, is_whole=len(heard) >= len(running))
        return self._scaler.target, {}

    def _heard(self, reports: Mapping[Any, Any], now_s: float, window_s: float) -> list[_Counts]:
        """What the replicas have told, without what cannot be true and who has fallen silent."""
        read = {}
        for replica, points in reports.items():
            before = self._read.get(replica)
            if before is not None and before[0] is points:  # Serve has not got another since
                read[replica] = before
                continue
            try:
                read[replica] = points, _Counts(points, now_s, window_s)
            except ReportError as error:
                read[replica] = points, None
                self.num_ignored += 1
                logger.warning(
                    "a report of replica %s is ignored, the %d. so far: %s",
                    replica, self.num_ignored, error,
                )  # fmt: skip
        self._read = read
        return [
            counts
            for _, counts in read.values()
            if counts is not None and now_s - counts.last_s <= window_s
        ]

    def _count(self, heard: Sequence[_Counts], *, is_whole: bool) -> None:
        """Count the heartbeats of which all replicas have told since the last call.

        Args:
            is_whole: Whether all that run are among them; one that is not, for instance as its
                node's clock is wrong, has requests too.
        """
        if not heard:
            return
        # What came before a replica's first count is not known: a gap, and not a lull.
        self._until_s = max(self._until_s, *(counts.first_s for counts in heard))
        told_s = min(counts.last_s for counts in heard)
        while (end_s := self._until_s + self.options.heartbeat_s) <= told_s:
            arrivals = sum(counts.between(self._until_s, end_s) for counts in heard)
            self._scaler.observe(arrivals, end_s, is_whole=is_whole)
            self._until_s = end_s


class _Counts:
    """Requests that came to one replica, as it has counted them.

    Args:
        points: Serve's time series: `timestamp` in seconds since the epoch, on the replica's clock,
            and `value`, requests since its start.
        now_s: On the controller's clock.
        window_s: Serve's `look_back_period_s`.

    Attributes:
        first_s, last_s: When it has counted first and last.

    Raises:
        ReportError: The counts cannot be true.
    """

    def __init__(self, points: Any, now_s: float, window_s: float) -> None:
        try:
            self._times: FloatArray = np.array([p.timestamp for p in points], dtype=np.float64)
            self._totals: FloatArray = np.array([p.value for p in points], dtype=np.float64)
        except (TypeError, ValueError, AttributeError) as error:
            raise ReportError(f"'{ARRIVED}' must be numbers (got {points!r:.200}).") from error
        is_count = (
            len(points) > 0
            and np.isfinite(self._times).all()
            and np.isfinite(self._totals).all()
            and self._totals[0] >= 0.0
            and (np.diff(self._times) >= 0.0).all()
            and (np.diff(self._totals) >= 0.0).all()
        )
        if not is_count:
            raise ReportError(
                f"'{ARRIVED}' must be counts >= 0 that never fall (got {points!r:.200})."
            )
        self.first_s, self.last_s = float(self._times[0]), float(self._times[-1])
        if abs(now_s - self.last_s) > window_s:
            raise ReportError(
                f"the last of '{ARRIVED}' must be within 'look_back_period_s', {window_s:g} s, of "
                f"now (got {now_s - self.last_s:.1f} s ago); compare the nodes' clocks."
            )

    def between(self, start_s: float, end_s: float) -> float:
        """Requests between two moments; none before the first count and after the last."""
        before, after = np.interp((start_s, end_s), self._times, self._totals)
        return max(0.0, float(after - before))  # a rounding error is no fall
