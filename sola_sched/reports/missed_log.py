"""Lines in the log that say why requests were late, so many a minute at most."""

from __future__ import annotations

import math

from sola_sched.core.fates import Fates
from sola_sched.cost.model import CostModel
from sola_sched.reports.fates import fate_of
from sola_sched.reports.reasons import story, verdict

_MINUTE_S = 60.0
_LATE = ("missed", "rejected", "failed")


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
        for name, slo_class, record in zip(
            ended.req_ids, ended.slo_classes, ended.records, strict=True
        ):
            fate = fate_of(name, slo_class, record)
            if fate["end"] not in _LATE:
                continue
            if self._num_said >= self.most:
                self._num_silent += 1
                continue
            self._num_said += 1
            more = f" ({self._num_silent:,} more were late before)" if self._num_silent else ""
            self._num_silent = 0
            lines.append(f"{name} ({slo_class}): {' '.join([verdict(fate), *story(fate)])}{more}")
        return lines
