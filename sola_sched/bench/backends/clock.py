"""The clock a workload is replayed by."""

from __future__ import annotations

import time
from typing import Protocol

CLOCKS = ("wall", "cpu")
#: Longest real wait between two looks at the arrivals.
_NAP_S = 0.05


class Clock(Protocol):
    """Seconds since some moment, and a way to wait."""

    name: str

    def now_s(self) -> float: ...

    def wait_until(self, due_s: float) -> None:
        """Return at ``due_s`` or somewhat earlier."""
        ...


class WallClock:
    """Real time."""

    name = "wall"

    def now_s(self) -> float:
        return time.monotonic()

    def wait_until(self, due_s: float) -> None:
        time.sleep(min(_NAP_S, max(0.0, due_s - self.now_s())))


class CpuClock:
    """CPU time of the calling thread, with waits skipped.

    What a wall clock would show if the thread had a core to itself: other work on the machine
    does not count, and idle time between arrivals costs nothing. Only right for an engine that
    computes in this thread, i.e. on CPUs. Starts at the monotonic clock's reading.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._offset_s = time.monotonic() - time.thread_time()

    def now_s(self) -> float:
        return self._offset_s + time.thread_time()

    def wait_until(self, due_s: float) -> None:
        self._offset_s += max(0.0, due_s - self.now_s())


def make_clock(name: str) -> Clock:
    """Return the clock of that name in ``CLOCKS``."""
    return CpuClock() if name == "cpu" else WallClock()
