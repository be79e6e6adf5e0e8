"""Which prefills can still meet their deadlines, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import BoolArray, FloatArray, IntArray

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
        weigh: Returns the costs, of the jobs with these numbers, that decide which is given up;
            asked when some job is late, of those that are looked at.
        rank: Priority class of each job, smaller first and strictly before; None for one class.
        slots: What else a job must wait for; None if there is enough of it.
        lead_s: How long before its deadline a job is to end where not all can be on time, unless
            none could then.
    """

    def __init__(
        self,
        service_s: FloatArray,
        deadline_s: FloatArray,
        weigh: Callable[[IntArray], FloatArray],
        rank: IntArray | None = None,
        slots: Slots | None = None,
        lead_s: float = 0.0,
    ) -> None:
        self._service_s, self._deadline_s, self._lead_s = service_s, deadline_s, lead_s
        self._weigh, self._rank, self._slots = weigh, rank, slots
        # Slots are a machine of their own that is ahead by the free ones.
        self._slots_busy_s = -slots.num_free * slots.interval_s if slots is not None else 0.0
        self._classes: list[_JobsOfClass] = []
        # With so much to do the last one is late in any order: nobody asks for the whole order.
        self._is_crowded = (
            rank is None
            and len(deadline_s) > 2 * _MAX_EXAMINED
            and float(service_s.sum()) > float(deadline_s.max())
        )
        if self._is_crowded:
            self._order = _first_by_deadline(deadline_s)
            return
        if rank is None:
            self._order = deadline_s.argsort(kind="stable")
        else:
            self._order = np.lexsort((deadline_s, rank))
        self._ends_s = service_s[self._order].cumsum()
        self._due_s = deadline_s[self._order]
        self._finds_slots = True
        if slots is not None:
            needs = slots.is_needed[self._order]
            late = self._slots_busy_s + slots.interval_s * needs.cumsum() > self._due_s
            self._finds_slots = not np.count_nonzero(late & needs)

    def on_time(self, share: float = 1.0) -> list[int]:
        """Jobs that can be on time, by (class, deadline).

        Args:
            share: Share of its time that the machine has for them, in (0, 1].
        """
        if self._are_all_on_time(share):
            everybody: list[int] = self._order.tolist()
            return everybody
        if not self._classes:
            self._classes = [self._examined(jobs) for jobs in self._by_class()]
        kept: list[int] = []
        busy_s, slots_busy_s = 0.0, self._slots_busy_s
        for jobs in self._classes:  # what higher classes keep delays the lower ones
            chosen = jobs.choose(share, self._lead_s, busy_s, slots_busy_s)
            if self._lead_s and not chosen:
                chosen = jobs.choose(share, 0.0, busy_s, slots_busy_s)
            kept += [job for _, job, *_ in chosen]
            if len(self._classes) > 1:
                busy_s += sum(service for _, _, service, _, _ in chosen)
                slots_busy_s += sum(slot for _, _, _, slot, _ in chosen)
        return kept

    def _are_all_on_time(self, share: float) -> bool:
        if self._is_crowded or not self._finds_slots:
            return False
        return not np.count_nonzero(self._ends_s > share * self._due_s)

    def order(self, kept: list[int], *, all_count: bool = True) -> IntArray:
        """All jobs by class: those `kept`, as they come, then the others by weight.

        Args:
            kept: Jobs on time.
            all_count: Whether the order of the others matters; if not, they come in any.
        """
        first = np.array(kept, dtype=np.int64)
        if len(kept) == len(self._order):
            return first
        is_late = np.ones(len(self._order), dtype=np.bool_)
        is_late[first] = False
        late = self._order[is_late[self._order]]
        if all_count:
            late = late[self._weigh(late).argsort(kind="stable")]
        order: IntArray = np.concatenate([first, late])
        if self._rank is not None:
            order = order[self._rank[order].argsort(kind="stable")]
        return order

    def _by_class(self) -> list[IntArray]:
        if self._rank is None:
            return [self._order]
        rank = self._rank[self._order]
        return np.split(self._order, np.flatnonzero(np.diff(rank)) + 1)

    def _examined(self, jobs: IntArray) -> _JobsOfClass:
        head = jobs[:_MAX_EXAMINED]
        slots, slot_s = self._slots, None
        if slots is not None:
            slot_s = np.where(slots.is_needed[head], slots.interval_s, 0.0)
        return _JobsOfClass(
            head, self._weigh(head), self._service_s[head], slot_s, self._deadline_s[head]
        )


def _first_by_deadline(deadline_s: FloatArray) -> IntArray:
    """The jobs with the first deadlines, as many as are looked at, in order; then the others.

    Of those with equal deadlines the first come first, as in a stable sort.
    """
    last_s = np.partition(deadline_s, _MAX_EXAMINED - 1)[_MAX_EXAMINED - 1]
    is_first = deadline_s < last_s
    (tied,) = (deadline_s == last_s).nonzero()
    is_first[tied[: _MAX_EXAMINED - int(np.count_nonzero(is_first))]] = True
    (first,) = is_first.nonzero()
    first = first[deadline_s[first].argsort(kind="stable")]
    order: IntArray = np.concatenate([first, (~is_first).nonzero()[0]])
    return order


