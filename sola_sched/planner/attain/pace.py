"""How long may the step be, and which prefills are on time in steps of that length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import BoolArray, FloatArray, IntArray
from sola_sched.planner.attain.loops import load
from sola_sched.planner.attain.lost import Judged


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

    A step ends before the deadline of its first prefill: nobody gets a token earlier. Where
    somebody would be late, decodes lend of their later time, if then all are on time. Where
    somebody is lost already they do so only if all that comes can be served: past that the time
    lent is missing later.

    Args:
        judged: The requests.
        rejects: Whether those that are too late for their first token will not be there any more.
    """
    prefills, limit_s = judged.prefills, judged.decodes.slack_s
    candidates = prefills.feasible
    if rejects:
        candidates = prefills.without_rejected(candidates)
    jobs = Jobs(judged, candidates)
    if not jobs.count:
        return Pace(jobs.near, 0, limit_s)
    num_on_time, kept = jobs.keep(limit_s)
    if num_on_time < jobs.count:
        is_anybody_lost = judged.decodes.num_lost or prefills.hopeless.any()
        if not is_anybody_lost or _is_sustained(judged):
            need_s = jobs.all_on_time_s()
            if need_s < judged.decodes.most_lent_s():
                num_on_time, limit_s = jobs.count, need_s
    order = jobs.order(num_on_time, kept)
    if num_on_time:
        limit_s = min(limit_s, first_due_s(judged, order[0]))
    return Pace(order, num_on_time, limit_s)


def _is_sustained(judged: Judged) -> bool:
    """Whether what comes can be served at the pace of the tightest target, and TPOT is tight.

    Where it is not, steps within the schedules have room for any prompt that is worth it.
    """
    state, decodes = judged.state, judged.decodes
    load = state.traffic.load(
        state.now_s,
        float(decodes.token_s[decodes.alive].min(initial=np.inf)),
        tokens_per_step=state.accepted_per_decode,
        decode_s=lambda count, ctx: float(state.cost.decode_s(count, ctx)),
        prefill_s=lambda tokens: float(state.cost.prefill_marginal_s(tokens, 0.0)),
    )
    return load is not None and load.total <= 1.0 and load.decodes >= judged.tuning.near


def first_due_s(judged: Judged, first: int) -> float:
    """When a step with this prefill first has to end: by its deadline, if it can."""
    need_s = judged.mixed_s + float(judged.prefills.service_s[first])
    return max(float(judged.prefills.deadline_s[first]), need_s)


class Jobs:
    """The prefills that can be on time, each by itself; the first deadlines are looked at.

    Args:
        judged: The requests.
        candidates: Which prefills.
        delay_s: They begin so much later.

    Attributes:
        near: Places of the first ones by class and deadline.
        count: How many there are.
    """

    def __init__(self, judged: Judged, candidates: BoolArray, delay_s: float = 0.0) -> None:
        self.judged, self.candidates = judged, candidates
        prefills, state = judged.prefills, judged.state
        (places,) = candidates.nonzero()
        self.count = len(places)
        first = np.lexsort((prefills.deadline_s[places], prefills.rank[places]))
        self.near: IntArray = places[first[: judged.tuning.num_examined]]
        self.delay_s = judged.decodes.decode_s + delay_s
        # The step ends with the deadline of its first prefill. Where one could hold many, those
        # who are to be on time are so a step early, or steps would end with one each.
        mean_s = prefills.service_s[self.near].sum() / max(1, len(self.near))
        self.lead_s = judged.mixed_s if mean_s < judged.mixed_s else 0.0
        #: What serving each costs for what it is worth, seconds.
        self.weight_s: FloatArray = prefills.service_s / state.table.weight[prefills.rows]

    def keep(self, limit_s: float) -> tuple[int, BoolArray]:
        """The most of `near` that are on time together in steps of `limit_s`: how many, and which.

        All a step early, if that is possible; else as many as are on time at all.
        """
        kept = np.zeros(len(self.near), dtype=np.bool_)
        share = max(self.judged.tuning.least_share, 1.0 - self.judged.mixed_s / max(limit_s, 1e-9))
        count = self._keep(0.0, self.judged.prefills.service_s, share, kept)
        if count < len(kept):
            count = self._keep(self.lead_s, self.weight_s, share, kept)
            if not count and self.lead_s:
                count = self._keep(0.0, self.weight_s, share, kept)
        return count, kept

    def all_on_time_s(self) -> float:
        """The shortest steps in which all are on time together, seconds; inf if there are none."""
        prefills, near = self.judged.prefills, self.near
        num_starts = np.count_nonzero(near >= prefills.num_started)
        if len(near) < self.count or num_starts > self.judged.num_open_slots:
            return np.inf
        left_s = prefills.deadline_s[near] - self.delay_s
        share = float((prefills.service_s[near].cumsum() / np.maximum(left_s, 1e-9)).max())
        cost, mixed_s = self.judged.state.cost, self.judged.mixed_s
        longest_s = mixed_s + float(cost.prefill_marginal_s(self.judged.token_room, 0.0))
        return mixed_s / (1.0 - share) if mixed_s < (1.0 - share) * longest_s else np.inf

    def _keep(self, lead_s: float, weight_s: FloatArray, share: float, kept: BoolArray) -> int:
        prefills = self.judged.prefills
        count: int = load().keep_on_time(
            self.near, prefills.service_s, prefills.deadline_s, weight_s, prefills.rank,
            share, self.delay_s + lead_s, kept,
        )  # fmt: skip
        return count

    def order(self, num_kept: int, kept: BoolArray) -> IntArray:
        """All by class: those kept, by deadline, then the others; by cost if it gets to them."""
        judged, prefills = self.judged, self.judged.prefills
        if num_kept == self.count:
            return self.near
        first = self.near[kept]
        far = self.candidates.copy()
        far[self.near] = False
        late = np.concatenate([self.near[~kept], far.nonzero()[0]])
        if float(prefills.new[first].sum()) < judged.token_room:
            late = late[self.weight_s[late].argsort(kind="stable")]
        order: IntArray = np.concatenate([first, late])
        if judged.state.has_ranks:
            order = order[prefills.rank[order].argsort(kind="stable")]
        return order
