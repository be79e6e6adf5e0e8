"""What the engines of a group know of each other: a few numbers a member, in shared memory.

The file is mapped by every member. Who changes it holds the kernel's lock (`flock`) on it, which
the kernel takes back from a process that ends; the fields are valid after any part of a change.
A process that is stopped keeps the lock, so nobody waits for it without an end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sola_sched.colocation.folder import Folder
from sola_sched.errors import ConfigError

#: Members that a group may have.
NUM_SLOTS = 16
NOBODY = -1
#: Values of `Member.state`.
FREE, IDLE, WAITING = 0, 1, 2

_MAGIC = 0x534F4C415455524E
_VERSION = 1
_HEAD = struct.Struct("<QQ")  # magic, version
_HOLDER = struct.Struct("<qd")  # slot, since when
_HOLDER_AT = _HEAD.size
_STATES_AT = _HOLDER_AT + _HOLDER.size  # a byte for each slot
_MEMBERS_AT = _STATES_AT + NUM_SLOTS
_MEMBER = struct.Struct("<qddddq48s16s")
_SIZE = _MEMBERS_AT + NUM_SLOTS * _MEMBER.size
_NAME = "table"
#: The lock is held for microseconds: looks before sleeping between two, and how long then.
_LOOKS, _PAUSE_S = 200, 1e-4


@dataclass(slots=True)
class Member:
    """One slot of the table.

    Attributes:
        generation: Counts the members that have had this slot.
        state: FREE, IDLE (no wish) or WAITING (for a turn).
        urgency, since_s, owed_s: As in `arbiter.Claim`.
        share: Guaranteed share of the GPU's time, in [0, 1).
        pid: Process, as it numbers itself; for messages.
        name: For messages.
        rule: What its urgency means; one for the whole group.
    """

    generation: int = 0
    state: int = FREE
    urgency: float = 0.0
    since_s: float = 0.0
    owed_s: float = 0.0
    share: float = 0.0
    pid: int = 0
    name: bytes = b""
    rule: bytes = b""


class Table:
    """The mapped file.

    Args:
        folder: Where the file is; it is made, if it is not there.
        patience_s: How long to wait for the lock of a process that has stopped.

    Raises:
        ConfigError: The file is something else.
        OSError: It cannot be used, or not be locked within `patience_s`.
    """

    def __init__(self, folder: Folder, patience_s: float) -> None:
        self._fd = folder.file(_NAME)
        try:
            with self.locked(patience_s):
                self._begin(folder)
            self._map = mmap.mmap(self._fd, _SIZE)
        except (ConfigError, OSError):
            os.close(self._fd)
            raise

    def _begin(self, folder: Folder) -> None:
        """Write the table of a new group; of any other file not a byte is changed."""
        size, head = os.fstat(self._fd).st_size, os.pread(self._fd, _HEAD.size, 0)
        if size == 0:
            new = _HEAD.pack(_MAGIC, _VERSION) + _HOLDER.pack(NOBODY, 0.0)
            # One short write, so that a process that ends meanwhile leaves all or nothing.
            if os.pwrite(self._fd, new.ljust(_SIZE, b"\0"), 0) < _SIZE:
                os.ftruncate(self._fd, 0)
                raise OSError(f"there is no room for {_SIZE} bytes in {folder}")
        elif size != _SIZE or head != _HEAD.pack(_MAGIC, _VERSION):
            raise ConfigError(
                f"{folder.path / _NAME} must be a table of turns of version {_VERSION} (it is "
                "not); name another 'turns.group', or delete the folder while no engine uses it."
            )

    def close(self) -> None:
        """Give the file back."""
        self._map.close()
        os.close(self._fd)

    @contextmanager
    def locked(self, patience_s: float) -> Iterator[None]:
        """Keep all others from changing the table; for microseconds.

        Raises:
            TimeoutError: Another process has had the lock for `patience_s`.
        """
        self._lock(patience_s)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self, patience_s: float) -> None:
        until_s, num_looks = time.monotonic() + patience_s, 0
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise TimeoutError(
                        f"another process has kept the table locked for {patience_s:g} s; end it"
                    ) from None
            num_looks += 1
            if num_looks < _LOOKS:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)

    @property
    def holder(self) -> tuple[int, float]:
        """The slot that has the turn, or NOBODY, and since when, seconds of the monotonic clock."""
        slot, since_s = _HOLDER.unpack_from(self._map, _HOLDER_AT)
        return slot, since_s

    @holder.setter
    def holder(self, value: tuple[int, float]) -> None:
        _HOLDER.pack_into(self._map, _HOLDER_AT, *value)

    def members(self) -> dict[int, Member]:
        """All slots that are not free, by number."""
        states = self._map[_STATES_AT:_MEMBERS_AT]
        return {slot: self.slot(slot) for slot, state in enumerate(states) if state != FREE}

    def slot(self, slot: int) -> Member:
        """One slot, free or not."""
        generation, urgency, since_s, owed_s, share, pid, name, rule = _MEMBER.unpack_from(
            self._map, _at(slot)
        )
        state = self._map[_STATES_AT + slot]
        name, rule = name.rstrip(b"\0"), rule.rstrip(b"\0")
        return Member(generation, state, urgency, since_s, owed_s, share, pid, name, rule)

    def write(self, slot: int, member: Member) -> None:
        """Replace one slot."""
        _MEMBER.pack_into(
            self._map, _at(slot), member.generation, member.urgency, member.since_s,
            member.owed_s, member.share, member.pid, member.name, member.rule,
        )  # fmt: skip
        self._map[_STATES_AT + slot] = member.state

    def anyone_waits(self, but: int) -> bool:
        """Whether another than the slot `but` waits. Cheap; without the lock a moment old."""
        states = self._map[_STATES_AT:_MEMBERS_AT]
        return states.count(WAITING) > (states[but] == WAITING)


def _at(slot: int) -> int:
    return _MEMBERS_AT + slot * _MEMBER.size
