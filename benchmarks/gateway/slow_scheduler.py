"""A scheduler whose engine takes longer for every step, as a slower device would."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sola_sched.vllm_adapter.scheduler import Scheduler


class SlowScheduler(Scheduler):
    """Waits before a step's outcome is looked at.

    Of the engines that share the folder `SLOW_STEPS_TAKEN`, the first to start waits the first of
    the seconds in `SLOW_STEPS`, the second the second; all further ones the last.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._extra_s = _take(
            os.environ["SLOW_STEPS"].split(), Path(os.environ["SLOW_STEPS_TAKEN"])
        )

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self._extra_s)
        return super().update_from_output(*args, **kwargs)


def _take(steps_s: list[str], taken: Path) -> float:
    for place, step_s in enumerate(steps_s):
        try:
            (taken / str(place)).mkdir()
        except FileExistsError:
            continue
        return float(step_s)
    return float(steps_s[-1])
