"""How often a slot comes free."""

from __future__ import annotations

import math


class SlotTurnover:
    """Averages the time between two ends of slots, as it is while all slots are held.

    From the time for which a slot is held: an idle or half empty engine has fewer ends, but not for
    want of turnover (Little's law).

    Args:
        averaging: Weight of the newest end.

    Attributes:
        interval_s: Seconds; NaN until the second end.
    """

    def __init__(self, averaging: float) -> None:
        self.interval_s = math.nan
        self._averaging = averaging
        self._slot_s = math.nan  # time of all slots held, since the latest of them that ended
        self._num_freed = 0  # ends that are not averaged yet

    def hold(self, num_slots: int, seconds: float) -> None:
        """So many slots were held for so long."""
        self._slot_s += seconds * num_slots

    def free(self) -> None:
        """One that held a slot has ended."""
        self._num_freed += 1

    def average(self, num_slots: int) -> float:
        """Take in the ends since the last call, of an engine with `num_slots`; the interval."""
        num_freed, self._num_freed = self._num_freed, 0
        if num_freed:
            interval_s = self._slot_s / num_freed / num_slots
            self._slot_s = 0.0
            if not math.isnan(interval_s):  # else it is the first: nobody knows since when
                if math.isnan(self.interval_s):
                    self.interval_s = interval_s
                weight = 1.0 - (1.0 - self._averaging) ** num_freed
                self.interval_s += weight * (interval_s - self.interval_s)
        return self.interval_s
