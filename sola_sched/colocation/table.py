"""What the engines of a group know of each other: a few numbers a member, in shared memory.

The file is mapped by every member. Who changes it holds the kernel's lock (`flock`) on it, which
the kernel takes back from a process that ends; the fields are valid after any part of a change.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
        path: Made, if it is not there.

    Raises:
        ConfigError: The file is something else.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self.locked():
            if os.fstat(self._fd).st_size < _SIZE:
                os.ftruncate(self._fd, _SIZE)
            self._map = mmap.mmap(self._fd, _SIZE)
            magic, version = _HEAD.unpack_from(self._map)
            if magic == version == 0:
                self.holder = NOBODY, 0.0
                _HEAD.pack_into(self._map, 0, _MAGIC, _VERSION)
            elif (magic, version) != (_MAGIC, _VERSION):
                raise ConfigError(
                    f"{path} must be a table of turns of version {_VERSION} (it is not); name "
                    "another 'turns.group', or delete the folder while no engine uses it."
                )

    def close(self) -> None:
        """Give the file back."""
        self._map.close()
        os.close(self._fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others from changing the table; for microseconds."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

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
