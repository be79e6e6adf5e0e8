"""Instances that come and go with the load while a cluster runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sola_sched.cluster.view import Views
from sola_sched.errors import ConfigError
from sola_sched.simulator.cluster.engine import ClusterEngine


@dataclass(frozen=True)
class Scaling:
    """Asks once in a while how many instances there should be.

    Missing ones are started; of those too many the youngest get nothing new and end when they are
    empty.

    Attributes:
        decide: Arrivals since it was asked last, the views of those that are offered, and the time
            to the number of instances, >= 1.
        make: A new instance.
        period_s: Between two questions, > 0.
        startup_s: From the decision until an instance takes requests, >= 0; it is paid for.
    """

    decide: Callable[[int, Views, float], int]
    make: Callable[[], ClusterEngine]
    period_s: float = 10.0
    startup_s: float = 60.0

    def __post_init__(self) -> None:
        if not (0.0 < self.period_s < math.inf and 0.0 <= self.startup_s < math.inf):
            raise ConfigError(
                "'period_s' must be > 0 and 'startup_s' >= 0, both finite (got "
                f"{self.period_s!r} and {self.startup_s!r})."
            )


class Utilization:
    """A plain autoscaler: as many instances as bring their mean use to a target.

    Use is the larger share of slots and of KV memory. As with Kubernetes' autoscaler the number is
    that of now times use / target, it stays within a tolerance, and goes down only to the largest
    of the answers of a while.

    Args:
        target: Use wanted, in (0, 1).
        down_delay_s: How long fewer must be enough.
        tolerance: Of use / target around 1.
        slots: Requests that count as full use; less than an engine's, where time is short first.
    """

    def __init__(
        self,
        target: float,
        *,
        down_delay_s: float = 300.0,
        tolerance: float = 0.1,
        slots: float = 256.0,
    ) -> None:
        if not 0.0 < target < 1.0:
            raise ConfigError(f"'target' must be in (0, 1) (got {target!r}).")
        self._target, self._delay_s, self._tolerance = target, down_delay_s, tolerance
        self._slots = slots
        self._answers: list[tuple[float, int]] = []

    def __call__(self, num_arrivals: int, views: Views, now_s: float) -> int:
        """See `Scaling.decide`."""
        uses = [
            max(view.num_requests / self._slots, view.kv_used_tokens / view.kv_capacity_tokens)
            for view in views
        ]
        ratio = sum(uses) / max(1, len(uses)) / self._target
        wanted = len(views)
        if abs(ratio - 1.0) > self._tolerance:
            wanted = max(1, math.ceil(len(views) * ratio))
        self._answers = [a for a in self._answers if now_s - a[0] < self._delay_s]
        self._answers.append((now_s, wanted))
        return max(answer for _, answer in self._answers)
