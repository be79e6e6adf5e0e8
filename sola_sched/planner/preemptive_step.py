"""One step of a preemptive order: who holds KV, who is displaced, whose prompt is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import (
    DECODE,
    BoolArray,
    FloatArray,
    IntArray,
    StepPlan,
    StepState,
    blocks_of_step,
)
from sola_sched.cost.execution import ExecutionTime

#: Tokens that running requests are given room for before another is admitted, unless one of them
#: will have ended sooner: by its prediction, or after so many times the mean time between ends.
#: Planning for their peak leaves memory idle that a displaced request can give back.
_HORIZON_TOKENS = 64.0
_HORIZON_ENDS = 2.0
#: Requests displaced in one step, at most.
_MAX_VICTIMS = 8
#: Displacing one must save so many times what it costs to compute its KV again.
MIN_GAIN = 2.0
#: Share of the engine time for computing displaced KV again, and the most that is saved up.
_RECOMPUTE_SHARE = 0.1
_MAX_CREDIT_S = 2.0
#: A chunk has so many tokens, or what stretches the step of the decodes by so much if that is
#: more: what runs has less to do than what starts, and most of all the delay of its decodes counts.
_MIN_CHUNK = 512
_MAX_STRETCH = 1.25
_TILE = 16
#: Below every class.
_NO_CLASS = np.iinfo(np.int64).max
#: A plan that decided nothing new is kept for so many steps while nobody comes or goes, at most.
_REVIEW_STEPS = 8


@dataclass(slots=True)
class Recompute:
    """Engine time that may be spent on computing displaced KV again.

    Without a bound, requests whose lengths are hardly known displace each other until a third of
    the engine's time goes into computing their KV again.

    Attributes:
        credit_s: Earned and not yet spent, seconds; displacing waits while it is < 0.
    """

    credit_s: float = 0.0

    def earn(self, elapsed_s: float) -> None:
        """Book the share of the engine time that has passed."""
        self.credit_s = min(_MAX_CREDIT_S, self.credit_s + _RECOMPUTE_SHARE * elapsed_s)

    def spend(self, seconds: float) -> None:
        """Book what will be computed again."""
        self.credit_s -= seconds


class PreemptiveStep:
    """One step's decision; arrays are aligned with `rows` unless they say otherwise.

    Attributes:
        holds, is_decode: Who has a slot, and who decodes.
        goes_on: Who decodes in the step: the others sit it out for prompts of higher classes.
        most, room: Prefill tokens that the step has time for, and those that it has; set by `plan`.
        left: Predicted output tokens left, after those in flight.
        new, ctx: Prompt tokens to compute, 0 for a decode; tokens of prompt and output.
        chunk: Of `new`, what one step may compute.
        time: Execution times of requests in this engine.
        order: Places in `rows` in the order of service; set by who decides it.
        promote_s: Seconds until aging puts each first, likewise.
        num_settled: Steps for which the plan may be kept after this one; set by `plan`.

    Args:
        state: What is to be planned.
        rows: All running rows, then all waiting ones.
        batch: Mean number of decodes in a step, >= 1.
        again: Account of the time spent on computing KV again.
    """

    order: IntArray
    promote_s: FloatArray

    def __init__(self, state: StepState, rows: IntArray, batch: float, again: Recompute) -> None:
        self.state, self.rows, table = state, rows, state.table
        self.again = again
        num_running = len(state.running)
        self.holds: BoolArray = np.arange(len(rows)) < num_running
        self.is_decode = self.holds & (table.phase[rows] == DECODE)
        ahead = np.zeros(len(rows), dtype=np.int64)
        ahead[:num_running] = state.num_ahead
        self.left = state.remaining(rows, ahead)
        new = np.maximum(table.prefill_target[rows] - table.num_computed[rows], 1)
        self.new = np.where(self.is_decode, 0, new).astype(np.float64)
        self.chunk = self.new if state.max_chunk is None else np.minimum(self.new, state.max_chunk)
        self.ctx = np.maximum(table.num_prompt[rows] + table.num_output[rows] + ahead, 1)
        self.time = ExecutionTime.of(state.cost, batch)
        self.num_settled = 0
        self.goes_on = self.is_decode

    def _gives_way(self, holder: int, other: int) -> bool:
        """Whether a running request is to be displaced by a waiting one; these are places."""
        priority = self.state.table.priority[self.rows]
        if priority[other] != priority[holder]:
            return bool(priority[other] < priority[holder])
        return self.again.credit_s >= 0.0 and self._gains(holder, other)

    def _gains(self, holder: int, other: int) -> bool:
        """Whether that is worth it, within a priority."""
        raise NotImplementedError

    def plan(self) -> StepPlan:
        """Decide the step."""
        state, rows, order = self.state, self.rows, self.order
        kept = order[self.holds[order]]
        pending = self._chunk(order)
        wanted = pending[~self.holds[pending]]
        count, victims = self._admitted(kept, wanted)
        admit = wanted[:count]
        kept = kept[~np.isin(kept, victims)] if len(victims) else kept
        started = pending[self.holds[pending]]
        # vLLM serves running requests first: the last prefill, cut short, must not be one of them.
        if len(admit) and len(started) and pending[-1] == started[-1]:
            started = started[:-1]
        if self.goes_on is not self.is_decode:  # not for those that find no room
            self._hold_lower(order, np.concatenate([started, admit]))
        is_in = self.goes_on.copy()
        is_in[started] = True
        run = kept[is_in[kept]]
        run, victims = self._with_room(run, kept, admit, victims)
        if state.num_free_blocks > len(state.running) * state.tokens_per_decode:
            # vLLM takes from nobody, so the order of decodes decides nothing: left as it is, the
            # engine's loop over them finds their objects in the processor's caches.
            is_decode = self.is_decode[run]
            run = np.concatenate([np.sort(run[is_decode]), run[~is_decode]])
        if len(victims):
            self.again.spend(self._again_s(victims))
        if not len(run) and not len(admit):
            return StepPlan(problem="stalled")
        num_tokens = float(self.chunk[started].sum() + self.chunk[admit].sum())
        self.num_settled = self._num_settled(run, started, len(admit) + len(victims))
        return StepPlan(
            run=rows[run],
            admit=rows[admit],
            token_budget=self._budget(num_tokens),
            preempt=rows[victims],
            order=rows[order],
            promote_s=self.promote_s[order],
        )

    def _num_settled(self, run: IntArray, started: IntArray, num_changes: int) -> int:
        """Further steps in which the same plan does the same, if nobody comes or goes."""
        if num_changes:
            return 0
        if not len(started):
            return _REVIEW_STEPS if len(run) == len(self.state.running) else 0
        if len(started) > 1:
            return 0
        # The chunks that leave more than one chunk to do.
        most = min(self.room, self.state.max_chunk or self.room)
        num_chunks = math.ceil(float(self.new[started[0]]) / max(1, most))
        return min(_REVIEW_STEPS, max(0, num_chunks - 2))

    # Prefills -------------------------------------------------------------------------------

    def _chunk(self, order: IntArray) -> IntArray:
        """Prefills that the step has tokens for, in order; the last one may not fit whole."""
        pending = order[~self.is_decode[order]]
        self.most = self._most()
        self.room = min(self._left_over(), self.most)
        has_classes = self.state.has_classes and len(pending) > 0
        if has_classes and self.room < min(self.most, self.chunk[pending].sum()):
            self._hold_lower(order, pending)
        if not len(pending) or self.room <= 0:
            none: IntArray = pending[:0]
            return none
        ends = np.cumsum(self.chunk[pending])
        chosen: IntArray = pending[: int(np.searchsorted(ends, self.room, side="left")) + 1]
        return chosen

    def _hold_lower(self, order: IntArray, prefills: IntArray) -> None:
        """Let decodes of lower classes sit out so that prefills find tokens, as few as possible.

        Prompts end in as many steps as without them. The lowest class sits out first, and of a
        class those that would be served last.
        """
        state, table = self.state, self.state.table
        left_over, per_decode, num_held = self._left_over(), state.tokens_per_decode, 0
        decodes = order[self.is_decode[order]]
        priority, others = table.priority[self.rows[decodes]], table.priority[self.rows[prefills]]
        for lowest in np.unique(priority[priority > others.min(initial=_NO_CLASS)]):
            uppers = prefills[others < lowest]
            uppers = uppers if state.chunks_prefills else uppers[:1]
            num_lower = int(np.count_nonzero(priority >= lowest))
            most = left_over + num_lower * per_decode
            most = min(most, self.most, int(self.chunk[uppers].sum()))
            if most > 0:
                new = int(self.new[uppers].sum())
                lacking = math.ceil(new / math.ceil(new / most)) - left_over
                num_held = max(num_held, min(num_lower, math.ceil(lacking / per_decode)))
        self.goes_on = self.is_decode
        if num_held:
            self.goes_on = self.is_decode.copy()
            self.goes_on[decodes[-num_held:]] = False
        self.room = min(left_over + num_held * per_decode, self.most)

    def _left_over(self) -> int:
        """Tokens that the decodes of the step leave over, if all take part."""
        state = self.state
        num_decodes = int(np.count_nonzero(self.is_decode))
        return state.max_num_tokens - num_decodes * state.tokens_per_decode

    def _most(self) -> int:
        """Prefill tokens that the step has time for."""
        state = self.state
        num_decodes = int(np.count_nonzero(self.is_decode))
        if not num_decodes:
            return state.max_num_tokens
        ctx = float(self.ctx[self.is_decode].sum())
        limit_s = _MAX_STRETCH * float(state.cost.decode_s(float(num_decodes), ctx))
        tokens = state.cost.max_prefill_tokens(limit_s, num_decodes, ctx, 0.0)
        return max(_MIN_CHUNK, int(tokens) // _TILE * _TILE)

    def _budget(self, num_tokens: float) -> int | None:
        num_decodes = int(np.count_nonzero(self.goes_on)) * self.state.tokens_per_decode
        budget = num_decodes + int(min(num_tokens, self.room))
        return max(1, min(budget, self.state.max_num_tokens))

    # Slots and memory -----------------------------------------------------------------------

    def _admitted(self, kept: IntArray, wanted: IntArray) -> tuple[int, IntArray]:
        """How many of `wanted`, from the front, find a slot and blocks, and who gives way."""
        count = self._num_that_fit(kept, wanted, 0)
        num_victims = 0
        for tried in range(1, min(_MAX_VICTIMS, len(kept)) + 1):
            if count == len(wanted) or not self._gives_way(int(kept[-tried]), int(wanted[count])):
                break
            more = self._num_that_fit(kept, wanted, tried)
            if more > count:
                count, num_victims = more, tried
        return count, kept[len(kept) - num_victims :][::-1]

    def _again_s(self, index: IntArray) -> float:
        """Time to get the KV of these back, by computing it or from host memory, seconds."""
        tokens = self._held_tokens(index).astype(np.float64)
        seconds = np.asarray(self.state.cost.prefill_marginal_s(tokens, 0.0))
        reload_s = self.state.reload_s_per_token
        if reload_s is not None and math.isfinite(reload_s):
            seconds = np.minimum(seconds, tokens * reload_s)
        return float(seconds.sum())

    def _num_that_fit(self, kept: IntArray, wanted: IntArray, num_victims: int) -> int:
        """How many of `wanted` may start when the last `num_victims` of `kept` give way."""
        state, size = self.state, self.state.block_size
        stay = kept[: len(kept) - num_victims]
        gone = kept[len(kept) - num_victims :]
        wanted = wanted[: max(0, state.max_num_running - len(stay))]
        if not len(wanted):
            return 0
        free = float(state.num_free_soon) + float((self._held_tokens(gone) // size).sum())
        # Those that stay finish their prefill and grow until one of them ends.
        free -= float(self.new[stay].sum()) / size
        if len(stay):
            left = self.left[stay]
            first_end = _HORIZON_ENDS * float(left.mean()) / len(stay)
            grows = min(_HORIZON_TOKENS, float(left.min()), first_end)
            free -= float(np.minimum(left, grows).sum()) / size
        target = state.table.prefill_target[self.rows[wanted]]
        ends = np.cumsum(np.ceil((target + 1.0) / size))
        count = int(np.searchsorted(ends, free, side="right"))
        return max(count, 1) if not len(stay) else count

    def _held_tokens(self, index: IntArray) -> IntArray:
        table = self.state.table
        return np.where(
            self.is_decode[index], self.ctx[index], table.num_computed[self.rows[index]]
        )

    def _with_room(
        self, run: IntArray, kept: IntArray, admit: IntArray, victims: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Displace from the end of the order until this step's own blocks are free.

        vLLM would do so itself, but among those that it sees: never one that is held.
        """
        state, size = self.state, self.state.block_size
        growing = run[self.is_decode[run]]
        need = int(blocks_of_step(self.ctx[growing], state.tokens_per_decode, size).sum())
        tokens = np.minimum(self.new[admit].sum() + self.new[run].sum(), self.room)
        need += int(np.ceil(tokens / size)) + len(admit) + 1
        short = need - state.num_free_soon - int((self._held_tokens(victims) // size).sum())
        num_more = 0
        while short > 0 and num_more < len(kept) - 1:
            num_more += 1
            short -= int(self._held_tokens(kept[-num_more : len(kept) - num_more + 1])[0]) // size
        if not num_more:
            return run, victims
        more = kept[len(kept) - num_more :][::-1]
        return run[~np.isin(run, more)], np.concatenate([victims, more])
