"""What `policy="attain"` knows of the requests of a step, and its account for the lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sola_sched.state import BoolArray, FloatArray, IntArray, StepState

#: A decode counts as lost only if it misses its target by more than this share of the step time:
#: predictions of the step time are a few per cent off.
_DECODE_MARGIN = 0.9
#: A prefill counts as lost only if it misses its deadline by more than this share of its time.
_PREFILL_MARGIN = 0.95
#: Chunks of fewer than so many tiles come in smaller multiples: what rounding down to a tile
#: leaves out would be a large share of them.
_MANY_TILES = 8
_SUB_TILE = 16
#: Tokens and times are turned into each other and back.
_ROUNDING = 1.0 + 1e-6
#: Steps of a request that is predicted to end with the next one: with one step exactly, 0 further
#: steps x no target would have no value.
_ONE_STEP = 1.0 + 1e-9
#: Best-effort credit never exceeds this many seconds: no burst of lost requests.
_MAX_CREDIT_S = 0.5


@dataclass(slots=True)
class Decodes:
    """The decoding requests of a step, all arrays aligned.

    Attributes:
        rows: Rows of the table.
        ahead: Output tokens in flight.
        ctx: KV tokens of each.
        remaining: Predicted output tokens left after those in flight.
        bank_s: Time until its next token is due, seconds; < 0 if it is behind its schedule.
        sustain_s: Longest mean step that still meets TPOT at the predicted end, seconds.
        allowed_s: Longest next step that keeps (or brings) the request on course, seconds.
        lost: Whether it missed an SLO or cannot meet one any more.
        alive: The others.
        num_alive: How many these are.
        ctx_alive: KV tokens of the others.
        decode_s: Time of a step of the others alone, seconds; 0 without any.
    """

    rows: IntArray
    ahead: IntArray
    ctx: IntArray
    remaining: FloatArray
    bank_s: FloatArray
    sustain_s: FloatArray
    allowed_s: FloatArray
    lost: BoolArray
    alive: BoolArray
    num_alive: int
    ctx_alive: float
    decode_s: float

    @classmethod
    def of(
        cls, state: StepState, rows: IntArray, ahead: IntArray, *, keep: float, lowest: int
    ) -> Decodes:
        """Judge the decodes in `rows`.

        Args:
            state: The step's state.
            rows: Rows of the table.
            ahead: Output tokens in flight, aligned.
            keep: Share of a target that is planned for.
            lowest: Priority of the lowest class present.
        """
        table = state.table
        remaining = state.remaining(rows, ahead)
        out = np.maximum(table.num_output[rows] + ahead, 1)
        ctx = table.num_prompt[rows] + out
        known = table.first_token_s[rows]
        first = np.where(np.isnan(known), state.now_s, known)
        tpot = table.tpot_s[rows] * keep
        per_step = state.accepted_per_decode
        bank = first + tpot * (out - 1 + per_step) - state.now_s
        steps = np.maximum(remaining / per_step, _ONE_STEP)
        sustain = (bank + (steps - 1.0) * (per_step * tpot)) / steps
        lost = first - table.arrival_s[rows] > table.ttft_s[rows]
        alone = _lose_too_slow(state, ctx, sustain, lost)
        # One behind its schedule catches up by steps halfway to what it could bear for long.
        behind = alone.step_s + 0.5 * np.maximum(sustain - alone.step_s, 0.0)
        allowed = np.where(bank >= behind, bank, np.minimum(behind, tpot * per_step))
        if state.has_classes:  # they are strict: an upper one is served even when it has lost
            is_upper = table.priority[rows] < lowest
            free = is_upper & lost
            sustain[free] = allowed[free] = np.inf
            lost &= ~is_upper
            alone = _Alone.of(state, ctx, lost)
        return cls(
            rows=rows,
            ahead=ahead,
            ctx=ctx,
            remaining=remaining,
            bank_s=bank,
            sustain_s=sustain,
            allowed_s=allowed,
            lost=lost,
            alive=alone.alive,
            num_alive=alone.count,
            ctx_alive=alone.tokens,
            decode_s=alone.step_s if alone.count else 0.0,
        )


@dataclass(frozen=True, slots=True)
class _Alone:
    """Those that are not lost, in a step of them alone."""

    alive: BoolArray
    count: int
    tokens: float
    step_s: float

    @classmethod
    def of(cls, state: StepState, ctx: IntArray, lost: BoolArray) -> _Alone:
        alive = ~lost
        count, tokens = int(np.count_nonzero(alive)), float(ctx[alive].sum())
        return cls(alive, count, tokens, float(state.cost.decode_s(count, tokens)))


def _lose_too_slow(state: StepState, ctx: IntArray, sustain: FloatArray, lost: BoolArray) -> _Alone:
    """Keep, of those not `lost`, the most whose bare steps are short enough for all of them."""
    alone = _Alone.of(state, ctx, lost)
    if not alone.count or alone.step_s * _DECODE_MARGIN <= float(sustain[alone.alive].min()):
        return alone
    (order,) = alone.alive.nonzero()
    order = order[np.argsort(-sustain[order], kind="stable")]
    step_s = state.cost.decode_s(
        np.arange(1.0, len(order) + 1), np.cumsum(ctx[order]).astype(np.float64)
    )
    fits = np.flatnonzero(step_s * _DECODE_MARGIN <= sustain[order])
    lost[order[(fits[-1] + 1 if len(fits) else 0) :]] = True
    return _Alone.of(state, ctx, lost)


@dataclass(slots=True)
class Prefills:
    """The requests that have no first token (again): those that hold a slot, then those that wait.

    Attributes:
        rows: Rows of the table; all arrays are aligned with it.
        num_started: How many hold a slot.
        new: Tokens to compute, >= 1.
        has: Tokens computed, or expected in a prefix cache.
        service_s: What computing the rest adds to steps that run anyway, seconds.
        deadline_s: Time left until it must end, seconds; inf without a target.
        feasible: Whether it can still end in time; false without a target.
        hopeless: Whether it waits for its first token and can no longer get it in time; false
            where nobody asks.
    """

    rows: IntArray
    num_started: int
    new: FloatArray
    has: FloatArray
    service_s: FloatArray
    deadline_s: FloatArray
    feasible: BoolArray
    hopeless: BoolArray

    @classmethod
    def of(
        cls,
        state: StepState,
        started: IntArray,
        decode_s: float,
        *,
        keep: float,
        lowest: int,
        finds_hopeless: bool,
    ) -> Prefills:
        """Judge the prefills in `started` and the waiting requests.

        Args:
            state: The step's state.
            started: Rows that hold a slot.
            decode_s: Time of a step without prefill, seconds.
            keep: Share of a target that is planned for.
            lowest: Priority of the lowest class present.
            finds_hopeless: Whether `hopeless` is needed.
        """
        table = state.table
        rows = np.concatenate([started, state.waiting])
        computed = table.num_computed[rows]
        new = np.maximum(table.prefill_target[rows] - computed, 1.0)
        has = computed.astype(np.float64)
        service_s = np.asarray(state.cost.prefill_marginal_s(new, has))
        need_s = decode_s + service_s
        num_output = table.num_output[rows]
        deadline_s = _deadlines(state, rows, num_output, need_s, decode_s, keep)
        has_deadline = np.isfinite(deadline_s)
        feasible = has_deadline & (_PREFILL_MARGIN * need_s <= deadline_s)
        hopeless = np.zeros(len(rows), dtype=bool)
        if finds_hopeless:
            hopeless = (num_output == 0) & has_deadline & ~feasible
        if state.has_classes:
            # They are strict: what an upper one has lost still goes before a lower one.
            upper = ~feasible & (table.priority[rows] < lowest)
            deadline_s[upper] = np.inf
            feasible |= upper
        return cls(rows, len(started), new, has, service_s, deadline_s, feasible, hopeless)


def _deadlines(
    state: StepState,
    rows: IntArray,
    num_output: IntArray,
    need_s: FloatArray,
    decode_s: float,
    keep: float,
) -> FloatArray:
    """Time left until each prefill must end, seconds; inf without a target.

    The margin is part of the deadline while the prefill alone can keep it; after that the
    target itself counts.
    """
    table = state.table
    target = table.ttft_s[rows]
    waited = state.now_s - table.arrival_s[rows]
    early = keep * target - waited
    deadline: FloatArray = np.where(need_s <= early, early, target - waited)
    (again,) = num_output.nonzero()
    if len(again):  # preempted after its first token: what counts is TPOT
        back = rows[again]
        first, out = table.first_token_s[back], num_output[again]
        tpot = keep * table.tpot_s[back]
        slack = np.where(np.isinf(tpot), 0.0, np.maximum(tpot - decode_s, 0.0))
        due = first + tpot * out + slack * (state.remaining(back) - 1)
        late = first - table.arrival_s[back] > table.ttft_s[back]
        deadline[again] = np.where(late, -np.inf, due - state.now_s)
    return deadline


@dataclass(frozen=True, slots=True)
class StepView:
    """What all parts of one decision look at.

    Attributes:
        state: The step's state.
        decodes: Its decodes, as judged.
        prefills: Its prefills, as judged.
        tile: Multiple in which chunks come, tokens.
        keep: Share of a target that is planned for.
    """

    state: StepState
    decodes: Decodes
    prefills: Prefills
    tile: int
    keep: float

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        taken = len(self.decodes.rows) + self.prefills.num_started
        return self.state.max_num_running - taken

    @property
    def num_available_slots(self) -> int:
        """Slots that nobody holds who can still meet its targets."""
        kept = self.prefills.num_started - int(np.count_nonzero(self.held_prefills))
        return self.state.max_num_running - self.decodes.num_alive - kept

    @property
    def held_prefills(self) -> BoolArray:
        """Mask of the prefills that hold a slot and are lost; shape [num_started]."""
        held: BoolArray = ~self.prefills.feasible[: self.prefills.num_started]
        return held

    @property
    def token_room(self) -> int:
        """Tokens of the step that the decodes on course leave over."""
        return self.state.max_num_tokens - self.decodes.num_alive * self.state.tokens_per_decode

    def tokens_in(
        self, limit_s: float, room: int, has: float, ends: FloatArray | None = None
    ) -> int:
        """Tokens of a chunk, at most `room`, beside the decodes on course in a step of `limit_s`.

        Args:
            limit_s: Time for the step, seconds.
            room: Tokens.
            has: Tokens that the request has computed.
            ends: Where whole prompts end, tokens, ascending: a chunk that ends there is not
                rounded down further.
        """
        if room <= 0:
            return 0
        if np.isinf(limit_s):
            return room
        tokens = self.state.cost.max_prefill_tokens(
            limit_s, self.decodes.num_alive, int(self.decodes.ctx_alive), float(has)
        )
        step = self.tile if tokens >= _MANY_TILES * self.tile else _SUB_TILE
        rounded = tokens // step * step
        if ends is not None:
            num_whole = int(ends.searchsorted(tokens * _ROUNDING, side="right"))
            if num_whole:
                rounded = max(rounded, float(ends[num_whole - 1]))
        return int(min(room, rounded))


@dataclass(slots=True)
class BestEffort:
    """The guaranteed share of engine time of requests that have lost their SLO.

    Attributes:
        share: In [0, 1).
        credit_s: Engine time earned and not yet spent, seconds.
        is_blocked: The oldest lost request has credit but neither slot nor memory: nobody else
            is admitted until it has.
        unseen_s: Engine time of steps in which nobody looked whether a lost request waits.
    """

    share: float
    credit_s: float = 0.0
    is_blocked: bool = False
    unseen_s: float = 0.0

    def forget(self) -> None:
        """Nobody is lost: credit is earned by those who wait for it, not kept for a burst."""
        self.credit_s = min(self.credit_s, 0.0)
        self.unseen_s = 0.0

    def earn(self, elapsed_s: float) -> None:
        """Book the share of the engine time that has passed while a lost request was there."""
        waited_s = self.unseen_s + elapsed_s
        self.unseen_s = 0.0
        self.credit_s = min(_MAX_CREDIT_S, self.credit_s + self.share * waited_s)

    def received(self, seconds: float) -> None:
        """Book service from what others left over: the share is a minimum, not an extra."""
        self.credit_s = max(self.credit_s - seconds, -_MAX_CREDIT_S)

    @property
    def is_full(self) -> bool:
        """Whether no more credit can be earned: it has been waiting to be spent."""
        return self.credit_s >= 0.99 * _MAX_CREDIT_S
