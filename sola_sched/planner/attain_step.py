"""One step of `policy="attain"`: which prefills, and how long a chunk."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sola_sched.core.state import BoolArray, FloatArray, IntArray, StepPlan, StepState
from sola_sched.planner.attain_alone import prompts_alone
from sola_sched.planner.attain_kept import Chunks, chunks_going_on
from sola_sched.planner.attain_lost import LostStep
from sola_sched.planner.attain_state import ROUNDING, BestEffort, StepView, usual_token_s
from sola_sched.planner.base import PLANNABLE, num_that_fit
from sola_sched.planner.deadlines import Jobs, Slots

#: Share of the step time that new decodes may not fill: prefills come in between.
_ADMISSION_MARGIN = 0.1
#: KV use above which admission predicts the peak.
_MEMORY_THRESHOLD = 0.5
#: Share of the KV memory that the peak of the expected need may take: while displacements are less
#: than the first share of all ends and displacements; from the second share on `base.PLANNABLE`.
_OVERCOMMITTED, _FEW_DISPLACED, _MANY_DISPLACED = 1.1, 0.3, 0.45
#: A chunk takes at least so many times what a step with a chunk costs more than one without.
_MIN_CHUNK = 5.0
#: So many decodes may be given up for prefills, each for more than `_WORTH` of them.
_GIVEN_UP, _WORTH = (1, 2, 4, 8), 2
#: Prompts looked at where none may be split.
_MAX_WHOLE = 64
#: Waiting requests offered beyond the chunk: prefix-cache hits may leave budget for them.
_NUM_SPARE_OFFERS = 16


class AttainStep:
    """One step's decision.

    Attributes:
        chunks: What must hold for the next step to repeat the plan; None where it may not.
    """

    def __init__(
        self, view: StepView, credit: BestEffort, *, rejects: bool, may_wait: bool
    ) -> None:
        self.view, self.credit, self.rejects, self.may_wait = view, credit, rejects, may_wait
        self.state, self.decodes, self.prefills = view.state, view.decodes, view.prefills
        self.chunks: Chunks | None = None
        self._is_closed = False  # the chunk has room, and none of the waiting may start

    def plan(self, victims: IntArray) -> StepPlan:
        """Decide the step.

        Args:
            victims: Rows that give way whatever is decided here; not among those judged.
        """
        state, decodes, prefills = self.state, self.decodes, self.prefills
        allowed_s = np.inf
        if decodes.num_alive:
            allowed_s = float(decodes.allowed_s[decodes.alive].min())
        chosen, num_on_time, limit_s = self._order(allowed_s)
        is_on_course = limit_s <= allowed_s
        if self.may_wait and not len(victims):
            alone = prompts_alone(self.view, allowed_s, num_on_time, self._admissible)
            if alone is not None:
                return self._without_decodes(alone)
        if num_on_time:  # its first token comes when the step ends, whatever else is in the step
            first = chosen[0]
            need_s = self.view.mixed_s + float(prefills.service_s[first])
            limit_s = min(limit_s, max(float(prefills.deadline_s[first]), need_s))
        served, offered, tokens = self._serve(chosen, limit_s)
        has_backlog = len(served) < len(chosen)
        if len(served) and not has_backlog:
            has_backlog = tokens < prefills.new[served].sum()
        lost = LostStep(self.view, self.credit, rejects=self.rejects)
        lost_run, lost_prefill = lost.serve(limit_s, served, tokens, has_backlog)
        is_alone = False
        if lost_prefill is not None:
            lost_places, lost_tokens, is_alone = lost_prefill
            if is_alone:
                served, offered, tokens = served[:0], offered[:0], 0
            served, tokens = np.concatenate([served, lost_places]), tokens + lost_tokens
        is_waiting = served >= prefills.num_started
        run_prefills = prefills.rows[served[~is_waiting]]
        starting = prefills.rows[served[is_waiting]]
        run = np.concatenate([decodes.rows_alive, decodes.rows[lost_run], run_prefills])
        budget = (decodes.num_alive + len(lost_run)) * state.tokens_per_decode + tokens
        displaced = lost.victims(starting, lost_run, served)
        if len(displaced) and len(lost_run):
            run = run[~np.isin(run, displaced)]
        victims = np.concatenate([victims, displaced])
        if not len(run) and not len(starting) and not len(offered):
            return StepPlan(reject=self._rejected(), problem="stalled")
        runs_all = len(run) == len(state.running) and not len(run_prefills)
        plan = StepPlan(
            run=None if runs_all and not len(victims) else run,
            admit=np.concatenate([starting, prefills.rows[offered]]),
            token_budget=max(1, min(budget, state.max_num_tokens)),
            preempt=victims,
            reject=self._rejected(),
            problem="overload" if num_on_time < len(chosen) else "attain",
        )
        if (is_on_course and not is_alone) if len(served) else self._is_closed:
            on_time = chosen[:num_on_time]
            self.chunks = chunks_going_on(self.view, plan, on_time, served, tokens, lost_run, lost)
        return plan

    def _without_decodes(self, places: IntArray) -> StepPlan:
        """A step of these prefills and nothing else."""
        prefills = self.prefills
        self.credit.unseen_s += self.state.elapsed_s
        is_waiting = places >= prefills.num_started
        return StepPlan(
            run=prefills.rows[places[~is_waiting]],
            admit=prefills.rows[places[is_waiting]],
            token_budget=int(prefills.new[places].sum()),
            problem="prompts",
        )

    def _rejected(self) -> IntArray:
        """Waiting requests that had a TTFT target and can no longer meet it."""
        first = self.prefills.num_started
        if not self.rejects:
            return self.prefills.rows[:0]
        rejected: IntArray = self.prefills.rows[first:][self.prefills.hopeless[first:]]
        return rejected

    # Length of the step ------------------------------------------------------------------

    def _order(self, limit_s: float) -> tuple[IntArray, int, float]:
        """Feasible prefills in order, how many are on time, and the limit of the step.

        When they are not all on time, letting the few decodes with the least slack miss theirs
        is weighed against the prefills that a longer step brings in on time.
        """
        state, decodes, prefills = self.state, self.decodes, self.prefills
        (candidates,) = prefills.feasible.nonzero()
        if self.rejects:
            waits = candidates >= prefills.num_started
            candidates = candidates[~(waits & prefills.hopeless[candidates])]
        if not len(candidates):
            return candidates, 0, limit_s
        ranks = state.table.priority[prefills.rows[candidates]] if state.has_classes else None
        slots = self._slots(candidates)
        # The step ends with the deadline of its first prefill. Where a step could hold many, those
        # who are to be on time are a step ahead of it, or steps would end with one each.
        mixed_s = self.view.mixed_s
        service_s = prefills.service_s[candidates]
        jobs = Jobs(
            service_s,
            prefills.deadline_s[candidates] - decodes.decode_s,
            lambda index: self._total_cost(candidates[index], slots is not None),
            ranks,
            slots,
            mixed_s if float(service_s.sum()) < mixed_s * len(candidates) else 0.0,
        )

        def on_time(limit_s: float) -> list[int]:
            return jobs.on_time(self.view.prefill_share(limit_s))

        best = on_time(limit_s)
        are_all = len(best) == len(candidates)
        if not are_all and decodes.num_alive and limit_s < self._fullest_s(candidates):
            most = len(on_time(np.inf))
            if most > len(best):
                best, limit_s = self._with_longer_step(best, limit_s, most, on_time)
        all_count = False
        if len(best) < len(candidates):  # the order of the late matters where the step gets to them
            first = candidates[best[:-_NUM_SPARE_OFFERS]]
            all_count = float(prefills.new[first].sum()) < self.view.token_room
        return candidates[jobs.order(best, all_count=all_count)], len(best), limit_s

    def _with_longer_step(
        self, best: list[int], limit_s: float, most: int, on_time: Callable[[float], list[int]]
    ) -> tuple[list[int], float]:
        """The prefills on time, and the limit of the step, when it may be longer.

        Args:
            best: On time in steps of `limit_s`.
            limit_s: Limit that keeps all decodes on course, seconds.
            most: How many are on time in steps of any length.
            on_time: Prefills on time in steps of so many seconds.
        """
        longest_s = self._on_loan_s()
        for limit in (min(2.0 * limit_s, longest_s), longest_s):
            if limit > limit_s and len(best) < most:
                other = on_time(limit)
                if len(other) > len(best):
                    best, limit_s = other, limit
        gain = len(best)
        if most - _WORTH <= gain:
            return best, limit_s
        allowed_s = np.sort(self.decodes.allowed_s[self.decodes.alive])
        for num_given_up in _GIVEN_UP:
            if num_given_up >= len(allowed_s) or most - _WORTH * num_given_up <= gain:
                break
            other = on_time(float(allowed_s[num_given_up]))
            if len(other) - _WORTH * num_given_up > gain:
                gain = len(other) - _WORTH * num_given_up
                best, limit_s = other, float(allowed_s[num_given_up])
        return best, limit_s

    def _slots(self, candidates: IntArray) -> Slots | None:
        """Slots as a resource, where there are fewer than requests that wait for one."""
        state = self.state
        is_needed = candidates >= self.prefills.num_started
        num_free = self.view.num_available_slots
        if math.isnan(state.end_interval_s) or np.count_nonzero(is_needed) <= num_free:
            return None
        return Slots(is_needed, num_free, state.end_interval_s)

    def _fullest_s(self, candidates: IntArray) -> float:
        """Time of a step with as many prefill tokens as it may have: none takes longer."""
        room, has = float(self.view.token_room), float(self.prefills.has[candidates].max())
        return self.view.mixed_s + self.state.cost.prefill_marginal_s(room, has)

    def _on_loan_s(self) -> float:
        """Longest step after which faster ones will most likely bring all back on course."""
        state, decodes, alive = self.state, self.decodes, self.decodes.alive
        rows = decodes.rows_alive
        tpot = self.view.keep * state.table.tpot_s[rows]
        usual_s = usual_token_s(state, decodes.decode_s)
        num_steps = state.surely_remaining(rows, decodes.ahead[alive]) - 1.0
        with np.errstate(invalid="ignore"):  # 0 steps x no target
            payback = np.fmax(num_steps * (tpot - usual_s), 0.0)
        longest = np.maximum(decodes.allowed_s[alive], decodes.bank_s[alive] + payback)
        return float(longest.min())

    def _total_cost(self, index: IntArray, has_slot_cost: bool) -> FloatArray:
        """Accelerator time of each request: its prefill and what its decode adds to steps.

        Where slots are what is short, also its share of the time of all slots.
        """
        cost, prefills = self.state.cost, self.prefills
        outputs = self.state.remaining(prefills.rows[index])
        one = float(cost.decode_s(2.0, 0.0)) - float(cost.decode_s(1.0, 0.0))
        per_ctx = float(cost.decode_s(1.0, 1000.0)) - float(cost.decode_s(1.0, 0.0))
        ctx = prefills.size[index] + outputs / 2
        total: FloatArray = prefills.service_s[index] + outputs * (one + per_ctx * ctx / 1000)
        if has_slot_cost:
            usual_s = usual_token_s(self.state, self.decodes.decode_s)
            total += outputs * (usual_s / self.state.max_num_running)
        return total

    # Prefills ---------------------------------------------------------------

    def _serve(self, chosen: IntArray, limit_s: float) -> tuple[IntArray, IntArray, int]:
        """The first of `chosen` that fit the step.

        Returns:
            Indices served; waiting ones offered beyond them, in case a prefix cache leaves
            budget over; tokens of the chunk.
        """
        if not self.state.chunks_prefills:
            candidates = chosen[:_MAX_WHOLE]
            candidates = candidates[self._admissible(candidates)]
            self._is_closed = not len(candidates)
            served, num_tokens = self._whole(candidates, limit_s)
            return served, served[:0], num_tokens
        served, num_tokens = self._first_that_fit(chosen, limit_s)
        if not len(served):
            return served, served, 0
        candidates = chosen[: len(served) + _NUM_SPARE_OFFERS]
        is_admissible = self._admissible(candidates)
        self._is_closed = not is_admissible.any()
        offered = candidates[len(served) :][is_admissible[len(served) :]]
        if not is_admissible[: len(served)].all():  # those that have begun go on meanwhile
            candidates = candidates[is_admissible]
            served, num_tokens = self._first_that_fit(candidates, limit_s)
            offered = candidates[len(served) :]
        is_waiting = served >= self.prefills.num_started
        if not is_waiting.any():  # no hit of theirs leaves any budget over
            offered = offered[:0]
        return served, offered[offered >= self.prefills.num_started], num_tokens

    def _first_that_fit(self, chosen: IntArray, limit_s: float) -> tuple[IntArray, int]:
        """The first of `chosen` that a step of `limit_s` has time for, and their tokens in it."""
        if not len(chosen):
            return chosen, 0
        view, prefills = self.view, self.prefills
        ends = prefills.new[chosen].cumsum()
        budget = view.tokens_in(limit_s, view.token_room, prefills.has[chosen[0]], ends)
        if not budget:
            return chosen[:0], 0
        if budget < view.token_room and self._is_wasteful(budget, int(chosen[0])):
            return chosen[:0], 0
        num_served = min(len(chosen), int(np.searchsorted(ends, budget, side="left")) + 1)
        return chosen[:num_served], int(min(budget, ends[num_served - 1]))

    def _whole(self, chosen: IntArray, limit_s: float) -> tuple[IntArray, int]:
        """Of `chosen` those that go whole into a step of `limit_s`, and their tokens.

        One that is too long is in nobody's way. The most urgent one goes alone, in a longer step,
        once all decodes can make up for that.
        """
        if not len(chosen):
            return chosen, 0
        view, prefills = self.view, self.prefills
        first, room = int(chosen[0]), float(view.token_room)
        if not math.isinf(limit_s):
            most = view.most_tokens(limit_s, float(prefills.has[first]))
            room = min(room, most * ROUNDING)
        taken, num_tokens = [], 0.0
        new = prefills.new[chosen].tolist()
        for place, tokens in zip(chosen.tolist(), new, strict=True):
            if num_tokens + tokens <= room:
                taken.append(place)
                num_tokens += tokens
        if taken[:1] != [first]:
            need_s = view.mixed_s + float(prefills.service_s[first])
            if not self.decodes.num_alive or need_s <= self._on_loan_s():
                return chosen[:1], int(new[0])
        return np.array(taken, dtype=np.int64), int(num_tokens)

    def _is_wasteful(self, budget: int, first: int) -> bool:
        """Whether a chunk is too short for what it costs to have one, and finishes nothing."""
        cost, prefills = self.state.cost, self.prefills
        if not self.decodes.num_alive or budget >= prefills.new[first]:
            return False
        chunk_s = cost.prefill_marginal_s(float(budget), float(prefills.has[first]))
        return chunk_s < _MIN_CHUNK * cost.chunk_overhead_s

    def _admissible(self, candidates: IntArray) -> BoolArray:
        """Mask without the waiting requests for which slots, TPOT or memory leave no room."""
        state, decodes, prefills = self.state, self.decodes, self.prefills
        num_started = prefills.num_started
        mask: BoolArray = candidates < num_started
        (places,) = (~mask).nonzero()
        if not len(places) or (self.credit.is_blocked and not state.has_classes):
            return mask
        waiting = candidates[places]
        count = min(len(waiting), max(0, self.view.num_available_slots))
        if count:
            count = self._num_sustained(waiting[:count])
        waiting = waiting[:count]
        need = float(prefills.size[waiting].sum())
        used = 1.0 - (state.num_free_blocks - need / state.block_size) / max(1, state.num_blocks)
        if used > _MEMORY_THRESHOLD:
            growing = np.concatenate([decodes.rows_alive, prefills.rows[:num_started]])
            ahead = np.zeros(len(growing) + len(waiting), dtype=np.int64)
            ahead[: decodes.num_alive] = decodes.ahead[decodes.alive]
            left = state.likely_remaining(np.concatenate([growing, prefills.rows[waiting]]), ahead)
            count = num_that_fit(
                state, growing, waiting - num_started, left, ahead, share=_plannable(state)
            )
        mask[places[:count]] = True
        return mask

    def _num_sustained(self, waiting: IntArray) -> int:
        """How many of `waiting` may start before bare decode steps outgrow a TPOT target."""
        state, decodes, prefills = self.state, self.decodes, self.prefills
        num_started = prefills.num_started
        others = decodes.num_alive + num_started
        if not others:
            return len(waiting)
        ctx = decodes.ctx_alive + float(prefills.size[:num_started].sum())
        step_s = state.cost.decode_s(
            others + np.arange(1.0, len(waiting) + 1), ctx + prefills.size[waiting].cumsum()
        )
        full_s = np.asarray(step_s) / (1.0 - _ADMISSION_MARGIN)
        tpot = self.view.keep * state.table.tpot_s[prefills.rows[waiting]]
        token_s = np.minimum.accumulate(state.accepted_per_decode * tpot)
        if (full_s <= np.minimum(decodes.alive_surely_bear_s, token_s)).all():
            return len(waiting)  # as nearly always, and cheaper to see
        count = _num_within(full_s, np.minimum(decodes.alive_bear_s, token_s))
        if count == len(waiting):
            return count
        return self._num_worth(waiting, full_s, token_s, count)

    def _num_worth(
        self, waiting: IntArray, full_s: FloatArray, token_s: FloatArray, count: int
    ) -> int:
        """How many of `waiting` may start when some decodes in their way may miss their targets.

        A decode far behind its schedule, as after a preemption, bears little more than a step
        takes now: until it ends it would keep out everybody, and half of the engine empty.

        Args:
            waiting: Candidates, in order.
            full_s: Time of steps with the first of them, one more each, seconds.
            token_s: Longest steps that they themselves bear, seconds.
            count: How many may start with all decodes on course.
        """
        decodes, prefills = self.decodes, self.prefills
        (alive,) = decodes.alive.nonzero()
        order = alive[decodes.sustain_s[alive].argsort(kind="stable")]
        bear_s = decodes.sustain_s[order]
        end_s = decodes.remaining[order] / self.state.accepted_per_decode * decodes.decode_s
        start_s = prefills.deadline_s[waiting] - prefills.service_s[waiting]
        sustained, best = count, 0
        for num_given_up in _GIVEN_UP:
            if num_given_up >= len(bear_s):
                break
            more = _num_within(full_s, np.minimum(bear_s[num_given_up], token_s))
            is_late = start_s[sustained:more] < end_s[:num_given_up].max()
            gain = int(np.count_nonzero(is_late)) - _WORTH * num_given_up
            if gain > best:
                best, count = gain, more
        return count


def _num_within(values: FloatArray, limits: FloatArray) -> int:
    """How many values, from the first, are within their limits."""
    (over,) = (values > limits).nonzero()
    return int(over[0]) if len(over) else len(values)


def _plannable(state: StepState) -> float:
    """Share of the KV memory that may be planned for.

    A displacement now and then costs less than memory that waits for a peak; where requests are
    displaced time and again, as with short prompts and long outputs, it costs more.
    """
    excess = (state.displaced_share - _FEW_DISPLACED) / (_MANY_DISPLACED - _FEW_DISPLACED)
    return _OVERCOMMITTED - (_OVERCOMMITTED - PLANNABLE) * min(1.0, max(0.0, excess))
