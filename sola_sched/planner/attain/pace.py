"""How long may the step be, and which prefills are on time in steps of that length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import BoolArray, FloatArray, IntArray
from sola_sched.planner.attain.loops import load
from sola_sched.planner.attain.lost import Judged, usual_token_s

#: Share of the time that prefills have in a step at least, as far as anybody counts on it.
_LEAST_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Pace:
    """The length of the step, and whom it is for.

    Attributes:
        order: Places of the prefills that can be on time, in the order of service.
        num_on_time: So many of them, from the first, are on time together.
        limit_s: The longest step, seconds.
    """

    order: IntArray
    num_on_time: int
    limit_s: float


def find_pace(judged: Judged, *, rejects: bool) -> Pace:
    """The longest step that keeps all decodes on course, and the most prefills on time in such.

    A step ends before the deadline of its first prefill: nobody gets a token earlier.

    Args:
        judged: The requests.
        rejects: Whether those that are too late for their first token will not be there any more.
    """
    prefills, limit_s = judged.prefills, judged.decodes.slack_s
    (candidates,) = prefills.feasible.nonzero()
    if rejects:
        waits = candidates >= prefills.num_started
        candidates = candidates[~(waits & prefills.hopeless[candidates])]
    if not len(candidates):
        return Pace(candidates, 0, limit_s)
    jobs = Jobs(judged, candidates)
    kept = jobs.keep(limit_s)
    num_on_time = int(np.count_nonzero(kept))
    order = jobs.order(kept)
    if num_on_time:
        first = order[0]
        need_s = judged.mixed_s + float(prefills.service_s[first])
        limit_s = min(limit_s, max(float(prefills.deadline_s[first]), need_s))
    return Pace(order, num_on_time, limit_s)


class Jobs:
    """The prefills that can be on time, each by itself; the first deadlines are looked at.

    Args:
        judged: The requests.
        candidates: Places of the prefills.
        delay_s: They begin so much later.
    """

    def __init__(self, judged: Judged, candidates: IntArray, delay_s: float = 0.0) -> None:
        self.judged = judged
        prefills, state = judged.prefills, judged.state
        self.near, self.far = self._by_deadline(candidates)
        near = self.near
        self.service_s = prefills.service_s[near]
        self.due_s = prefills.deadline_s[near] - judged.decodes.decode_s - delay_s
        self.rank = np.zeros(len(near), dtype=np.int64)
        if state.has_ranks:
            self.rank = state.rank_of(prefills.rows[near])
        self.slot_s = np.zeros(len(near))
        self.slots_busy_s = 0.0
        num_waiting = int(np.count_nonzero(candidates >= prefills.num_started))
        self.are_slots_short = num_waiting > judged.num_open_slots
        if math.isnan(state.end_interval_s):  # nobody knows when one will be free
            self.are_slots_short = False
        if self.are_slots_short:  # a second machine, which is ahead by the free ones
            self.slot_s[near >= prefills.num_started] = state.end_interval_s
            self.slots_busy_s = -judged.num_open_slots * state.end_interval_s
        # The step ends with the deadline of its first prefill. Where one could hold many, those
        # who are to be on time are so a step early, or steps would end with one each.
        is_short = float(self.service_s.mean()) < judged.mixed_s if len(near) else False
        self.lead_s = judged.mixed_s if is_short else 0.0

    def weight_s(self, places: IntArray) -> FloatArray:
        """What serving each costs for what it is worth, seconds: its prefill and, if slots are
        short, its share of the time of all slots."""
        judged, state, prefills = self.judged, self.judged.state, self.judged.prefills
        weight_s: FloatArray = prefills.service_s[places]
        if self.are_slots_short:
            usual_s = usual_token_s(state, judged.decodes.decode_s) / state.max_num_running
            weight_s = weight_s + usual_s * state.remaining(prefills.rows[places])
        return weight_s / state.table.weight[prefills.rows[places]]

    def _by_deadline(self, candidates: IntArray) -> tuple[IntArray, IntArray]:
        """The first by class and deadline, as many as are looked at; the others in any order."""
        judged, most = self.judged, self.judged.tuning.num_examined
        deadline_s = judged.prefills.deadline_s[candidates]
        if judged.state.has_ranks:
            rank = judged.state.rank_of(judged.prefills.rows[candidates])
            order = np.lexsort((deadline_s, rank))
            return candidates[order[:most]], candidates[order[most:]]
        near = np.arange(len(candidates))
        if len(near) > most:
            (near,) = (deadline_s <= np.partition(deadline_s, most - 1)[most - 1]).nonzero()
        near = near[deadline_s[near].argsort(kind="stable")][:most]
        is_far = np.ones(len(candidates), dtype=np.bool_)
        is_far[near] = False
        return candidates[near], candidates[is_far]

    def keep(self, limit_s: float) -> BoolArray:
        """Mask of `near`: the most that are on time together in steps of `limit_s`."""
        kept = np.zeros(len(self.near), dtype=np.bool_)
        share = max(_LEAST_SHARE, 1.0 - self.judged.mixed_s / max(limit_s, 1e-9))
        if self._keep(self.service_s, self.due_s, share, kept) < len(kept):
            weight_s = self.weight_s(self.near)
            if not self._keep(weight_s, self.due_s - self.lead_s, share, kept) and self.lead_s:
                self._keep(weight_s, self.due_s, share, kept)
        return kept

    def _keep(self, weight_s: FloatArray, due_s: FloatArray, share: float, kept: BoolArray) -> int:
        count: int = load().keep_on_time(
            self.service_s, due_s, self.slot_s, weight_s, self.rank, share, self.slots_busy_s, kept
        )
        return count

    def order(self, kept: BoolArray) -> IntArray:
        """All by class: those kept, by deadline, then the others; by cost if it gets to them."""
        judged = self.judged
        first, late = self.near[kept], np.concatenate([self.near[~kept], self.far])
        if len(late) and float(judged.prefills.new[first].sum()) < judged.token_room:
            late = late[self.weight_s(late).argsort(kind="stable")]
        order: IntArray = np.concatenate([first, late])
        if judged.state.has_ranks:
            rank = judged.state.rank_of(judged.prefills.rows[order])
            order = order[rank.argsort(kind="stable")]
        return order
