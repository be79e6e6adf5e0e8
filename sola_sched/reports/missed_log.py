"""Lines in the log that say why requests were late, so many a minute at most."""

from __future__ import annotations

import math

from sola_sched.core.fates import Fates
from sola_sched.cost.model import CostModel
from sola_sched.reports.fates import fates_of, is_late
from sola_sched.reports.reasons import why

_MINUTE_S = 60.0


class MissedLog:
    """Makes the lines.

    Args:
        most: A minute; those beyond are counted, and the next line says how many.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._num_seen = self._num_said = self._num_silent = 0
        self._began_s = -math.inf

    def change(self, most: int, fates: Fates) -> None:
        """So many a minute from now on. After 0, when nobody asks, those that have ended are past.

        Args:
            fates: Of the engine.
        """
        if not self.most:
            self._num_seen, self._num_silent = fates.num_ended, 0
        self.most = most

    def lines(self, fates: Fates, cost: CostModel, now_s: float) -> list[str]:
        """Of the requests that have ended since the last call.

        Args:
            fates, cost: Of the engine.
            now_s: On any one clock.
        """
        if fates.num_ended == self._num_seen:
            return []
        if now_s - self._began_s >= _MINUTE_S:
            self._began_s, self._num_said = now_s, 0
        ended = fates.since(self._num_seen, cost)
        self._num_seen = fates.num_ended
        lines = []
        for fate in filter(is_late, fates_of(ended)):
            if self._num_said >= self.most:
                self._num_silent += 1
                continue
            self._num_said += 1
            more = f" ({self._num_silent:,} more were late before)" if self._num_silent else ""
            self._num_silent = 0
            lines.append(f"{fate['request_id']} ({fate['slo_class']}): {why(fate)}{more}")
        return lines
