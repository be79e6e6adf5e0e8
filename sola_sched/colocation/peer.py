"""Another member of a group of turns, as one member sees it."""

from __future__ import annotations

import fcntl
import os

from sola_sched.colocation.folder import Folder


class Peer:
    """Another member's FIFOs. They are of use even when their folder is gone.

    Args:
        folder: Of the group.
        slot: The member's.
        generation: Of the slot.

    Attributes:
        alive: Has a hang-up when the member is gone.
        wake: A byte into it wakes the member.

    Raises:
        OSError: They are not there.
    """

    def __init__(self, folder: Folder, slot: int, generation: int) -> None:
        self.generation = generation
        self.alive = folder.there(f"{slot}.alive", os.O_RDONLY)
        try:
            self.wake = folder.there(f"{slot}.wake", os.O_RDWR)
        except OSError:
            os.close(self.alive)
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the member lives: it has locked its FIFO."""
        try:
            fcntl.flock(self.alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.alive, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Give them back."""
        os.close(self.alive)
        os.close(self.wake)
