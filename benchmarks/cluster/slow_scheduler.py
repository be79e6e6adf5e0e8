"""A scheduler whose engine takes longer for every step: the slower one of two unequal replicas."""

from __future__ import annotations

import os
import time
from typing import Any

import sola_sched

#: Seconds that each step takes more, from the environment.
_EXTRA_S = float(os.environ.get("SLOW_STEP_S", "0"))


class SlowScheduler(sola_sched.Scheduler):
    """Waits before a step's outcome is looked at, as a slower device would make it wait."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(_EXTRA_S)
        return super().update_from_output(*args, **kwargs)
