"""Who is lost: the decodes and prefills of a step, judged by what they can still meet."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import DECODE, PREFILL, BoolArray, FloatArray, IntArray, StepState
from sola_sched.planner.attain.loops import load
from sola_sched.planner.attain.tuning import AttainTuning


@dataclass
class Decodes:
    """The decodes of a step; arrays are aligned with `rows`, floats are seconds.

    Attributes:
        rows, ahead, ctx: Rows of the table, output tokens in flight, KV tokens.
        left: Predicted output tokens after those in flight, >= 1.
        bank_s: Time until the next token is due; < 0 behind the schedule.
        token_s: Target for a step: TPOT x tokens of a step.
        sustain_s: Longest mean step with which each meets TPOT at its predicted end.
        lost: Whether it missed a target or cannot meet one any more.
        num_alive, ctx_alive, decode_s: Of the others: how many, their KV tokens, and the time of a
            step of them alone.
        slack_s: The longest next step that keeps, or brings, all of them on course; inf without
            any.
        bear_s: The longest bare step that all of them sustain; inf without any.
    """

    state: StepState
    rows: IntArray
    ahead: IntArray
    ctx: IntArray
    left: FloatArray
    bank_s: FloatArray
    token_s: FloatArray
    sustain_s: FloatArray
    lost: BoolArray
    num_alive: int = 0
    ctx_alive: float = 0.0
    decode_s: float = 0.0
    slack_s: float = np.inf
    bear_s: float = np.inf

    @functools.cached_property
    def alive(self) -> IntArray:
        """Places of those that are not lost."""
        return (~self.lost).nonzero()[0]

    @property
    def num_lost(self) -> int:
        """How many are lost."""
        return len(self.rows) - self.num_alive

    def most_lent_s(self) -> float:
        """The longest next step after which all alive can still meet TPOT at their predicted ends.

        Their later steps are to be halfway between bare ones and their targets: the other half is
        for the prefills that come then.
        """
        alive = self.alive
        gain_s = 0.5 * np.maximum(self.token_s[alive] - self.decode_s, 0.0)
        # No further step x no target is no number.
        more = np.maximum(self.left[alive] / self.state.accepted_per_decode - 1.0, 1e-9)
        lent_s: FloatArray = self.bank_s[alive] + more * gain_s
        return float(lent_s.min(initial=np.inf))

    def weigh(self) -> None:
        """Sum up those alive: the time of their step, and what they allow."""
        self.__dict__.pop("alive", None)
        loops, cost = load(), self.state.cost
        self.num_alive, ctx = loops.count_alive(self.ctx, self.lost)
        self.ctx_alive = float(ctx)
        self.decode_s = float(cost.decode_s(self.num_alive, ctx)) if self.num_alive else 0.0
        self.slack_s, self.bear_s = loops.find_slack(
            self.bank_s, self.token_s, self.sustain_s, self.lost, self.decode_s
        )


@dataclass
class Prefills:
    """Requests without a first token (again): those with a slot, then those that wait.

    Attributes:
        rows: Rows of the table; arrays are aligned with it.
        num_started: How many hold a slot.
        deadline_s: Time until each must end, seconds; inf without a target.
        new, has: Tokens to compute, >= 1, and computed or expected in a cache.
        chunk: Of `new`, what one step may compute.
        service_s: What computing the rest adds to steps that run anyway, seconds.
        feasible: Whether it can still end in time; false without a target.
        hopeless: Whether it waits for its first token and cannot get it in time any more.
        rank: Rank by class and service, as `StepState.rank_of`.
        num_feasible: How many are feasible.
        num_urgent: How many would be late beside the decodes, or have short targets.
    """

    rows: IntArray
    num_started: int
    deadline_s: FloatArray
    new: FloatArray
    has: FloatArray
    chunk: FloatArray
    service_s: FloatArray
    feasible: BoolArray
    hopeless: BoolArray
    rank: IntArray
    num_feasible: int = 0
    num_urgent: int = 0

    @property
    def num_kept(self) -> int:
        """Those with a slot that are feasible."""
        return int(np.count_nonzero(self.feasible[: self.num_started]))

    def without_rejected(self, places: BoolArray) -> BoolArray:
        """These, but for those that wait and cannot have their first token in time any more."""
        stay = places.copy()
        stay[self.num_started :] &= ~self.hopeless[self.num_started :]
        return stay

    @functools.cached_property
    def size(self) -> FloatArray:
        """KV tokens of each when it has ended."""
        size: FloatArray = self.new + self.has
        return size


@dataclass(frozen=True)
class Judged:
    """What all that follows looks at.

    Attributes:
        state, decodes, prefills: As they are judged.
        tuning: The constants.
        tile: Multiple in which chunks come, tokens.
        keep: Share of a target that is planned for.
        mixed_s: Time of a step of the decodes on course and a chunk, but for the chunk, seconds.
        token_room: Tokens of the step that the decodes on course leave over.
        num_free_slots: Slots that nobody holds.
        num_open_slots: Slots that nobody holds who can still meet its targets.
    """

    state: StepState
    decodes: Decodes
    prefills: Prefills
    tuning: AttainTuning
    tile: int
    keep: float

    @property
    def mixed_s(self) -> float:
        return _mixed_s(self.decodes)

    @property
    def token_room(self) -> int:
        return self.state.max_num_tokens - self.decodes.num_alive * self.state.tokens_per_decode

    @property
    def num_free_slots(self) -> int:
        taken = len(self.decodes.rows) + self.prefills.num_started
        return self.state.max_num_running - taken

    @property
    def num_open_slots(self) -> int:
        return self.state.max_num_running - self.decodes.num_alive - self.prefills.num_kept


def judge(
    state: StepState,
    rows: IntArray,
    ahead: IntArray,
    tuning: AttainTuning,
    *,
    tile: int,
    keep: float,
) -> Judged:
    """Judge the requests of a step.

    Args:
        state: The step's state.
        rows, ahead: Rows that hold a slot and are not about to leave; their tokens in flight.
        tuning: The constants.
        tile: Multiple in which chunks come, tokens.
        keep: Share of a target that is planned for.
    """
    table = state.table
    lowest = 0
    if state.has_ranks and len(rows) + len(state.waiting):
        lowest = int(state.rank_of(np.concatenate([rows, state.waiting])).max())
    started = rows[:0]
    if table.num_in_phase[PREFILL]:
        is_decode = table.phase[rows] == DECODE
        started, rows, ahead = rows[~is_decode], rows[is_decode], ahead[is_decode]
    decodes = judge_decodes(state, rows, ahead, tuning, keep, lowest)
    prefills = judge_prefills(state, started, decodes, tuning, keep, lowest)
    return Judged(state, decodes, prefills, tuning, tile, keep)


def judge_decodes(
    state: StepState,
    rows: IntArray,
    ahead: IntArray,
    tuning: AttainTuning,
    keep: float,
    lowest: int,
) -> Decodes:
    """Judge the decodes in `rows`; arguments as in `judge`, `lowest` is the lowest rank there.

    Ranks are strict: one of an upper rank is served even when it has lost.
    """
    table, count = state.table, len(rows)
    decodes = Decodes(
        state, rows, ahead, np.empty(count, dtype=np.int64), state.remaining(rows, ahead),
        np.empty(count), np.empty(count), np.empty(count), np.empty(count, dtype=np.bool_),
    )  # fmt: skip
    load().follow_schedules(
        rows, ahead, decodes.left, state.now_s, keep, state.accepted_per_decode,
        table.num_prompt, table.num_output, table.first_token_s, table.due_s, table.tpot_s,
        table.e2e_due_s,
        decodes.ctx, decodes.bank_s, decodes.token_s, decodes.sustain_s, decodes.lost,
    )  # fmt: skip
    if _is_room_wanted(state, tuning):
        decodes.lost |= np.isinf(table.due_s[rows]) & np.isinf(decodes.token_s)
    decodes.weigh()
    if state.has_e2e:
        _lose_hurried(decodes, keep)
    if decodes.decode_s * tuning.decode_margin > decodes.bear_s:
        _lose_too_slow(decodes, tuning)
    if state.has_ranks and decodes.num_lost:
        free = decodes.lost & (state.rank_of(rows) < lowest)
        decodes.bank_s[free] = decodes.sustain_s[free] = np.inf
        decodes.lost &= ~free
        decodes.weigh()
    return decodes


def _is_room_wanted(state: StepState, tuning: AttainTuning) -> bool:
    """Whether slots or memory are short and somebody waits who is to begin or end by a time.

    Decodes without any target miss nothing when they give theirs up.
    """
    table, waiting = state.table, state.waiting
    used = 1.0 - state.num_free_blocks / max(1, state.num_blocks)
    if len(state.running) < state.max_num_running and used <= tuning.memory_threshold:
        return False
    return bool((np.minimum(table.due_s[waiting], table.e2e_due_s[waiting]) < np.inf).any())


def _lose_hurried(decodes: Decodes, keep: float) -> None:
    """Lose those whose last token is due before steps as usual bring it.

    One of them would keep all steps short, and the prompts of many others waiting.
    """
    state = decodes.state
    left_s = keep * (state.table.e2e_due_s[decodes.rows] - state.now_s)
    decodes.lost |= left_s < decodes.left * usual_token_s(state, decodes.decode_s)
    decodes.weigh()


def _lose_too_slow(decodes: Decodes, tuning: AttainTuning) -> None:
    """Keep, of those not lost, the most whose bare steps are short enough for all of them.

    Those that sustain steps so much longer that they miss nothing when they wait, as those without
    a target do, get what the others leave over.
    """
    decodes.lost |= decodes.sustain_s > tuning.can_wait * decodes.decode_s
    decodes.weigh()
    margin = tuning.decode_margin
    if decodes.decode_s * margin <= decodes.bear_s:
        return
    order, sustain_s = decodes.alive, decodes.sustain_s
    order = order[np.argsort(-sustain_s[order], kind="stable")]
    step_s = decodes.state.cost.decode_s(
        np.arange(1.0, len(order) + 1), np.cumsum(decodes.ctx[order]).astype(np.float64)
    )
    fits = np.flatnonzero(step_s * margin <= sustain_s[order])
    decodes.lost[order[(fits[-1] + 1 if len(fits) else 0) :]] = True
    decodes.weigh()


def judge_prefills(
    state: StepState,
    started: IntArray,
    decodes: Decodes,
    tuning: AttainTuning,
    keep: float,
    lowest: int,
) -> Prefills:
    """Judge the prefills in `started` and the waiting requests; arguments as in `judge_decodes`.

    Args:
        decodes: Those beside them.
    """
    table, cost = state.table, state.cost
    rows = np.concatenate([started, state.waiting]) if len(started) else state.waiting
    count = len(rows)
    prefills = Prefills(
        rows, len(started), np.empty(count), np.empty(count), np.empty(count), np.empty(count),
        np.empty(count), np.empty(count, dtype=np.bool_), np.empty(count, dtype=np.bool_),
        state.rank_of(rows) if state.has_ranks else np.zeros(count, dtype=np.int64),
    )  # fmt: skip
    linear, gamma = cost.coefficients, cost.gamma.mixed
    prefills.num_feasible, prefills.num_urgent = load().judge_prefills(
        rows, state.now_s, decodes.decode_s, _mixed_s(decodes), keep, tuning.prefill_margin,
        tuning.tight, gamma * linear.a0, gamma * linear.b0, gamma * linear.c0,
        table.prefill_target, table.num_computed, table.num_output, table.ttft_s, table.due_s,
        _limits(state, rows, decodes.decode_s, keep),
        prefills.deadline_s, prefills.new, prefills.has, prefills.service_s, prefills.feasible,
        prefills.hopeless,
    )  # fmt: skip
    prefills.chunk = prefills.new
    if state.max_chunk is not None:
        prefills.chunk = np.minimum(prefills.new, state.max_chunk)
        _lose_long(prefills, decodes, tuning)
    if state.has_ranks:  # what an upper one has lost still goes before a lower one
        upper = ~prefills.feasible & (prefills.rank < lowest)
        prefills.deadline_s[upper] = np.inf
        prefills.feasible |= upper
        prefills.num_feasible = int(np.count_nonzero(prefills.feasible))
    return prefills


def _lose_long(prefills: Prefills, decodes: Decodes, tuning: AttainTuning) -> None:
    """Where chunks are limited: the steps that a long prompt takes before its last one count."""
    table, rows = decodes.state.table, prefills.rows
    more_s = (np.ceil(prefills.new / prefills.chunk) - 1.0) * _mixed_s(decodes)
    due_s = prefills.deadline_s
    need_s = decodes.decode_s + prefills.service_s + more_s
    is_late = prefills.feasible & (more_s > 0.0) & (tuning.prefill_margin * need_s > due_s)
    prefills.feasible &= ~is_late
    prefills.hopeless |= is_late & (table.num_output[rows] == 0)
    prefills.deadline_s = due_s - more_s
    prefills.num_feasible = int(np.count_nonzero(prefills.feasible))


def _mixed_s(decodes: Decodes) -> float:
    cost = decodes.state.cost
    return decodes.decode_s + (cost.chunk_overhead_s if decodes.num_alive else 0.0)


def _limits(state: StepState, rows: IntArray, decode_s: float, keep: float) -> FloatArray:
    """Time left until each prefill must end, but for its TTFT, seconds; -inf if it is lost."""
    table = state.table
    limit_s = np.full(len(rows), np.inf)
    (again,) = table.num_output[rows].nonzero()
    if len(again):  # displaced after its first token: steps as usual have to bring it on course
        back = rows[again]
        first, tpot = table.first_token_s[back], keep * table.tpot_s[back]
        gain = np.maximum(tpot - usual_token_s(state, decode_s), 0.0)
        gain = np.where(np.isinf(tpot), 0.0, gain)
        due = first + tpot * table.num_output[back] + gain * (state.remaining(back) - 1)
        limit_s[again] = np.where(first > table.due_s[back], -np.inf, due - state.now_s)
    if state.has_e2e:  # its tokens have to come in time too, at the usual pace
        left_s = keep * (table.e2e_due_s[rows] - state.now_s)
        (ends,) = (left_s < np.inf).nonzero()
        left = state.remaining(rows[ends])
        step_s = max(decode_s, float(state.cost.decode_s(1.0, 0.0)))  # it will be one of them
        token_s = usual_token_s(state, step_s)
        limit_s[ends] = np.minimum(limit_s[ends], left_s[ends] - (left - 1.0) * token_s)
    return limit_s


def usual_token_s(state: StepState, decode_s: float) -> float:
    """Time between two tokens of a decode, with the prefills that come in between, seconds."""
    return decode_s / max(0.1, 1.0 - state.prefill_share) / state.accepted_per_decode
