"""`policy="attain"`: as many requests as possible meet both of their SLOs.

SOLA (Hong et al., MLSys 2025) minimizes the worst latency. Under overload "worst first" spends
the accelerator on requests that are lost already and loses others with them. This planner keeps
SOLA's means - order, chunk size, peak memory, a cost model corrected online - and changes the
objective to the number of requests that meet both targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sola_sched.config import SolaConfig
from sola_sched.planner.base import neutral, num_that_fit, priority_victims
from sola_sched.planner.deadlines import on_time_first
from sola_sched.state import DECODE, BoolArray, FloatArray, IntArray, StepPlan, StepState

#: A decode counts as lost only if it misses its target by more than this share of the step time:
#: predictions of the step time are a few per cent off.
_GIVE_UP_MARGIN = 0.9
#: Share of the step time that new decodes may not fill: prefills come in between.
_ADMISSION_MARGIN = 0.1
#: Best-effort credit never exceeds this many seconds: no burst of lost requests.
_MAX_CREDIT_S = 0.5
#: KV use above which admission predicts the peak.
_MEMORY_THRESHOLD = 0.5
#: Chunks smaller than a tile come in multiples of this.
_SUB_TILE = 16


@dataclass(slots=True)
class _Decodes:
    """The decoding requests of a step, all arrays aligned."""

    rows: IntArray
    ctx: IntArray  # KV tokens
    bank_s: FloatArray  # longest next step that keeps the mean TPOT within its target
    sustain_s: FloatArray  # longest mean step that still meets TPOT at the predicted end
    allowed_s: FloatArray  # longest next step after which TPOT can still be met
    lost: BoolArray


class AttainPlanner:
    """Feasible first, the lost held, cheapest first when not all fit, chunks to the slack.

    Each step:

    1. *Who is lost?* A decode that missed TTFT, or whose TPOT cannot be met any more even if
       every further step were a bare decode step; a waiting request whose deadline lies before
       the end of its own prefill. Lost decodes are held: they keep their KV and sit out.
    2. *How long may the step be?* The shortest time that keeps every other decode on course:
       the j-th token after the first is due at ``first + j * tpot``, so fast steps put time in
       the bank and a long prefill chunk may spend it (SOLA Eq. 1 with the bank of a request in
       place of its current mean). If that is too short for the prefills to be on time, the
       few decodes in the way are weighed against the prefills they would cost.
    3. *Which prefills?* Moore-Hodgson over the deadlines: the largest set that can be on time,
       the costliest given up first. Admission stops where decode steps would outgrow the TPOT
       targets, where slots end or where the predicted peak memory does (SOLA 5.1).
    4. *The lost* get what is left over, and a guaranteed `best_effort_share` of engine time;
       the one that arrived first is always next. Requests without a TTFT target count here.

    Args:
        config: `tile`, `safety`, `best_effort_share` and `overload` are used.
    """

    def __init__(self, config: SolaConfig) -> None:
        self.tile = config.tile
        self.keep = 1.0 - config.safety
        self.share = config.best_effort_share
        self.rejects = config.overload == "reject"
        self.credit_s = 0.0

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step; see `Planner.plan`."""
        if not state.cost.is_ready or not state.has_slo:
            return neutral(state)
        victims = priority_victims(state)
        rows, remaining, ahead = state.running, state.remaining, state.num_ahead
        if len(victims):
            stay = ~np.isin(rows, victims)
            rows, remaining, ahead = rows[stay], remaining[stay], ahead[stay]
        table = state.table
        is_decode = table.phase[rows] == DECODE
        self.credit_s = min(_MAX_CREDIT_S, self.credit_s + self.share * state.elapsed_s)
        if not len(state.waiting) and is_decode.all() and self._all_on_course(state, rows):
            return StepPlan(preempt=victims, problem="decode")
        decodes = self._decodes(state, rows[is_decode], remaining[is_decode], ahead[is_decode])
        return _Step(self, state, decodes, rows, is_decode, remaining, victims).plan()

    def _all_on_course(self, state: StepState, rows: IntArray) -> bool:
        """Nothing competes and a bare decode step suits every target: nothing to decide."""
        table = state.table
        if not len(rows):
            return True
        ctx = int(table.num_prompt[rows].sum() + table.num_output[rows].sum())
        step_s = float(state.cost.decode_s(len(rows), ctx))
        return step_s <= self.keep * float(table.tpot_s[rows].min()) * state.accepted_per_decode

    def _decodes(
        self, state: StepState, rows: IntArray, remaining: FloatArray, ahead: IntArray
    ) -> _Decodes:
        table = state.table
        out = np.maximum(table.num_output[rows] + ahead, 1)
        ctx = table.num_prompt[rows] + out
        known = table.first_token_s[rows]
        first = np.where(np.isnan(known), state.now_s, known)
        tpot = table.tpot_s[rows] * self.keep
        per_step = state.accepted_per_decode
        bank = first + tpot * (out - 1 + per_step) - state.now_s
        steps = np.maximum(remaining / per_step, 1.0)
        with np.errstate(invalid="ignore"):
            end = bank + (steps - 1.0) * (per_step * tpot)
        sustain = end / steps
        late = first - table.arrival_s[rows] > table.ttft_s[rows]
        lost = late | self._too_slow(state, ctx, sustain, late)
        alive = ~lost
        decode_s = float(state.cost.decode_s(int(alive.sum()), float(ctx[alive].sum())))
        # One behind its schedule catches up by steps halfway to what it could bear for long.
        behind = decode_s + 0.5 * np.maximum(sustain - decode_s, 0.0)
        allowed = np.where(bank >= behind, bank, np.minimum(behind, tpot * per_step))
        return _Decodes(rows, ctx, bank, sustain, allowed, lost)

    @staticmethod
    def _too_slow(
        state: StepState, ctx: IntArray, sustain: FloatArray, late: BoolArray
    ) -> BoolArray:
        """The largest set of decodes whose bare steps are short enough for all its members."""
        lost = np.zeros(len(ctx), dtype=bool)
        order = np.flatnonzero(~late)
        if not len(order):
            return lost
        total = float(state.cost.decode_s(len(order), float(ctx[order].sum())))
        if total * _GIVE_UP_MARGIN <= float(sustain[order].min()):
            return lost
        order = order[np.argsort(-sustain[order], kind="stable")]
        step_s = state.cost.decode_s(
            np.arange(1.0, len(order) + 1), np.cumsum(ctx[order]).astype(np.float64)
        )
        fits = np.flatnonzero(step_s * _GIVE_UP_MARGIN <= sustain[order])
        lost[order[(fits[-1] + 1 if len(fits) else 0) :]] = True
        return lost


