"""Plain processes that take turns, for tests of the lease without engines."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from sola_sched.colocation.lease import Lease

_FORK = multiprocessing.get_context("fork")
#: Far longer than anything here takes on a busy machine.
PATIENCE_S = 60.0


def take(lease: Lease, urgency: float = 0.0) -> None:
    """A turn for one of such an urgency."""
    lease.take(lambda: urgency)


def give(lease: Lease, urgency: float | None = None) -> bool:
    """The end of a turn; the next one is wanted with such an urgency, or none is."""
    return lease.give(None if urgency is None else lambda: urgency)


def _obey(group: str, options: dict[str, Any], line: Connection) -> None:
    lease = Lease(group, **options)
    line.send("joined")
    while (order := line.recv())[0] != "end":
        word, urgency = order
        if word == "take":
            take(lease, urgency)
            line.send(time.monotonic())
        elif word == "give":
            line.send(give(lease, urgency))
        elif word == "work":  # until it is told the next thing
            num_turns = 0
            while not line.poll(0):
                take(lease, urgency)
                time.sleep(1e-3)
                give(lease, urgency)
                num_turns += 1
            give(lease, None)
            line.send(num_turns)
        elif word == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    lease.close()


class Taker:
    """A member of a group in a process of its own."""

    def __init__(self, group: str, name: str, **options: Any) -> None:
        self._line, theirs = _FORK.Pipe()
        options = {"name": name, "share": 0.0, "limit_s": PATIENCE_S, **options}
        self.process: BaseProcess = _FORK.Process(
            target=_obey, args=(group, options, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.answer() == "joined"

    def order(self, word: str, urgency: float | None = 0.0) -> None:
        """Tell it something."""
        self._line.send((word, urgency))

    def answer(self) -> Any:
        """What it says."""
        assert self._line.poll(PATIENCE_S), "no answer"
        return self._line.recv()

    @property
    def is_waiting(self) -> bool:
        """Whether it has not answered its last order."""
        return not self._line.poll(0)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)

    def resume(self) -> None:
        """Let a stopped one go on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def takers(group: str, *names: str, **options: Any) -> Iterator[list[Taker]]:
    """Members, ended afterwards."""
    members = [Taker(group, name, **options) for name in names]
    try:
        yield members
    finally:
        for member in members:
            if member.process.is_alive():
                member.process.kill()
            member.process.join(PATIENCE_S)
