"""How long a gateway waits, and how often it tries."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from sola_sched.errors import ConfigError


@dataclass(frozen=True)
class GatewayOptions:
    """How long a gateway waits, and how often it tries.

    Attributes:
        stall_s: A replica that has requests and has computed nothing for so long has stalled.
        patience_s: How long a request waits for a replica, when none can be reached.
        avoid_s: A replica gets nothing for so long after a connection to it has failed.
        connect_s: Most that a connection may take.
        max_failures: Failed attempts after which a request is given up; one may be what kills them.
    """

    stall_s: float = 15.0
    patience_s: float = 60.0
    avoid_s: float = 1.0
    connect_s: float = 5.0
    max_failures: int = 4

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0.0 < value < math.inf or (name == "max_failures" and value < 1):
                raise ConfigError(
                    f"'{name}' must be {'>= 1' if name == 'max_failures' else 'finite and > 0'} "
                    f"(got {value!r}); correct it."
                )