class _JobsOfClass:
    """Jobs of one class, by deadline.

    Args:
        index: Their numbers, shape [n].
        weight_s: Costs that decide which is given up, shape [n].
        service_s: Time of the machine, shape [n].
        slot_s: Time of a slot, shape [n]; None where there are enough.
        deadline_s: Shape [n].
    """

    def __init__(
        self,
        index: IntArray,
        weight_s: FloatArray,
        service_s: FloatArray,
        slot_s: FloatArray | None,
        deadline_s: FloatArray,
    ) -> None:
        self._deadline_s, self._slot_s = deadline_s, slot_s
        self._ends_s = service_s.cumsum()
        self._slot_ends_s = self._ends_s if slot_s is None else slot_s.cumsum()
        times = [service_s.tolist(), [0.0] * len(index) if slot_s is None else slot_s.tolist()]
        self._jobs: list[_Job] = list(
            zip((-weight_s).tolist(), index.tolist(), *times, deadline_s.tolist(), strict=True)
        )

    def choose(self, share: float, lead_s: float, busy_s: float, slots_busy_s: float) -> list[_Job]:
        """Those that are kept.

        Args:
            share: As in `Jobs.on_time`.
            lead_s: How long before its deadline each is to end, seconds.
            busy_s: Time of the machine that is taken already, seconds.
            slots_busy_s: The same of the slots.
        """
        due_s = self._deadline_s - lead_s if lead_s else self._deadline_s
        is_late = self._ends_s > share * due_s - busy_s
        are_slots_short = False
        if self._slot_s is not None:
            has_no_slot = (self._slot_ends_s > due_s - slots_busy_s) & (self._slot_s > 0.0)
            are_slots_short = bool(np.count_nonzero(has_no_slot))
            is_late |= has_no_slot
        num_sure = int(is_late.argmax())  # nobody is given up for the sake of these alone
        if not is_late[num_sure]:
            return self._jobs
        busy_s += float(self._ends_s[num_sure - 1]) if num_sure else 0.0
        dues_s = (share * due_s[num_sure:]).tolist()
        if are_slots_short:
            slots_busy_s += float(self._slot_ends_s[num_sure - 1]) if num_sure else 0.0
            slot_dues_s = due_s[num_sure:].tolist()
            given_up = self._given_up_for_both(num_sure, dues_s, slot_dues_s, busy_s, slots_busy_s)
        else:
            given_up = self._given_up(num_sure, dues_s, busy_s)
        return [entry for entry in self._jobs if entry[1] not in given_up]

    def _given_up(self, num_sure: int, dues_s: list[float], busy_s: float) -> set[int]:
        """Numbers of those that are not kept, where only the machine is short.

        Args:
            num_sure: So many are on time if nobody comes after them.
            dues_s: When the machine must have served each of the others, seconds.
            busy_s: Time of the machine until the first of the others, seconds.
        """
        costliest = self._jobs[:num_sure]
        heapq.heapify(costliest)
        given_up = set()
        for entry, due_s in zip(self._jobs[num_sure:], dues_s, strict=True):
            busy_s += entry[2]
            if busy_s <= due_s:
                heapq.heappush(costliest, entry)
                continue
            worst = heapq.heappushpop(costliest, entry)
            while True:
                given_up.add(worst[1])
                busy_s -= worst[2]
                # Without any left, what a higher class has kept is too much by itself.
                if busy_s <= due_s or not costliest:
                    break
                worst = heapq.heappop(costliest)
        return given_up

    def _given_up_for_both(
        self,
        num_sure: int,
        dues_s: list[float],
        slot_dues_s: list[float],
        busy_s: float,
        slots_busy_s: float,
    ) -> set[int]:
        """`_given_up` where slots are short too: they have dues and a time of their own."""
        costliest = self._jobs[:num_sure]
        costliest_waiting = [entry for entry in costliest if entry[3]]  # for a slot
        heapq.heapify(costliest)
        heapq.heapify(costliest_waiting)
        given_up: set[int] = set()
        others = self._jobs[num_sure:]
        for entry, due_s, slot_due_s in zip(others, dues_s, slot_dues_s, strict=True):
            busy_s += entry[2]
            slot_s = entry[3]
            heapq.heappush(costliest, entry)
            if slot_s:
                slots_busy_s += slot_s
                heapq.heappush(costliest_waiting, entry)
            while True:
                if slot_s and slots_busy_s > slot_due_s:
                    heap = costliest_waiting
                elif busy_s > due_s:
                    heap = costliest
                else:
                    break
                while heap and heap[0][1] in given_up:
                    heapq.heappop(heap)
                if not heap:
                    break
                _, worst, freed_s, freed_slot_s, _ = heapq.heappop(heap)
                given_up.add(worst)
                busy_s -= freed_s
                slots_busy_s -= freed_slot_s
        return given_up