class _Step:
    """One step's decision; holds what its parts share."""

    def __init__(
        self,
        planner: AttainPlanner,
        state: StepState,
        decodes: _Decodes,
        rows: IntArray,
        is_decode: BoolArray,
        remaining: FloatArray,
        victims: IntArray,
    ) -> None:
        self.planner, self.state, self.decodes = planner, state, decodes
        self.rows, self.is_decode, self.remaining = rows, is_decode, remaining
        self.victims: list[IntArray] = [victims]
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
        self.deadline_s = self._deadlines()
        self.feasible = np.isfinite(self.deadline_s) & (
            self.decode_s + self.prefill_s <= self.deadline_s
        )

    def plan(self) -> StepPlan:
        state, planner = self.state, self.planner
        limit_s = self._limit_s()
        chosen, num_on_time, limit_s = self._order(limit_s)
        rejected = state.waiting[:0]
        if planner.rejects:
            rejected = self._rejected()
        served, tokens, prefill_s = self._serve(chosen, limit_s)
        lost_decodes, lost_prefill, lost_tokens = self._best_effort(
            limit_s, prefill_s, len(served) > 0, bool(len(chosen) > len(served))
        )
        if lost_prefill is not None and not lost_prefill[1]:
            served, tokens = np.asarray([lost_prefill[0]]), lost_tokens
        elif lost_prefill is not None:
            served = np.append(served, lost_prefill[0])
            tokens += lost_tokens
        is_waiting = served >= self.num_prefills
        run_prefills = self.pending[served[~is_waiting]]
        admit = self.pending[served[is_waiting]]
        run = np.concatenate([self.alive, lost_decodes, run_prefills])
        num_decodes = self.num_alive + len(lost_decodes)
        budget = num_decodes * state.tokens_per_decode + tokens
        victims = self._make_room(run, admit, lost_decodes)
        if not len(run) and not len(admit):
            return neutral(state, "stalled")
        if len(run) == len(state.running) and not len(victims):
            run_or_all = None if not len(run_prefills) else run
        else:
            run_or_all = run
        return StepPlan(
            run=run_or_all,
            admit=admit,
            token_budget=int(np.clip(budget, 1, state.max_num_tokens)),
            preempt=victims,
            reject=rejected,
            problem="overload" if num_on_time < len(chosen) else "attain",
        )

    # 1. Deadlines ---------------------------------------------------------------------------

    def _deadlines(self) -> FloatArray:
        """Time left until each prefill must end, seconds; inf without a target."""
        table, rows, keep = self.state.table, self.pending, self.planner.keep
        deadline = table.arrival_s[rows] + keep * table.ttft_s[rows] - self.state.now_s
        again = table.num_output[rows] > 0
        if again.any():  # preempted after its first token: what counts is TPOT
            back = rows[again]
            first, out = table.first_token_s[back], table.num_output[back]
            remaining = np.concatenate(
                [self.remaining[~self.is_decode], self.state.waiting_output]
            )[again]
            slack = np.maximum(keep * table.tpot_s[back] - self.decode_s, 0.0)
            due = first + keep * table.tpot_s[back] * out + slack * (remaining - 1)
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
        if not len(candidates):
            return candidates, 0, limit_s
        table = self.state.table
        rank = table.priority[self.pending[candidates]]
        ranks = rank if rank.any() else None
        cost = self._total_cost(candidates)

        def on_time(limit: float) -> tuple[IntArray, int]:
            share = 1.0 if np.isinf(limit) else max(0.02, 1.0 - self.decode_s / max(limit, 1e-9))
            return on_time_first(
                self.prefill_s[candidates] / share,
                self.deadline_s[candidates] - self.decode_s,
                cost,
                ranks,
            )

        order, count = on_time(limit_s)
        if count < len(candidates) and self.num_alive > 1:
            allowed = np.sort(self.decodes.allowed_s[~self.decodes.lost])
            best = count
            for num_given_up in (1, 2, 4, 8):
                if num_given_up >= min(len(allowed), len(candidates) - count + 1):
                    break
                other, other_count = on_time(float(allowed[num_given_up]))
                if other_count - 2 * num_given_up > best:
                    best = other_count - 2 * num_given_up
                    order, count, limit_s = other, other_count, float(allowed[num_given_up])
        return candidates[order], count, limit_s

    def _total_cost(self, index: IntArray) -> FloatArray:
        """Accelerator time of each request: its prefill and what its decode adds to steps."""
        cost = self.state.cost
        outputs = np.concatenate([self.remaining[~self.is_decode], self.state.waiting_output])
        one = float(cost.decode_s(2.0, 0.0)) - float(cost.decode_s(1.0, 0.0))
        per_ctx = float(cost.decode_s(1.0, 1000.0)) - float(cost.decode_s(1.0, 0.0))
        ctx = self.new[index] + self.has[index] + outputs[index] / 2
        total: FloatArray = self.prefill_s[index] + outputs[index] * (one + per_ctx * ctx / 1000)
        return total

    # 3. Prefills of this step ---------------------------------------------------------------

    def _serve(self, chosen: IntArray, limit_s: float) -> tuple[IntArray, int, float]:
        """The first of `chosen` that fit the step: (indices, tokens, seconds)."""
        if not len(chosen):
            return chosen, 0, 0.0
        state = self.state
        room = state.max_num_tokens - self.num_alive * state.tokens_per_decode
        budget = self._tokens_in(limit_s, room, self.has[chosen[0]])
        ends = np.cumsum(self.new[chosen])
        served = chosen[: int(np.searchsorted(ends, budget, side="left")) + 1] if budget else (
            chosen[:0]
        )
        served = self._admissible(served)
        if not len(served):
            return served, 0, 0.0
        tokens = int(min(budget, self.new[served].sum()))
        return served, tokens, float(state.cost.prefill_marginal_s(float(tokens), 0.0))

    def _tokens_in(self, limit_s: float, room: int, has: float) -> int:
        if room <= 0:
            return 0
        if np.isinf(limit_s):
            return room
        tokens = self.state.cost.max_prefill_tokens(
            limit_s, self.num_alive, int(self.ctx_alive), float(has)
        )
        step = self.planner.tile if tokens >= self.planner.tile else _SUB_TILE
        return int(min(room, tokens // step * step))

    def _admissible(self, served: IntArray) -> IntArray:
        """Drop the waiting requests for which slots, TPOT or memory leave no room."""
        state, table = self.state, self.state.table
        waiting = served[served >= self.num_prefills]
        if not len(waiting):
            return served
        held = self.decodes.rows[self.decodes.lost]
        slots = state.max_num_running - len(self.rows) + len(held)
        count = min(len(waiting), max(0, slots))
        # New decodes must not make bare decode steps outgrow the targets.
        alive = ~self.decodes.lost
        edge = float(self.decodes.sustain_s[alive].min(initial=np.inf))
        tpot = self.planner.keep * table.tpot_s[self.pending[waiting[:count]]]
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
            waiting = waiting[
                : num_that_fit(state, growing, growth, 0, waiting - self.num_prefills)
            ]
        return np.concatenate([served[served < self.num_prefills], waiting])

    # 4. The lost ----------------------------------------------------------------------------

    def _rejected(self) -> IntArray:
        state, table = self.state, self.state.table
        deadline = self.deadline_s[self.num_prefills :]
        hopeless = np.isfinite(deadline) & ~self.feasible[self.num_prefills :]
        return state.waiting[hopeless & (table.num_output[state.waiting] == 0)]

    def _best_effort(
        self, limit_s: float, prefill_s: float, has_service: bool, has_backlog: bool
    ) -> tuple[IntArray, tuple[int, bool] | None, int]:
        """Lost requests for this step, oldest first.

        Returns:
            Decode rows to run; a prefill as (index in pending, whether beside the feasible
            ones) or None; its tokens.
        """
        state, table, planner = self.state, self.state.table, self.planner
        none = self.rows[:0]
        lost_prefills = np.flatnonzero(~self.feasible)
        if planner.rejects:
            rejected = set(self._rejected().tolist())
            lost_prefills = np.asarray(
                [i for i in lost_prefills if int(self.pending[i]) not in rejected], dtype=np.int64
            )
        lost_decodes = np.flatnonzero(self.decodes.lost)
        if not len(lost_prefills) and not len(lost_decodes):
            return none, None, 0
        spare_s = 0.0 if has_backlog else limit_s - self.decode_s - prefill_s
        arrival = np.concatenate(
            [table.arrival_s[self.decodes.rows[lost_decodes]], table.arrival_s[
                self.pending[lost_prefills]]]
        )
        run: list[int] = []
        cost = state.cost
        one = float(cost.decode_s(2.0, 0.0)) - float(cost.decode_s(1.0, 0.0))
        room = state.max_num_tokens - self.num_alive * state.tokens_per_decode
        for position in np.argsort(arrival, kind="stable").tolist():
            if position < len(lost_decodes):
                index = int(lost_decodes[position])
                per_ctx = float(cost.decode_s(1.0, float(self.decodes.ctx[index])))
                added = one + per_ctx - float(cost.decode_s(1.0, 0.0))
                if added <= spare_s:
                    spare_s -= added
                elif planner.credit_s > 0:
                    planner.credit_s -= added
                else:
                    break
                run.append(index)
                continue
            index = int(lost_prefills[position - len(lost_decodes)])
            if index >= self.num_prefills and not self._has_room(index):
                break
            need = int(self.new[index])
            spare_tokens = self._tokens_in(self.decode_s + spare_s, room, self.has[index])
            if not has_backlog and spare_s > 0 and spare_tokens > 0:
                tokens = min(need, spare_tokens)
                return self.decodes.rows[run], (index, has_service), tokens
            tokens = min(need, self._tokens_in(limit_s, room, self.has[index]) or self.planner.tile)
            seconds = float(cost.prefill_marginal_s(float(tokens), float(self.has[index])))
            if planner.credit_s < min(seconds, _MAX_CREDIT_S):
                break
            planner.credit_s -= seconds
            return self.decodes.rows[run], (index, False), tokens
        return self.decodes.rows[run], None, 0

    def _has_room(self, index: int) -> bool:
        """Whether slot and memory can be had for a lost waiting request."""
        state = self.state
        held = self.decodes.lost
        free = state.num_free_blocks + int(self.decodes.ctx[held].sum()) // state.block_size
        slots = state.max_num_running - len(self.rows) + int(held.sum())
        return slots > 0 and free > self.new[index] / state.block_size + 1

    # Room -----------------------------------------------------------------------------------

    def _make_room(self, run: IntArray, admit: IntArray, lost_run: IntArray) -> IntArray:
        """Preempt held lost decodes, youngest first, for the slots and blocks this step needs."""
        state, table = self.state, self.state.table
        victims = self.victims[0]
        held = self.decodes.rows[self.decodes.lost]
        held = held[~np.isin(held, lost_run)]
        if not len(held):
            return victims
        decoding = np.concatenate([self.alive, lost_run])
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
