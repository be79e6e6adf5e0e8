"""A monitor with a clock that stands still unless told."""

from __future__ import annotations

import numpy as np
from states import SLO, FixedLengths, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.monitor import StateMonitor

_NONE = np.empty(0, dtype=np.int64)


class StillEngine:
    """Adds requests now, and gives them their first tokens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.monitor = StateMonitor(make_cost(), FixedLengths(), lambda: self.now)

    def add(self, name: str, slo: SloTarget = SLO, *, max_tokens: int = 9, **options: str) -> int:
        return self.monitor.add(
            name,
            num_prompt_tokens=10,
            max_tokens=max_tokens,
            slo=slo,
            arrival_s=self.now,
            **options,  # type: ignore[arg-type]
        )

    def first_token(self, row: int) -> None:
        self.monitor.admitted(row, num_computed=0, prefill_target=10)
        self.monitor.scheduled(_NONE, np.array([row]), np.array([10]))
        self.monitor.completed()
