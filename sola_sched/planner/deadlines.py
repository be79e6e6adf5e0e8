"""Which prefills can still meet their deadlines, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sola_sched.state import BoolArray, FloatArray, IntArray

#: Jobs looked at one by one when not all deadlines can be met; the later ones follow by cost.
_MAX_EXAMINED = 64

#: Minus its weight, its index, its time of the machine, its time of a slot, its deadline.
_Job = tuple[float, int, float, float, float]


@dataclass(frozen=True, slots=True)
class Slots:
    """A second resource of which a job takes a unit before it can start.

    Attributes:
        is_needed: Jobs that have none yet, shape [n].
        num_free: Units at hand, >= 0.
        interval_s: Mean time until another one is free, seconds.
    """

    is_needed: BoolArray
    num_free: int
    interval_s: float


class Jobs:
    """Jobs on one machine, of which as many as possible are to end before their deadlines.

    Source: the algorithm of Moore and Hodgson (1968) for the fewest late jobs on one machine:
    take the jobs by deadline and, whenever the last one taken would be late, give up the job
    that costs most. Departure: the job given up is the one with the largest weight (prefill plus
    remaining decode), which frees more of the accelerator than the longest prefill alone.

    Args:
        service_s: Time of the accelerator that each job needs, shape [n], >= 0.
        deadline_s: Latest end of each job, counted from now, shape [n].
        weigh: Returns the costs that decide which job is given up, shape [n]; called at most once,
            when some job is late.
        rank: Priority class of each job, smaller first and strictly before; None for one class.
        slots: What else a job must wait for; None if there is enough of it.
        lead_s: How long before its deadline a job is to end where not all can be on time, unless
            none could then.
    """

    def __init__(
        self,
        service_s: FloatArray,
        deadline_s: FloatArray,
        weigh: Callable[[], FloatArray],
        rank: IntArray | None = None,
        slots: Slots | None = None,
        lead_s: float = 0.0,
    ) -> None:
        self._service_s, self._deadline_s, self._lead_s = service_s, deadline_s, lead_s
        self._weigh, self._rank = weigh, rank
        if rank is None:
            self._order = np.argsort(deadline_s, kind="stable")
        else:
            self._order = np.lexsort((deadline_s, rank))
        self._ends_s = np.cumsum(service_s[self._order])
        self._due_s = deadline_s[self._order]
        # Slots are a machine of their own that is ahead by the free ones.
        self._slot_s: FloatArray | None = None
        self._slots_busy_s = 0.0
        self._finds_slots = True
        if slots is not None:
            self._slot_s = np.where(slots.is_needed, slots.interval_s, 0.0)
            self._slots_busy_s = -slots.num_free * slots.interval_s
            slot_s = self._slot_s[self._order]
            late = self._slots_busy_s + np.cumsum(slot_s) > self._due_s
            self._finds_slots = not np.count_nonzero(late & (slot_s > 0))
        self._weight_s: FloatArray | None = None
        self._classes: list[list[_Job]] = []

    def on_time(self, share: float = 1.0) -> list[int]:
        """Jobs that can be on time, by (class, deadline).

        Args:
            share: Share of its time that the machine has for them, in (0, 1].
        """
        if self._finds_slots and not np.count_nonzero(self._ends_s > share * self._due_s):
            kept: list[int] = self._order.tolist()
            return kept
        if self._weight_s is None:
            self._weight_s = self._weigh()
            self._classes = [self._examined(jobs) for jobs in self._by_class()]
        kept, busy_s, slots_busy_s = [], 0.0, self._slots_busy_s
        for jobs in self._classes:  # what higher classes keep delays the lower ones
            chosen = _choose(jobs, share, self._lead_s, busy_s, slots_busy_s)
            if self._lead_s and not chosen:
                chosen = _choose(jobs, share, 0.0, busy_s, slots_busy_s)
            kept += [job for _, job, *_ in chosen]
            busy_s += sum(service for _, _, service, _, _ in chosen)
            slots_busy_s += sum(slot for _, _, _, slot, _ in chosen)
        return kept

    def order(self, kept: list[int]) -> IntArray:
        """All jobs: those `kept`, as they come, then the others by (class, weight)."""
        first = np.array(kept, dtype=np.int64)
        if self._weight_s is None or len(kept) == len(self._order):
            return first
        is_late = np.ones(len(self._order), dtype=np.bool_)
        is_late[first] = False
        late = self._order[is_late[self._order]]
        late = late[np.argsort(self._weight_s[late], kind="stable")]
        if self._rank is not None:
            late = late[np.argsort(self._rank[late], kind="stable")]
        return np.concatenate([first, late])

    def _by_class(self) -> list[IntArray]:
        if self._rank is None:
            return [self._order]
        rank = self._rank[self._order]
        return np.split(self._order, np.flatnonzero(np.diff(rank)) + 1)

    def _examined(self, jobs: IntArray) -> list[_Job]:
        assert self._weight_s is not None
        head = jobs[:_MAX_EXAMINED]
        slot_s = np.zeros(len(head)) if self._slot_s is None else self._slot_s[head]
        return list(
            zip(
                (-self._weight_s[head]).tolist(),
                head.tolist(),
                self._service_s[head].tolist(),
                slot_s.tolist(),
                self._deadline_s[head].tolist(),
                strict=True,
            )
        )


def _choose(
    jobs: list[_Job], share: float, lead_s: float, busy_s: float, slots_busy_s: float
) -> list[_Job]:
    """Those of one class that are kept.

    Args:
        jobs: By deadline.
        share: As in `Jobs.on_time`.
        lead_s: How long before its deadline each is to end, seconds.
        busy_s: Time of the machine that is taken already, seconds.
        slots_busy_s: The same of the slots.
    """
    costliest: list[_Job] = []
    costliest_waiting: list[_Job] = []  # for a slot
    given_up: set[int] = set()
    for entry in jobs:
        _, _, service, slot, deadline = entry
        deadline -= lead_s
        due_s = share * deadline
        busy_s += service
        slots_busy_s += slot
        heapq.heappush(costliest, entry)
        if slot:
            heapq.heappush(costliest_waiting, entry)
        while True:
            if slot and slots_busy_s > deadline:
                heap = costliest_waiting
            elif busy_s > due_s:
                heap = costliest
            else:
                break
            while heap and heap[0][1] in given_up:
                heapq.heappop(heap)
            if not heap:  # what a higher class has kept is too much by itself
                break
            _, worst, freed_s, freed_slot_s, _ = heapq.heappop(heap)
            given_up.add(worst)
            busy_s -= freed_s
            slots_busy_s -= freed_slot_s
    return [entry for entry in jobs if entry[1] not in given_up]
