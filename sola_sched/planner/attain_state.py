"""What `policy="attain"` knows of the requests of a step, and its account for the lost."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import BoolArray, FloatArray, IntArray, StepState

#: A decode counts as lost only if it misses its target by more than this share of the step time:
#: predictions of the step time are a few per cent off.
_DECODE_MARGIN = 0.9
#: A prefill counts as lost only if it misses its deadline by more than this share of its time.
_PREFILL_MARGIN = 0.95
#: Chunks of fewer than so many tiles come in smaller multiples: what rounding down to a tile
#: leaves out would be a large share of them.
_MANY_TILES = 8
_SUB_TILE = 16
#: Share of the time that decodes have at least, as far as anybody counts on it.
_LEAST_SHARE = 0.1
#: Tokens and times are turned into each other and back.
ROUNDING = 1.0 + 1e-6
#: Steps of a request that is predicted to end with the next one: with one step exactly, 0 further
#: steps x no target would have no value.
_ONE_STEP = 1.0 + 1e-9
#: Best-effort credit never exceeds this many seconds: no burst of lost requests.
_MAX_CREDIT_S = 0.5


class Decodes:
    """The decoding requests of a step, all arrays aligned.

    Attributes:
        rows: Rows of the table.
        ahead: Output tokens in flight.
        ctx: KV tokens of each.
        bank_s: Time until its next token is due, seconds; < 0 if it is behind its schedule.
        token_s: Its target for a step: TPOT x tokens of a step, seconds.
        allowed_s: Longest next step that keeps (or brings) the request on course, seconds.
        lost: Whether it missed an SLO or cannot meet one any more.
        alive: The others.
        rows_alive, num_alive: Their rows; how many these are.
        ctx_alive: KV tokens of the others.
        decode_s: Time of a step of the others alone, seconds; 0 without any.
        are_ahead: Whether these are ahead of their schedules and a bare step is short enough for
            each; false where priorities differ.
    """

    def __init__(
        self, state: StepState, rows: IntArray, ahead: IntArray, *, keep: float, lowest: int
    ) -> None:
        """Judge the decodes in `rows`.

        Args:
            state: The step's state.
            rows: Rows of the table.
            ahead: Output tokens in flight, aligned.
            keep: Share of a target that is planned for.
            lowest: Priority of the lowest class present.
        """
        table = state.table
        self._state, self.rows, self.ahead = state, rows, ahead
        out = np.maximum(table.num_output[rows] + ahead, 1)
        self.ctx = table.num_prompt[rows] + out
        # The first token is there (NaN: not yet) when this step starts.
        first = np.fmin(table.first_token_s[rows], state.now_s)
        tpot = table.tpot_s[rows] * keep
        per_step = state.accepted_per_decode
        self.bank_s: FloatArray = first + tpot * (out + (per_step - 1.0)) - state.now_s
        self.token_s: FloatArray = per_step * tpot
        self.lost: BoolArray = first > table.due_s[rows]
        self._count_alive()
        self.are_ahead = self._is_easy()
        if self.are_ahead:
            self.allowed_s = self.bank_s
        else:
            self._judge(lowest)
        if not self.num_alive:
            self.decode_s = 0.0

    @functools.cached_property
    def remaining(self) -> FloatArray:
        """Predicted output tokens left after those in flight."""
        return self._state.remaining(self.rows, self.ahead)

    @functools.cached_property
    def sustain_s(self) -> FloatArray:
        """Longest mean step that still meets TPOT at the predicted end, seconds."""
        steps = np.maximum(self.remaining / self._state.accepted_per_decode, _ONE_STEP)
        sustain_s: FloatArray = (self.bank_s + (steps - 1.0) * self.token_s) / steps
        return sustain_s

    @property
    def alive_bear_s(self) -> float:
        """Longest mean step that all alive bear until their predicted ends, seconds."""
        return float(self.sustain_s[self.alive].min(initial=np.inf))

    @property
    def alive_surely_bear_s(self) -> float:
        """A lower bound of `alive_bear_s` for which no lengths are needed; 0 if there is none."""
        if not self.are_ahead:
            return 0.0
        return float(self.token_s[self.alive].min(initial=np.inf))

    def _count_alive(self) -> None:
        self.alive = ~self.lost
        self.num_alive = int(np.count_nonzero(self.alive))
        is_all = self.num_alive == len(self.rows)
        self.rows_alive = self.rows if is_all else self.rows[self.alive]
        self.ctx_alive = float((self.ctx if is_all else self.ctx[self.alive]).sum())
        self.decode_s = float(self._state.cost.decode_s(self.num_alive, self.ctx_alive))

    def _is_easy(self) -> bool:
        """Whether all are ahead of their schedules and a bare step is short enough for each.

        What one bears for long lies between `bank_s` and `token_s`, so that the lengths of
        the outputs decide nothing then: nobody is too slow, and each can wait for its bank.
        """
        if self._state.has_classes:
            return False
        is_ahead = (self.bank_s >= self.token_s) & (self.token_s >= self.decode_s)
        return int(np.count_nonzero(is_ahead | self.lost)) == len(self.rows)

    def _judge(self, lowest: int) -> None:
        """Tell who is too slow, and how long a step those behind their schedules allow."""
        state, sustain_s, token_s = self._state, self.sustain_s, self.token_s
        self._lose_too_slow()
        # One behind its schedule catches up by steps halfway to what it could bear for long.
        behind_s = self.decode_s + 0.5 * np.maximum(sustain_s - self.decode_s, 0.0)
        self.allowed_s = np.where(
            self.bank_s >= behind_s, self.bank_s, np.minimum(behind_s, token_s)
        )
        if state.has_classes:  # they are strict: an upper one is served even when it has lost
            is_upper = state.table.priority[self.rows] < lowest
            is_free = is_upper & self.lost
            sustain_s[is_free] = self.allowed_s[is_free] = np.inf
            self.lost &= ~is_upper
            self._count_alive()

    def _lose_too_slow(self) -> None:
        """Keep, of those not lost, the most whose bare steps are short enough for all of them."""
        sustain_s = self.sustain_s
        (order,) = self.alive.nonzero()
        if not len(order) or self.decode_s * _DECODE_MARGIN <= float(sustain_s[order].min()):
            return
        order = order[np.argsort(-sustain_s[order], kind="stable")]
        step_s = self._state.cost.decode_s(
            np.arange(1.0, len(order) + 1), np.cumsum(self.ctx[order]).astype(np.float64)
        )
        fits = np.flatnonzero(step_s * _DECODE_MARGIN <= sustain_s[order])
        self.lost[order[(fits[-1] + 1 if len(fits) else 0) :]] = True
        self._count_alive()


class Prefills:
    """The requests that have no first token (again): those that hold a slot, then those that wait.

    Attributes:
        rows: Rows of the table; all arrays are aligned with it.
        num_started: How many hold a slot.
        deadline_s: Time left until it must end, seconds; inf without a target.
        feasible: Whether it can still end in time; false without a target.
        hopeless: Whether it waits for its first token and can no longer get it in time; false
            where nobody asks.
    """

    def __init__(
        self,
        state: StepState,
        started: IntArray,
        decode_s: float,
        *,
        keep: float,
        lowest: int,
        finds_hopeless: bool,
    ) -> None:
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
        self._state, self.num_started = state, len(started)
        self.rows = rows = np.concatenate([started, state.waiting])
        num_output = table.num_output[rows]
        self.deadline_s = _deadlines(state, rows, num_output, decode_s, keep)
        has_deadline = self.deadline_s < np.inf
        self.feasible: BoolArray = has_deadline & (self.deadline_s >= _PREFILL_MARGIN * decode_s)
        num_hopeful = int(np.count_nonzero(self.feasible))
        if num_hopeful:  # the others are too late whatever their length
            hopeful = slice(None) if num_hopeful == len(rows) else self.feasible.nonzero()[0]
            need_s, left_s = decode_s + self.service_s[hopeful], self.deadline_s[hopeful]
            self.feasible[hopeful] = _PREFILL_MARGIN * need_s <= left_s
            # The margin is part of the deadline while the prefill alone can keep it.
            early_s = left_s - (1.0 - keep) * table.ttft_s[rows[hopeful]]
            is_early = (need_s <= early_s) & (num_output[hopeful] == 0)
            self.deadline_s[hopeful] = np.where(is_early, early_s, left_s)
        self.hopeless = np.zeros(len(rows), dtype=bool)
        if finds_hopeless:
            self.hopeless = (num_output == 0) & has_deadline & ~self.feasible
        if state.has_classes:
            # They are strict: what an upper one has lost still goes before a lower one.
            upper = ~self.feasible & (table.priority[rows] < lowest)
            self.deadline_s[upper] = np.inf
            self.feasible |= upper

    @functools.cached_property
    def new(self) -> FloatArray:
        """Tokens to compute, >= 1."""
        new: FloatArray = np.maximum(self._state.table.prefill_target[self.rows] - self.has, 1.0)
        return new

    @functools.cached_property
    def has(self) -> FloatArray:
        """Tokens computed, or expected in a prefix cache."""
        has: FloatArray = self._state.table.num_computed[self.rows].astype(np.float64)
        return has

    @functools.cached_property
    def size(self) -> FloatArray:
        """Tokens of KV that each holds when it has ended, computed here or not."""
        size: FloatArray = self.new + self.has
        return size

    @functools.cached_property
    def service_s(self) -> FloatArray:
        """What computing the rest adds to steps that run anyway, seconds."""
        service_s: FloatArray = np.asarray(self._state.cost.prefill_marginal_s(self.new, self.has))
        return service_s

    def size_of(self, place: int) -> tuple[int, float]:
        """`new` and `has` of one."""
        table, row = self._state.table, self.rows[place]
        has = int(table.num_computed[row])
        return max(1, int(table.prefill_target[row]) - has), float(has)


def _deadlines(
    state: StepState, rows: IntArray, num_output: IntArray, decode_s: float, keep: float
) -> FloatArray:
    """Time left until each prefill must end, seconds; inf without a target, -inf if it is lost."""
    table = state.table
    deadline: FloatArray = table.due_s[rows] - state.now_s
    (again,) = num_output.nonzero()
    if len(again):  # preempted after its first token: what counts is TPOT
        back, usual_s = rows[again], usual_token_s(state, decode_s)
        first, out = table.first_token_s[back], num_output[again]
        tpot = keep * table.tpot_s[back]
        slack = np.where(np.isinf(tpot), 0.0, np.maximum(tpot - usual_s, 0.0))
        due = first + tpot * out + slack * (state.remaining(back) - 1)
        late = first > table.due_s[back]
        deadline[again] = np.where(late, -np.inf, due - state.now_s)
    return deadline


def usual_token_s(state: StepState, decode_s: float) -> float:
    """Time between two tokens of a decode, with the prefills that come in between, seconds.

    Args:
        state: The step's state.
        decode_s: Time of a step without prefill, seconds.
    """
    share = max(_LEAST_SHARE, 1.0 - state.prefill_share)
    return decode_s / share / state.accepted_per_decode


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

    @property
    def mixed_s(self) -> float:
        """Time of a step of the decodes on course and a chunk, but for the chunk, seconds."""
        decodes = self.decodes
        return decodes.decode_s + (self.state.cost.chunk_overhead_s if decodes.num_alive else 0.0)

    def prefill_share(self, limit_s: float) -> float:
        """Share of the time that is left for prefills in steps of `limit_s`, in (0, 1]."""
        return max(0.02, 1.0 - self.mixed_s / max(limit_s, 1e-9))

    def most_tokens(self, limit_s: float, has: float) -> float:
        """Tokens of a prompt beside the decodes on course for which `limit_s` is enough time."""
        return self.state.cost.max_prefill_tokens(
            limit_s, self.decodes.num_alive, int(self.decodes.ctx_alive), has
        )

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
        if math.isinf(limit_s):
            return room
        tokens = self.most_tokens(limit_s, has)
        step = self.tile if tokens >= _MANY_TILES * self.tile else _SUB_TILE
        rounded = tokens // step * step
        if ends is not None:
            num_whole = int(ends.searchsorted(tokens * ROUNDING, side="right"))
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
        self.credit_s = self.earned_s(elapsed_s)
        self.unseen_s = 0.0

    def earned_s(self, elapsed_s: float) -> float:
        """The credit once this time is booked, seconds."""
        return min(_MAX_CREDIT_S, self.credit_s + self.share * (self.unseen_s + elapsed_s))

    def received(self, seconds: float) -> None:
        """Book service from what others left over: the share is a minimum, not an extra."""
        self.credit_s = max(self.credit_s - seconds, -_MAX_CREDIT_S)

    @property
    def is_full(self) -> bool:
        """Whether no more credit can be earned: it has been waiting to be spent."""
        return self.credit_s >= self.full_s

    @property
    def full_s(self) -> float:
        """Credit that counts as full, seconds."""
        return 0.99 * _MAX_CREDIT_S
