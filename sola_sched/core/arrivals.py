"""When requests arrived, on the engine's own clock.

A front end stamps a request with its wall clock, in another process and perhaps on another
machine; what the engine has itself is the time of receipt on a monotonic clock. The difference is
the wait in the front end and on the way, plus an unknown offset between the two clocks, which
moves when either is set. That a wait is never negative, and that some requests hardly wait, is
what the offset is found by.

Source: the minimum filter of clock-skew estimators (Paxson, On Calibrating Measurements of Packet
Transit Times, SIGMETRICS 1998): the least of (receipt - stamp) is the offset plus the least delay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Waits in a front end up to here (tokenization, images) are usual, seconds.
_USUAL_S = 1.0
#: A stamp may lie ahead of the receipt by so much: rounding.
_ROUNDING_S = 1e-3
#: The engine's wall clock has been set if it moves against the monotonic one by more: so much
#: and this share of the time between (clocks are slewed by at most 0.0005).
_SET_S, _SLEW = 0.1, 1e-3
#: Time over which the least wait is taken for an offset that has been learned.
_WINDOW_S = 10.0
#: An offset that nothing has agreed with for so long is forgotten.
_MEMORY_S = 600.0
#: Offsets that are remembered for each front end.
_MOST = 8


@dataclass(slots=True)
class _Offset:
    """A monotonic clock's lead over a front end's, as it was learned; refined by its waits."""

    offset_s: float
    used_s: float
    window_s: float
    least_wait_s: float = math.inf

    def lower(self, offset_s: float, now_s: float) -> None:
        self.offset_s, self.used_s, self.window_s = offset_s, now_s, now_s
        self.least_wait_s = math.inf

    def take(self, wait_s: float, now_s: float) -> None:
        """Note a wait. If all of a window were long, the clocks have moved."""
        self.used_s = now_s
        self.least_wait_s = min(self.least_wait_s, wait_s)
        if now_s - self.window_s >= _WINDOW_S:
            self.offset_s += self.least_wait_s
            self.window_s, self.least_wait_s = now_s, math.inf


class _FrontEnd:
    """What is known of one front end's clock."""

    def __init__(self) -> None:
        self.offsets: list[_Offset] = []
        self.usual_s = -math.inf  # when a wait was usual last
        self.wait_s = 0.0  # of the request before, received at `received_s`
        self.received_s = -math.inf

    def remember(self, offset_s: float, now_s: float) -> None:
        self.offsets.append(_Offset(offset_s, now_s, now_s))
        self.offsets = sorted(self.offsets, key=lambda offset: offset.used_s)[-_MOST:]


class ArrivalClock:
    """Tells when a request arrived, from the stamp of its front end.

    A wait by the engine's own wall clock is believed while it is usual: all is on one machine, or
    its clocks agree. A longer one is believed up to what has happened since the engine last
    looked, and as far as a queue in the front end can have grown since the request before. Else
    the clocks disagree: the request counts from its receipt, and those after it by the offset
    that this one had. After a step of a clock each request counts by whichever offset, old or
    new, makes its wait the shortest. Skews below a second between machines pass for waiting.

    Attributes:
        num_implausible: Stamps that no known offset could explain.
    """

    def __init__(self) -> None:
        self.num_implausible = 0
        self._front_ends: dict[int, _FrontEnd] = {}
        self._own_s = self._own_at_s = math.nan
        self._looked_s = math.inf

    def look(self, now_s: float) -> None:
        """The engine has taken all requests that were there: at each step, and while idle."""
        self._looked_s = now_s

    def wait_s(self, stamp_s: float, *, now_s: float, wall_s: float, front_end: int = 0) -> float:
        """How long a request that is received now has waited, seconds, >= 0.

        Args:
            stamp_s: Its arrival by the front end's wall clock.
            now_s: Now on a monotonic clock.
            wall_s: Now on the engine's wall clock.
            front_end: Number of the front end.
        """
        known = self._front_ends.get(front_end)
        if known is None:
            known = self._front_ends[front_end] = _FrontEnd()
        self._notice_step(wall_s - now_s, now_s)
        if not math.isfinite(stamp_s):
            self.num_implausible += 1
            return 0.0
        wait_s = self._plausible_wait_s(known, wall_s - stamp_s, now_s - stamp_s, now_s)
        known.wait_s, known.received_s = wait_s, now_s
        return wait_s

    def _notice_step(self, own_s: float, now_s: float) -> None:
        """Keep the offset from before a step of the engine's wall clock."""
        if abs(own_s - self._own_s) > _SET_S + _SLEW * (now_s - self._own_at_s):
            for known in self._front_ends.values():
                known.remember(-self._own_s, now_s)
        self._own_s, self._own_at_s = own_s, now_s

    def _plausible_wait_s(
        self, known: _FrontEnd, own_wait_s: float, lead_s: float, now_s: float
    ) -> float:
        known.offsets = [o for o in known.offsets if now_s - o.used_s <= _MEMORY_S]
        wait_s, by = (own_wait_s, None) if own_wait_s >= -_ROUNDING_S else (math.inf, None)
        above: _Offset | None = None
        for offset in known.offsets:
            other_s = lead_s - offset.offset_s
            if 0.0 <= other_s < wait_s:
                wait_s, by = other_s, offset
            elif -_USUAL_S < other_s < 0.0:
                above = offset
        if wait_s > _USUAL_S and above is not None:  # a quicker one than those so far
            above.lower(lead_s, now_s)
            return 0.0
        if wait_s <= _USUAL_S:
            known.usual_s = now_s
        elif wait_s > self._longest_s(known, now_s):
            self.num_implausible += 1
            known.remember(lead_s, now_s)
            return 0.0
        if by is not None:
            by.take(wait_s, now_s)
        return max(0.0, wait_s)

    def _longest_s(self, known: _FrontEnd, now_s: float) -> float:
        """The longest wait that what has happened can explain."""
        unseen_s = max(0.0, now_s - self._looked_s)
        if now_s - known.usual_s > _MEMORY_S:  # clocks that drift apart, not a queue
            return _USUAL_S
        grown_s = known.wait_s + min(_USUAL_S, now_s - known.received_s)
        return max(_USUAL_S, grown_s) + unseen_s
