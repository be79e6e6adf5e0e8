"""One step of `policy="attain"`: which prefills, how long a chunk, what is left for the lost."""

from __future__ import annotations

import functools

import numpy as np

from sola_sched.planner.attain_state import BestEffort, Decodes
from sola_sched.planner.base import neutral, num_that_fit
from sola_sched.planner.deadlines import Slots, on_time_first
from sola_sched.state import BoolArray, FloatArray, IntArray, StepPlan, StepState

#: A prefill counts as lost only if it misses its deadline by more than this share of its time.
_GIVE_UP_MARGIN = 0.95
#: Share of the step time that new decodes may not fill: prefills come in between.
_ADMISSION_MARGIN = 0.1
#: KV use above which admission predicts the peak.
_MEMORY_THRESHOLD = 0.5
#: Chunks of fewer than so many tiles come in smaller multiples: what rounding down to a tile
#: leaves out would be a large share of them.
_MANY_TILES = 8
_SUB_TILE = 16
#: A chunk takes at least so many times what a step with a chunk costs more than one without.
_MIN_CHUNK = 5.0
#: Waiting requests offered beyond the chunk: prefix-cache hits may leave budget for them.
_NUM_SPARE_OFFERS = 16


class AttainStep:
    """One step's decision; holds what its parts share."""

    def __init__(
        self,
        state: StepState,
        decodes: Decodes,
        rows: IntArray,
        is_decode: BoolArray,
        remaining: FloatArray,
        victims: IntArray,
        *,
        best_effort: BestEffort,
        lowest: int,
        tile: int,
        keep: float,
        rejects: bool,
    ) -> None:
        self.state, self.decodes, self.best_effort = state, decodes, best_effort
        self.rows, self.is_decode, self.remaining = rows, is_decode, remaining
        self.victims, self.tile, self.keep, self.rejects = victims, tile, keep, rejects
        table = state.table
        self.alive = decodes.rows[~decodes.lost]
        self.num_alive = len(self.alive)
        self.ctx_alive = float(decodes.ctx[~decodes.lost].sum())
        self.decode_s = (
            float(state.cost.decode_s(self.num_alive, self.ctx_alive)) if self.num_alive else 0.0
        )
        # Prefills: those that run already, then those that wait.
        prefills = rows[~is_decode]
        self.num_prefills = len(prefills)
        self.pending = np.concatenate([prefills, state.waiting])
        new = table.prefill_target[self.pending] - table.num_computed[self.pending]
        self.new = np.maximum(new, 1).astype(np.float64)
        self.has = table.num_computed[self.pending].astype(np.float64)
        self.prefill_s = np.asarray(state.cost.prefill_marginal_s(self.new, self.has))
        need_s = self.decode_s + self.prefill_s
        self.deadline_s = self._deadlines(need_s)
        self.feasible = np.isfinite(self.deadline_s) & (_GIVE_UP_MARGIN * need_s <= self.deadline_s)
        fresh = table.num_output[self.pending] == 0
        self.hopeless = fresh & np.isfinite(self.deadline_s) & ~self.feasible
        # Priority classes are strict: what an upper one has lost still goes before a lower one.
        upper = ~self.feasible & (table.priority[self.pending] < lowest)
        if upper.any():
            self.deadline_s[upper] = np.inf
            self.feasible |= upper

    def plan(self) -> StepPlan:
        """Decide the step."""
        state = self.state
        chosen, num_on_time, limit_s = self._order(self._limit_s())
        if num_on_time:  # its first token comes when the step ends, whatever else is in the step
            first = chosen[0]
            need_s = self.decode_s + float(self.prefill_s[first])
            limit_s = min(limit_s, max(float(self.deadline_s[first]), need_s))
        served, offered, tokens = self._serve(chosen, limit_s)
        has_backlog = len(served) < len(chosen) or tokens < self.new[served].sum()
        lost_run, lost_prefill = self._serve_lost(limit_s, served, tokens, has_backlog)
        if lost_prefill is not None:
            index, lost_tokens, is_alone = lost_prefill
            if is_alone:
                served, offered, tokens = served[:0], offered[:0], 0
            served, tokens = np.append(served, index), tokens + lost_tokens
        is_waiting = served >= self.num_prefills
        run_prefills = self.pending[served[~is_waiting]]
        admit = self.pending[np.concatenate([served[is_waiting], offered])]
        run = np.concatenate([self.alive, self.decodes.rows[lost_run], run_prefills])
        budget = (self.num_alive + len(lost_run)) * state.tokens_per_decode + tokens
        victims = self._make_room(self.pending[served[is_waiting]], lost_run)
        if not len(run) and not len(admit):
            return neutral(state, "stalled")
        runs_all = len(run) == len(state.running) and not len(run_prefills)
        return StepPlan(
            run=None if runs_all and not len(victims) else run,
            admit=admit,
            token_budget=max(1, min(budget, state.max_num_tokens)),
            preempt=victims,
            reject=self._rejected() if self.rejects else state.waiting[:0],
            problem="overload" if num_on_time < len(chosen) else "attain",
        )

    # 1. Deadlines ---------------------------------------------------------------------------

    def _deadlines(self, need_s: FloatArray) -> FloatArray:
        """Time left until each prefill must end, seconds; inf without a target.

        The margin is part of the deadline while the prefill alone can keep it; after that the
        target itself counts.
        """
        table, rows, keep = self.state.table, self.pending, self.keep
        target = table.ttft_s[rows]
        waited = self.state.now_s - table.arrival_s[rows]
        deadline = np.where(need_s <= keep * target - waited, keep * target, target) - waited
        again = table.num_output[rows] > 0
        if again.any():  # preempted after its first token: what counts is TPOT
            back = rows[again]
            first, out = table.first_token_s[back], table.num_output[back]
            tpot = keep * table.tpot_s[back]
            slack = np.where(np.isinf(tpot), 0.0, np.maximum(tpot - self.decode_s, 0.0))
            due = first + tpot * out + slack * (self.state.remaining(back) - 1)
            late = first - table.arrival_s[back] > table.ttft_s[back]
            deadline[again] = np.where(late, -np.inf, due - self.state.now_s)
        result: FloatArray = deadline
        return result

    # 2. Length of the step ------------------------------------------------------------------

    def _limit_s(self) -> float:
        alive = ~self.decodes.lost
        return float(self.decodes.allowed_s[alive].min(initial=np.inf))

    def _order(self, limit_s: float) -> tuple[IntArray, int, float]:
        """Feasible prefills in order, how many are on time, and the limit of the step.

        When they are not all on time, letting the few decodes with the least slack miss theirs
        is weighed against the prefills that a longer step brings in on time.
        """
        candidates = np.flatnonzero(self.feasible)
        if self.rejects:
            waits = candidates >= self.num_prefills
            candidates = candidates[~(waits & self.hopeless[candidates])]
        if not len(candidates):
            return candidates, 0, limit_s
        table = self.state.table
        rank = table.priority[self.pending[candidates]]
        ranks = rank if rank.any() else None
        overhead_s = self.state.cost.chunk_overhead_s if self.num_alive else 0.0
        slots = self._slots(candidates)
        weigh = functools.cache(lambda: self._total_cost(candidates, slots is not None))

        def on_time(limit: float) -> tuple[IntArray, int]:
            share = 1.0
            if not np.isinf(limit):
                share = max(0.02, 1.0 - (self.decode_s + overhead_s) / max(limit, 1e-9))
            return on_time_first(
                self.prefill_s[candidates] / share,
                self.deadline_s[candidates] - self.decode_s,
                weigh,
                ranks,
                slots,
            )

        order, count = on_time(limit_s)
        alive = ~self.decodes.lost
        if count < len(candidates) and self.num_alive:
            longest = self._on_loan_s()
            for limit in (min(2.0 * limit_s, longest), longest):
                if limit > limit_s and count < len(candidates):
                    other, other_count = on_time(limit)
                    if other_count > count:
                        order, count, limit_s = other, other_count, limit
        if count < len(candidates) and self.num_alive > 1:
            allowed = np.sort(self.decodes.allowed_s[alive])
            best = count
            for num_given_up in (1, 2, 4, 8):
                if num_given_up >= min(len(allowed), len(candidates) - count + 1):
                    break
                other, other_count = on_time(float(allowed[num_given_up]))
                if other_count - 2 * num_given_up > best:
                    best = other_count - 2 * num_given_up
                    order, count, limit_s = other, other_count, float(allowed[num_given_up])
        return candidates[order], count, limit_s

    def _slots(self, candidates: IntArray) -> Slots | None:
        """Slots as a resource, where there are fewer than requests that wait for one."""
        state = self.state
        is_needed = candidates >= self.num_prefills
        num_free = state.max_num_running - len(self.rows) + int(self.decodes.lost.sum())
        if np.isnan(state.end_interval_s) or int(is_needed.sum()) <= num_free:
            return None
        return Slots(is_needed, num_free, state.end_interval_s)

    def _usual_s(self) -> float:
        """Time between two tokens of a decode, with the prefills that come in between."""
        share = max(0.1, 1.0 - self.state.prefill_share)
        return self.decode_s / share / self.state.accepted_per_decode

    def _on_loan_s(self) -> float:
        """Longest step after which faster ones will most likely bring all back on course."""
        state, decodes = self.state, self.decodes
        alive = ~decodes.lost
        tpot = self.keep * state.table.tpot_s[self.alive]
        usual_s = self._usual_s()
        num_steps = state.surely_remaining(self.alive, decodes.ahead[alive]) - 1.0
        with np.errstate(invalid="ignore"):  # 0 steps x no target
            payback = np.fmax(num_steps * (tpot - usual_s), 0.0)
        longest = np.maximum(decodes.allowed_s[alive], decodes.bank_s[alive] + payback)
        return float(longest.min())

    def _total_cost(self, index: IntArray, has_slot_cost: bool) -> FloatArray:
        """Accelerator time of each request: its prefill and what its decode adds to steps.

        Where slots are what is short, also its share of the time of all slots.
        """
        cost = self.state.cost
        outputs = self.state.remaining(self.pending[index])
        one = float(cost.decode_s(2.0, 0.0)) - float(cost.decode_s(1.0, 0.0))
        per_ctx = float(cost.decode_s(1.0, 1000.0)) - float(cost.decode_s(1.0, 0.0))
        ctx = self.new[index] + self.has[index] + outputs / 2
        total: FloatArray = self.prefill_s[index] + outputs * (one + per_ctx * ctx / 1000)
        if has_slot_cost:
            total += outputs * (self._usual_s() / self.state.max_num_running)
        return total

    # 3. Prefills of this step ---------------------------------------------------------------

    def _serve(self, chosen: IntArray, limit_s: float) -> tuple[IntArray, IntArray, int]:
        """The first of `chosen` that fit the step.

        Returns:
            Indices served; waiting ones offered beyond them, in case a prefix cache leaves
            budget over; tokens of the chunk.
        """
        state = self.state
        room = state.max_num_tokens - self.num_alive * state.tokens_per_decode
        budget = self._tokens_in(limit_s, room, self.has[chosen[0]]) if len(chosen) else 0
        if not budget or self._is_wasteful(budget, int(chosen[0])):
            return chosen[:0], chosen[:0], 0
        ends = np.cumsum(self.new[chosen])
        num_served = int(np.searchsorted(ends, budget, side="left")) + 1
        candidates = chosen[: num_served + _NUM_SPARE_OFFERS]
        is_admissible = self._admissible(candidates)
        served = candidates[:num_served][is_admissible[:num_served]]
        offered = candidates[num_served:][is_admissible[num_served:]]
        offered = offered[offered >= self.num_prefills]
        return served, offered, int(min(budget, self.new[served].sum()))

    def _is_wasteful(self, budget: int, first: int) -> bool:
        """Whether a chunk is too short for what it costs to have one, and finishes nothing."""
        if not self.num_alive or budget >= self.new[first]:
            return False
        cost = self.state.cost
        chunk_s = cost.prefill_marginal_s(float(budget), float(self.has[first]))
        return chunk_s < _MIN_CHUNK * cost.chunk_overhead_s

    def _tokens_in(self, limit_s: float, room: int, has: float) -> int:
        if room <= 0:
            return 0
        if np.isinf(limit_s):
            return room
        tokens = self.state.cost.max_prefill_tokens(
            limit_s, self.num_alive, int(self.ctx_alive), float(has)
        )
        step = self.tile if tokens >= _MANY_TILES * self.tile else _SUB_TILE
        return int(min(room, tokens // step * step))

    def _admissible(self, candidates: IntArray) -> BoolArray:
        """Mask without the waiting requests for which slots, TPOT or memory leave no room."""
        state, table = self.state, self.state.table
        mask: BoolArray = candidates < self.num_prefills
        places = np.flatnonzero(~mask)
        if not len(places) or self.best_effort.is_blocked:
            return mask
        waiting = candidates[places]
        held = self.decodes.rows[self.decodes.lost]
        slots = state.max_num_running - len(self.rows) + len(held)
        count = min(len(waiting), max(0, slots))
        # New decodes must not make bare decode steps outgrow the targets.
        alive = ~self.decodes.lost
        edge = float(self.decodes.sustain_s[alive].min(initial=np.inf))
        tpot = self.keep * table.tpot_s[self.pending[waiting[:count]]]
        if count:
            edge_s = np.minimum(edge, np.minimum.accumulate(tpot)) * state.accepted_per_decode
            others = self.num_alive + self.num_prefills
            ctx = self.ctx_alive + float((self.new + self.has)[: self.num_prefills].sum())
            grown = state.cost.decode_s(
                others + np.arange(1.0, count + 1),
                ctx + np.cumsum(self.new[waiting[:count]]),
            )
            over = np.flatnonzero(np.asarray(grown) > (1.0 - _ADMISSION_MARGIN) * edge_s)
            if len(over) and others:
                count = int(over[0])
        waiting = waiting[:count]
        need = float(self.new[waiting].sum())
        used = 1.0 - (state.num_free_blocks - need / state.block_size) / max(1, state.num_blocks)
        if used > _MEMORY_THRESHOLD:
            growing = np.concatenate([self.alive, self.rows[~self.is_decode]])
            growth = np.concatenate(
                [
                    self.remaining[self.is_decode][alive],
                    self.remaining[~self.is_decode],
                ]
            )
            count = num_that_fit(state, growing, growth, 0, waiting - self.num_prefills)
        mask[places[:count]] = True
        return mask

    # 4. The lost ----------------------------------------------------------------------------

    def _rejected(self) -> IntArray:
        """Waiting requests that had a TTFT target and can no longer meet it."""
        rejected: IntArray = self.state.waiting[self.hopeless[self.num_prefills :]]
        return rejected

    def _serve_lost(
        self, limit_s: float, served: IntArray, tokens: int, has_backlog: bool
    ) -> tuple[IntArray, tuple[int, int, bool] | None]:
        """Lost requests for this step, strictly in the order of arrival.

        What the others leave over is free; beyond that a lost request spends the credit. A
        prefill paid by credit takes the whole chunk of a step.

        Returns:
            Lost decodes to run, as indices; a prefill as (index, tokens, is_alone) or None.
        """
        state, table, credit = self.state, self.state.table, self.best_effort
        was_blocked, credit.is_blocked = credit.is_blocked, False
        is_lost = ~self.feasible
        if self.rejects:
            is_lost[self.num_prefills :] &= ~self.hopeless[self.num_prefills :]
        prefills = np.flatnonzero(is_lost)
        decodes = np.flatnonzero(self.decodes.lost)
        if not len(prefills) and not len(decodes):
            credit.forget()
            return decodes, None
        credit.earn(state.elapsed_s)
        cost = state.cost
        spare_s = 0.0
        if not has_backlog:
            spare_s = limit_s - self.decode_s
            spare_s -= float(cost.prefill_marginal_s(float(tokens), 0.0)) if tokens else 0.0
        room = state.max_num_tokens - self.num_alive * state.tokens_per_decode
        # What each lost decode adds to the step.
        two = np.full(len(decodes), 2.0)
        added_s = cost.decode_s(two, self.decodes.ctx[decodes]) - cost.decode_s(1.0, 0.0)
        arrival = table.arrival_s[self.decodes.rows[decodes]]
        # Nobody passes the oldest lost prefill, so only the decodes before it count.
        oldest = -1
        if len(prefills):
            prefill_arrival = table.arrival_s[self.pending[prefills]]
            oldest = int(np.argmin(prefill_arrival))
            before = arrival <= prefill_arrival[oldest]
            decodes, added_s, arrival = decodes[before], added_s[before], arrival[before]
        order = np.argsort(arrival, kind="stable")
        num_run, spare_used_s = 0, 0.0
        for added in added_s[order].tolist():
            if added <= spare_s:
                spare_s -= added
                spare_used_s += added
            elif credit.credit_s > 0:
                credit.credit_s -= added
            else:
                break
            num_run += 1
        run = decodes[order[:num_run]]
        room -= num_run * state.tokens_per_decode
        index = int(prefills[oldest]) if oldest >= 0 else -1
        if index >= 0 and not self._has_room(index, run):
            # Once it has waited long enough to fill its credit, room is kept for it. What others
            # get from slack in the meantime does not count.
            credit.is_blocked = was_blocked or credit.is_full
            started = prefills[prefills < self.num_prefills]
            if num_run < len(order) or not len(started):
                return run, None
            index = int(started[np.argmin(table.arrival_s[self.pending[started]])])
            num_tokens = self._from_slack(index, spare_s, room, served, tokens)
            return run, (index, num_tokens, False) if num_tokens else None
        credit.received(spare_used_s)
        if num_run < len(order) or index < 0:
            return run, None
        return run, self._lost_prefill(index, limit_s, spare_s, room, served, tokens)

    def _from_slack(
        self, index: int, spare_s: float, room: int, served: IntArray, served_tokens: int
    ) -> int:
        """Tokens of a lost request that what others leave over pays for."""
        if spare_s <= 0:
            return 0
        need, has = int(self.new[index]), float(self.has[index])
        tokens = min(need, self._tokens_in(self.decode_s + spare_s, room - served_tokens, has))
        # vLLM serves running requests before waiting ones: a long one must not take the chunk of
        # those admitted beside it.
        overtakes = index < self.num_prefills and bool((served >= self.num_prefills).any())
        return tokens if tokens == need or not overtakes else 0

    def _lost_prefill(
        self,
        index: int,
        limit_s: float,
        spare_s: float,
        room: int,
        served: IntArray,
        served_tokens: int,
    ) -> tuple[int, int, bool] | None:
        """The chunk of one lost request: from what is left over, else alone and on credit."""
        credit, need, has = self.best_effort, int(self.new[index]), float(self.has[index])
        tokens = self._from_slack(index, spare_s, room, served, served_tokens)
        if tokens:
            credit.received(float(self.state.cost.prefill_marginal_s(float(tokens), has)))
            return index, tokens, False
        tokens = min(need, self._tokens_in(limit_s, room, has))
        if not tokens and credit.is_full:
            tokens = min(need, self.tile)
        seconds = float(self.state.cost.prefill_marginal_s(float(tokens), has))
        if not tokens or (credit.credit_s < seconds and not credit.is_full):
            return None
        credit.credit_s -= seconds
        return index, tokens, True

    def _has_room(self, index: int, lost_run: IntArray) -> bool:
        """Whether slot and memory can be had for a lost request, from decodes that sit out."""
        if index < self.num_prefills:
            return True
        state = self.state
        held = self.decodes.lost.copy()
        held[lost_run] = False
        free = state.num_free_blocks + int(self.decodes.ctx[held].sum()) // state.block_size
        slots = state.max_num_running - len(self.rows) + int(held.sum())
        return slots > 0 and free > self.new[index] / state.block_size + 1

    # Room -----------------------------------------------------------------------------------

    def _make_room(self, admit: IntArray, lost_run: IntArray) -> IntArray:
        """Preempt held lost decodes, youngest first, for the slots and blocks this step needs."""
        state, table = self.state, self.state.table
        victims = self.victims
        is_held = self.decodes.lost.copy()
        is_held[lost_run] = False
        if not is_held.any():
            return victims
        held, decoding = self.decodes.rows[is_held], self.decodes.rows[~is_held]
        tokens = table.num_prompt[decoding] + table.num_output[decoding]
        blocks = int((tokens % state.block_size == 0).sum())
        blocks += int(np.ceil(table.prefill_target[admit] / state.block_size).sum()) + 1
        num_slots = len(admit) - (state.max_num_running - len(self.rows))
        short = blocks - state.num_free_blocks
        chosen: list[int] = []
        for row in held[np.argsort(-table.arrival_s[held], kind="stable")].tolist():
            if num_slots <= 0 and short <= 0:
                break
            chosen.append(row)
            num_slots -= 1
            size = int(table.num_prompt[row] + table.num_output[row])
            short -= -(-size // state.block_size)
        return np.concatenate([victims, np.asarray(chosen, dtype=np.int64)])
