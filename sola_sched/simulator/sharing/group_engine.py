"""What serves a group of GPUs in virtual time, by the fast model or with real schedulers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sola_sched.cluster.sharing.queue import SharedRequest


class GroupEngine(ABC):
    """An engine of a group.

    Attributes:
        next_s: When it has to be advanced next; inf while it is idle.
        num_open: Requests that have not ended.
        busy_s: Seconds of all steps so far.
    """

    next_s: float
    num_open: int
    busy_s: float

    @abstractmethod
    def add(self, request: SharedRequest, now_s: float) -> None:
        """A request has come."""

    @abstractmethod
    def advance(self) -> list[SharedRequest]:
        """Do what is due at `next_s`; the requests that have ended."""

    @abstractmethod
    def withdraw(self, now_s: float) -> list[SharedRequest]:
        """Take every request out, to be added elsewhere."""

    def run_until(self, now_s: float) -> list[SharedRequest]:
        """Advance to `now_s`; the requests that have ended."""
        ended: list[SharedRequest] = []
        while self.next_s <= now_s:
            ended += self.advance()
        return ended
