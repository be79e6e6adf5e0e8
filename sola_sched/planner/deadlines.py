"""Which prefills can still meet their deadlines, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sola_sched.state import BoolArray, FloatArray, IntArray

#: Requests looked at one by one when not all deadlines can be met; the later ones follow by cost.
_MAX_EXAMINED = 64


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


def on_time_first(
    service_s: FloatArray,
    deadline_s: FloatArray,
    weigh: Callable[[], FloatArray],
    rank: IntArray | None,
    slots: Slots | None = None,
    lead_s: float = 0.0,
) -> tuple[IntArray, int]:
    """Order jobs so that as many as possible end before their deadlines.

    Source: the algorithm of Moore and Hodgson (1968) for the fewest late jobs on one machine:
    take the jobs by deadline and, whenever the last one taken would be late, give up the job
    that costs most. Departure: the job given up is the one with the largest weight (prefill plus
    remaining decode), which frees more of the accelerator than the longest prefill alone.

    Args:
        service_s: Time of the accelerator that each job needs, shape [n], >= 0.
        deadline_s: Latest end of each job, counted from now, shape [n].
        weigh: Returns the costs that decide which job is given up, shape [n]; called only when
            some job is late.
        rank: Priority class of each job, smaller first and strictly before; None for one class.
        slots: What else a job must wait for; None if there is enough of it.
        lead_s: How long before its deadline a job is to end where not all can be on time, unless
            none could then.

    Returns:
        (order, num_on_time): indices of all jobs; the first `num_on_time` are expected on time,
        by (class, deadline); the others follow by cost.
    """
    if rank is None:
        order = np.argsort(deadline_s, kind="stable")
    else:
        order = np.lexsort((deadline_s, rank))
    if not len(order):
        return order, 0
    machine = _Machine(service_s, deadline_s, slots, lead_s)
    if machine.all_on_time(order):
        return order, len(order)
    weight_s = weigh()
    if rank is not None and rank.any() and rank.min() != rank.max():
        return _by_class(order, machine, weight_s, rank)
    kept, dropped = machine.choose(order, weight_s)
    return np.asarray(kept + dropped, dtype=np.int64), len(kept)


def _by_class(
    order: IntArray, machine: _Machine, weight_s: FloatArray, rank: IntArray
) -> tuple[IntArray, int]:
    """Higher classes choose first; what they keep delays the lower ones."""
    kept: list[int] = []
    dropped: list[int] = []
    for value in np.unique(rank):
        keep, drop = machine.choose(order[rank[order] == value], weight_s)
        kept += keep
        dropped += drop
    return np.asarray(kept + dropped, dtype=np.int64), len(kept)


class _Machine:
    """Jobs one after the other; those that need a slot also in the order in which slots come."""

    def __init__(
        self,
        service_s: FloatArray,
        deadline_s: FloatArray,
        slots: Slots | None,
        lead_s: float,
    ) -> None:
        self.service_s, self.deadline_s, self.lead_s = service_s, deadline_s, lead_s
        # Slots are a machine of their own that is ahead by the free ones.
        self.slot_s: FloatArray | None = None
        self.busy_s = self.slots_busy_s = 0.0
        if slots is not None:
            self.slot_s = np.where(slots.is_needed, slots.interval_s, 0.0)
            self.slots_busy_s = -slots.num_free * slots.interval_s

    def all_on_time(self, order: IntArray) -> bool:
        """Whether every job ends before its deadline."""
        deadline_s = self.deadline_s[order]
        if (np.cumsum(self.service_s[order]) > deadline_s).any():
            return False
        if self.slot_s is None:
            return True
        slot_s = self.slot_s[order]
        waits_s = self.slots_busy_s + np.cumsum(slot_s)
        return not ((waits_s > deadline_s) & (slot_s > 0)).any()

    def choose(self, order: IntArray, weight_s: FloatArray) -> tuple[list[int], list[int]]:
        """Jobs kept, by deadline, and given up, by weight; the former occupy the machine."""
        kept, dropped = self._choose(order, weight_s, self.lead_s)
        if not kept and self.lead_s:
            kept, dropped = self._choose(order, weight_s, 0.0)
        return kept, dropped

    def _choose(
        self, order: IntArray, weight_s: FloatArray, lead_s: float
    ) -> tuple[list[int], list[int]]:
        head, tail = order[:_MAX_EXAMINED], order[_MAX_EXAMINED:]
        slot_s = np.zeros(len(head)) if self.slot_s is None else self.slot_s[head]
        costliest: list[tuple[float, int, float, float]] = []
        costliest_waiting: list[tuple[float, int, float, float]] = []  # for a slot
        given_up: set[int] = set()
        jobs = zip(
            (-weight_s[head]).tolist(),
            head.tolist(),
            self.service_s[head].tolist(),
            slot_s.tolist(),
            (self.deadline_s[head] - lead_s).tolist(),
            strict=True,
        )
        for weight, job, service, slot, deadline in jobs:
            entry = (weight, job, service, slot)
            self.busy_s += service
            self.slots_busy_s += slot
            heapq.heappush(costliest, entry)
            if slot:
                heapq.heappush(costliest_waiting, entry)
            while True:
                if slot and self.slots_busy_s > deadline:
                    heap = costliest_waiting
                elif self.busy_s > deadline:
                    heap = costliest
                else:
                    break
                while heap and heap[0][1] in given_up:
                    heapq.heappop(heap)
                if not heap:  # what a higher class has kept is too much by itself
                    break
                _, worst, freed_s, freed_slot_s = heapq.heappop(heap)
                given_up.add(worst)
                self.busy_s -= freed_s
                self.slots_busy_s -= freed_slot_s
        kept = [job for job in head.tolist() if job not in given_up]
        late = np.concatenate([np.fromiter(given_up, dtype=np.int64), tail])
        dropped = late[np.argsort(weight_s[late], kind="stable")]
        return kept, dropped.tolist()
