"""What a request that is refused because of overload is told, and when it may come back.

The engine core ends it with finish reason "error" and this text as stop reason, which is what
offline callers see. A server in front answers HTTP 503; see
`sola_sched.front_end.refusals`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sola_sched.config.slo import TARGETS, SloTarget
from sola_sched.core.state import RequestTable

_FORM = re.compile(r"refused by sola_sched, retry after (\d+) s: (.*)", re.DOTALL)
#: Nobody is told to come back later than this, seconds: estimates so long are mere guesses.
_LONGEST_S = 3600


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused request.

    Attributes:
        retry_after_s: When another try may succeed, whole seconds from 1 on.
        message: Why, for people.
    """

    retry_after_s: int
    message: str

    @classmethod
    def because_of(cls, target: SloTarget, wait_s: float) -> Refusal:
        """A request with these targets that would have waited so long, NaN if nobody knows."""
        is_known = math.isfinite(wait_s) and wait_s > 0.0
        wanted = [
            f"{name} {seconds:g} s"
            for field, name in TARGETS.items()
            if math.isfinite(seconds := getattr(target, field))
        ]
        message = f"the request could not have met its targets ({', '.join(wanted) or 'none'})"
        if is_known:
            message += f": it would have waited some {wait_s:.1f} s"
        retry_after_s = min(max(1, math.ceil(wait_s)), _LONGEST_S) if is_known else 1
        return cls(retry_after_s, message)

    @classmethod
    def of_row(cls, table: RequestTable, row: int) -> Refusal:
        """The refusal of a live request."""
        target = SloTarget(
            float(table.ttft_s[row]), float(table.tpot_s[row]), float(table.e2e_s[row])
        )
        return cls.because_of(target, wait_of(table, row))

    def to_stop_reason(self) -> str:
        """The form in which it leaves the engine core."""
        return f"refused by sola_sched, retry after {self.retry_after_s} s: {self.message}"

    @classmethod
    def from_stop_reason(cls, text: object) -> Refusal | None:
        """The refusal that `to_stop_reason` wrote, None if it is anything else."""
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        return match and cls(int(match[1]), match[2])


def wait_of(table: RequestTable, row: int) -> float:
    """Estimated wait of a row, seconds; of the one that waits longest if it has no estimate yet.

    NaN where nobody waits.
    """
    own_s = float(table.ewt_s[row])
    if own_s > 0.0:
        return own_s
    others = table.ewt_s[list(table.row_of.values())]
    waiting = others[others > 0.0]
    return float(waiting.max()) if len(waiting) else math.nan
