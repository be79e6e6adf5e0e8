"""The turn: the lease on the GPU that engines of one group pass to each other, step by step.

A group is a folder of one user on one machine. Each member has two FIFOs there. It holds `N.alive`
open for writing as long as it lives: the kernel closes it with the process, however that ends, and
all who wait see it at once. Who passes the turn on writes a byte into `N.wake` of the next one.
Waiting is one `poll` on these: nothing runs meanwhile, and nobody is asked. Who has the turn, and
who wants it how much, stands in the `Table`.

Keeping a turn while nobody waits takes microseconds and no system call. Passing it on takes a fifth
of a millisecond, most of it until the other process runs (`python benchmarks/run.py
colocation-turns`). The kernel closes files after it has freed a process' memory, so what a killed
holder costs grows with the size of its engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sola_sched.colocation import arbiter
from sola_sched.colocation.arbiter import Claim
from sola_sched.colocation.folder import Folder
from sola_sched.colocation.peer import Peer
from sola_sched.colocation.table import IDLE, NOBODY, NUM_SLOTS, WAITING, Member, Table
from sola_sched.errors import ConfigError

logger = logging.getLogger("sola_sched.colocation")

_WAKE = b"\1"
#: For the table's lock, at the start.
_START_S = 10.0


@dataclass(slots=True)
class LeaseStats:
    """Counters since the start.

    Attributes:
        num_turns: Turns that were taken.
        num_waits, waited_s: Turns that had to be waited for, and for how long in sum.
        num_taken_over: Turns taken from a member that died or kept them beyond the limit.
        num_lost: Turns that others have taken from this one for that.
        num_unlocked: Changes that were made without the lock, since a stopped process has it.
    """

    num_turns: int = 0
    num_waits: int = 0
    waited_s: float = 0.0
    num_taken_over: int = 0
    num_lost: int = 0
    num_unlocked: int = 0


class Lease:
    """One member's side. Of one thread; a forked child has no part in it.

    Args:
        group: A path, or a plain name for a folder in shared memory.
        name: Of this member, for messages.
        share: Guaranteed share of the GPU's time, in [0, 1).
        limit_s: The longest turn. Who waits longer for one and the same goes on without it ending.
        rule: What urgencies mean; the same for all members.
        clock: Monotonic seconds, one clock for all members.

    Raises:
        ConfigError: The folder cannot be used, is full, or the shares would exceed 1.
    """

    def __init__(
        self,
        group: str,
        *,
        name: str,
        share: float,
        limit_s: float,
        rule: str = "deadline",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = LeaseStats()
        self.limit_s = limit_s
        self._clock = clock
        self._peers: dict[int, Peer] = {}  # by slot
        self._is_stuck = False
        self._poll = select.poll()
        self._is_closed = False
        try:
            self._folder = Folder(folder_of(group))
            try:
                self._table = Table(self._folder, _START_S)
                with self._table.locked(_START_S):
                    self._join(name, share, rule)
            except BaseException:
                self._folder.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"'turns.group' must be a name, or a folder of this user in which FIFOs can be "
                f"made (got {group!r}: {error}); name another."
            ) from error
        os.register_at_fork(after_in_child=self._forget)

    def _join(self, name: str, share: float, rule: str) -> None:
        """Take a free slot. With the table locked."""
        slot, alive = self._free_slot()
        try:
            _fit(share, rule, self._table.members(), self._folder)
        except ConfigError:
            os.close(alive)
            raise
        self._slot, self._alive = slot, alive
        self._wake = self._folder.fifo(f"{slot}.wake", os.O_RDWR)
        self._drain()
        self._poll.register(self._wake, select.POLLIN)
        member = Member(
            generation=self._table.slot(slot).generation + 1, state=IDLE, share=share,
            pid=os.getpid(), name=name.encode()[:48], rule=rule.encode()[:16],
        )  # fmt: skip
        self._table.write(slot, member)
        if self.has_turn:  # of a dead predecessor
            self._table.holder = NOBODY, self._clock()

    def _free_slot(self) -> tuple[int, int]:
        """The first slot whose member is dead or gone, and its FIFO; others like it are freed."""
        found: list[tuple[int, int]] = []
        for slot in range(NUM_SLOTS):
            alive = self._folder.fifo(f"{slot}.alive", os.O_RDWR)
            try:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(alive)
                continue
            self._free(slot)
            found.append((slot, alive))
        if not found:
            raise ConfigError(
                f"A group of turns must have at most {NUM_SLOTS} members ({self._folder} is full); "
                "name another 'turns.group'."
            )
        for _, alive in found[1:]:
            os.close(alive)
        return found[0]

    @property
    def has_turn(self) -> bool:
        """Whether this member has the turn."""
        return self._table.holder[0] == self._slot

    @property
    def is_wanted(self) -> bool:
        """Whether another waits for a turn; a moment old."""
        return self._table.anyone_waits(but=self._slot)

    def take(self, urgency: Callable[[], float]) -> None:
        """Return when this member has the turn; at once if it has kept it.

        Args:
            urgency: Asked for once, if the turn is not free.
        """
        started_s = self._clock()
        self.stats.num_turns += 1
        holder, _ = self._table.holder
        if holder == self._slot:
            self._table.holder = self._slot, started_s
            return
        urgent = urgency() if holder != NOBODY or self.is_wanted else 0.0
        with self._locked():
            members = self._living()
            self._claim(members[self._slot], urgent, started_s)
            if self._choose(members):
                return
        self.stats.num_waits += 1
        while not self._waited():
            pass
        self.stats.waited_s += self._clock() - started_s

    def _waited(self) -> bool:
        """Wait until something has happened; whether this member then has the turn."""
        left_s = self._table.holder[1] + self.limit_s - self._clock()
        self._poll.poll(1e3 * max(0.0, left_s) + 1.0)
        with self._locked():
            self._drain()
            return self._choose(self._living())

    def give(self, urgency: Callable[[], float] | None) -> bool:
        """End a turn; whether it is kept, since nobody who waits goes first.

        Who wants another turn keeps its claim meanwhile: it may be given the turn before it asks.

        Args:
            urgency: Of this member's next turn, asked for if somebody waits; None: it wants none.
        """
        now_s = self._clock()
        if urgency is not None and self.has_turn and not self.is_wanted:
            self._table.holder = self._slot, now_s
            return True
        urgent = None if urgency is None else urgency()
        with self._locked():
            members = self._living()
            me = members[self._slot]
            if urgent is None:
                me.state, me.owed_s = IDLE, 0.0
                self._table.write(self._slot, me)
            else:
                self._claim(me, urgent, now_s)
            if not self.has_turn:
                self.stats.num_lost += urgent is not None
                return False
            self._settle(members, now_s)
            self._table.holder = NOBODY, now_s
            return self._choose(members)

    def withdraw(self) -> None:
        """Want nothing any more; costs next to nothing where nothing was wanted."""
        if self._table.slot(self._slot).state == WAITING or self.has_turn:
            self.give(None)

    def close(self) -> None:
        """Leave the group."""
        if self._is_closed:
            return
        self.give(None)
        with self._locked():
            self._free(self._slot)
        self._forget()

    def abandon(self) -> None:
        """Leave the group without a word, when a call has failed: the others see it as an end."""
        with contextlib.suppress(Exception):  # a slot that stays is taken over after `limit_s`
            self._forget()

    def _forget(self) -> None:
        """Close what a forked child must not keep open: its parent's death would go unseen."""
        if self._is_closed:
            return
        self._is_closed = True
        for fd in (self._alive, self._wake):
            os.close(fd)
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._table.close()
        self._folder.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """With the table locked; without it, if who has the lock has stopped for `limit_s`."""
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(self._table.locked(0.0 if self._is_stuck else self.limit_s))
                self._is_stuck = False
            except TimeoutError as error:
                self.stats.num_unlocked += 1
                if not self._is_stuck:
                    logger.warning("turns go on without the lock of %s: %s", self._folder, error)
                self._is_stuck = True
            yield

    # With the table locked ----------------------------------------------------------------

    def _claim(self, me: Member, urgency: float, since_s: float) -> None:
        me.state, me.urgency, me.since_s = WAITING, urgency, since_s
        self._table.write(self._slot, me)

    def _settle(self, members: dict[int, Member], now_s: float) -> None:
        """Count this member's turn, which ends."""
        counted = {s: m for s, m in members.items() if m.state == WAITING or s == self._slot}
        after = arbiter.settle(
            self._slot,
            max(0.0, now_s - self._table.holder[1]),
            {slot: member.owed_s for slot, member in counted.items()},
            {slot: member.share for slot, member in counted.items()},
        )
        for slot, member in counted.items():
            member.owed_s = after[slot] if member.state == WAITING else 0.0
            self._table.write(slot, member)

    def _choose(self, members: dict[int, Member]) -> bool:
        """Give a turn that nobody has to the first who wants it; whether this member has it."""
        holder, since_s = self._table.holder
        if holder == self._slot:
            return True
        now_s = self._clock()
        if holder != NOBODY:
            if holder in members and now_s - since_s < self.limit_s:
                return False
            self.stats.num_taken_over += 1
        claim = arbiter.first(
            [
                Claim(slot, member.urgency, member.since_s, member.owed_s)
                for slot, member in members.items()
                if member.state == WAITING
            ]
        )
        self._table.holder = NOBODY if claim is None else claim.slot, now_s
        if claim is None:
            return False
        members[claim.slot].state = IDLE
        self._table.write(claim.slot, members[claim.slot])
        if claim.slot != self._slot:
            self._tell(claim.slot)
        return claim.slot == self._slot

    def _living(self) -> dict[int, Member]:
        """Who is in the group, after the slots of the dead have been freed."""
        members = self._table.members()
        for slot, member in list(members.items()):
            if slot == self._slot:
                continue
            known = self._peers.get(slot)
            if known is None or known.generation != member.generation:
                self._drop(slot)
                with contextlib.suppress(OSError):  # the folder is gone: limits alone hold
                    self._peers[slot] = known = Peer(self._folder, slot, member.generation)
                    self._poll.register(known.alive, 0)  # a hang-up is always told
                    if not known.is_alive:
                        self._bury(slot, members)
        if self._peers:
            slots = {peer.alive: slot for slot, peer in self._peers.items()}
            for fd, event in self._poll.poll(0):
                if event & select.POLLHUP and fd in slots:
                    self._bury(slots[fd], members)
        return members

    def _bury(self, slot: int, members: dict[int, Member]) -> None:
        if members.pop(slot, None) is not None:
            self._free(slot)
        self._drop(slot)

    def _free(self, slot: int) -> None:
        self._table.write(slot, Member(generation=self._table.slot(slot).generation))

    def _drop(self, slot: int) -> None:
        if slot in self._peers:
            peer = self._peers.pop(slot)
            self._poll.unregister(peer.alive)
            peer.close()

    def _tell(self, slot: int) -> None:
        """Wake a member that waits."""
        # One that has just died needs nothing: all who wait are told by its end.
        with contextlib.suppress(KeyError, OSError):
            os.write(self._peers[slot].wake, _WAKE)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 64):
                pass


def folder_of(group: str) -> Path:
    """The folder of a group: a path as it is, a name below the memory-backed file system."""
    if os.sep in group:
        return Path(group)
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"sola_sched-turns-{os.getuid()}-{group}"


def _fit(share: float, rule: str, members: dict[int, Member], folder: Folder) -> None:
    """Refuse a member that does not fit the others."""
    named = {m.name.decode(errors="replace"): m for m in members.values()}
    if share + sum(m.share for m in members.values()) > 1.0 + 1e-9:
        shares = ", ".join(f"{name!r} (process {m.pid}) {m.share:g}" for name, m in named.items())
        raise ConfigError(
            f"The shares of a group of turns must sum up to at most 1 (got {share:g} beside "
            f"{shares} in {folder}); set a smaller 'turns.share'."
        )
    for name, member in named.items():
        if member.rule != rule.encode():
            raise ConfigError(
                f"Engines that take turns must have the same kind of urgency (got {rule!r} beside "
                f"{member.rule.decode()!r} of {name!r} in {folder}); give them the same 'policy'."
            )
