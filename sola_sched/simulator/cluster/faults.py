"""What happens to instances while a cluster runs; times are seconds on the virtual clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sola_sched.simulator.cluster.engine import ClusterEngine


@dataclass(frozen=True)
class Death:
    """The instance is gone, with its KV and the requests on it."""

    at_s: float
    instance: int


@dataclass(frozen=True)
class Stall:
    """The instance does nothing for a while and sends no reports; its connections stay open."""

    at_s: float
    instance: int
    for_s: float


@dataclass(frozen=True)
class Slowdown:
    """From here on each step takes `factor` times what the instance's profile says."""

    at_s: float
    instance: int
    factor: float


@dataclass(frozen=True)
class Join:
    """An instance is ready; its position follows the last one's."""

    at_s: float
    engine: ClusterEngine


Fault = Death | Stall | Slowdown | Join


@dataclass(frozen=True)
class Links:
    """Delays between the gateway and the instances.

    The defaults were measured with Ray Serve 2.60: an update each 0.32 s that is 107 ms old on
    arrival (190 ms at the 99th percentile), so 0.27 s at a decision (0.52 s); 1 to 2 ms to ask the
    router, 12 to 21 ms at the 99th percentile; a broken connection shows within milliseconds, while
    the router goes on offering a dead replica for 0.64 s. Delays are lognormal.

    Attributes:
        report_period_s: Between two reports of an instance.
        report_delay_s, report_delay_p99_s: From an engine's report to the router.
        send_delay_s, send_delay_p99_s: From the gateway to an engine's queue.
        failure_s: Until a broken connection shows at the gateway.
        notice_s: Until the router knows of a death.
        silent_s: An instance that has not reported for so long is not offered.
        stall_s: The gateway takes streams without a token for so long elsewhere.
        hold_s: A request that no instance can take waits at the gateway for so long, then fails.
    """

    report_period_s: float = 0.32
    report_delay_s: float = 0.107
    report_delay_p99_s: float = 0.190
    send_delay_s: float = 0.0015
    send_delay_p99_s: float = 0.016
    failure_s: float = 0.005
    notice_s: float = 0.64
    silent_s: float = 2.0
    stall_s: float = 5.0
    hold_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            lowest_is_0 = name != "report_period_s"
            if not (0.0 <= value < math.inf and (lowest_is_0 or value > 0.0)):
                rule = ">= 0" if lowest_is_0 else "> 0"
                raise ValueError(f"'{name}' must be finite and {rule} (got {value!r}).")


#: A router that knows everything at once.
INSTANT = Links(
    report_period_s=0.05, report_delay_s=0.0, report_delay_p99_s=0.0, send_delay_s=0.0,
    send_delay_p99_s=0.0, failure_s=0.0, notice_s=0.0,
)  # fmt: skip
