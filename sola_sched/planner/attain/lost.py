"""Who is lost: the decodes and prefills of a step, judged by what they can still meet."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import DECODE, PREFILL, BoolArray, FloatArray, IntArray, StepState
from sola_sched.planner.attain.ends import bear_s, start_by_s
from sola_sched.planner.attain.loops import load
from sola_sched.planner.attain.tuning import AttainTuning


@dataclass
class Decodes:
    """The decodes of a step; arrays are aligned with `rows`, floats are seconds.

    Attributes:
        rows, ahead, ctx: Rows of the table, output tokens in flight, KV tokens.
        bank_s: Time until the next token is due; < 0 behind the schedule.
        token_s: Target for a step: TPOT x tokens of a step.
        lost: Whether it missed a target or cannot meet one any more.
        num_alive, ctx_alive, decode_s: Of the others: how many, their KV tokens, and the time of a
            step of them alone.
        slack_s: The longest next step that keeps, or brings, all of them on course; inf without
            any.
        least_token_s: A lower bound of what they sustain, 0 if there is none.
    """

    state: StepState
    rows: IntArray
    ahead: IntArray
    ctx: IntArray
    bank_s: FloatArray
    token_s: FloatArray
    lost: BoolArray
    num_alive: int = 0
    ctx_alive: float = 0.0
    decode_s: float = 0.0
    slack_s: float = np.inf
    least_token_s: float = np.inf

    @functools.cached_property
    def alive(self) -> IntArray:
        """Places of those that are not lost."""
        return (~self.lost).nonzero()[0]

    @functools.cached_property
    def mixed_s(self) -> float:
        """Time of a step of those alive and a chunk, but for the chunk."""
        return self.decode_s + (self.state.cost.chunk_overhead_s if self.num_alive else 0.0)

    @functools.cached_property
    def left(self) -> FloatArray:
        """Predicted output tokens of each after those in flight."""
        return self.state.remaining(self.rows, self.ahead)

    @functools.cached_property
    def sustain_s(self) -> FloatArray:
        """Longest mean step with which each meets TPOT at its predicted end."""
        return _sustained_s(self.left / self.state.accepted_per_decode, self.bank_s, self.token_s)

    @property
    def num_lost(self) -> int:
        """How many are lost."""
        return len(self.rows) - self.num_alive

    def most_lent_s(self) -> float:
        """The longest next step after which all alive can still meet TPOT at their predicted ends.

        Their later steps are to be halfway between bare ones and their targets: the other half is
        for the prefills that come then.
        """
        steps = self.left[self.alive] / self.state.accepted_per_decode
        gain_s = 0.5 * np.maximum(self.token_s[self.alive] - self.decode_s, 0.0)
        more = np.maximum(steps - 1.0, 1e-9)  # no further step x no target is no number
        lent_s: FloatArray = self.bank_s[self.alive] + more * gain_s
        return float(lent_s.min(initial=np.inf))

    def count(self, num_alive: int, ctx_alive: float) -> None:
        """Note who is left."""
        for known in ("alive", "mixed_s"):
            self.__dict__.pop(known, None)
        self.num_alive, self.ctx_alive = num_alive, ctx_alive
        cost = self.state.cost
        self.decode_s = float(cost.decode_s(num_alive, ctx_alive)) if num_alive else 0.0


@dataclass
class Prefills:
    """Requests without a first token (again): those with a slot, then those that wait.

    Attributes:
        rows: Rows of the table; arrays are aligned with it.
        num_started: How many hold a slot.
        deadline_s: Time until each must end, seconds; inf without a target.
        new, has: Tokens to compute, >= 1, and computed or expected in a cache.
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
    service_s: FloatArray
    feasible: BoolArray
    hopeless: BoolArray
    rank: IntArray
    num_feasible: int = 0
    num_urgent: int = 0

    @property
    def num_kept(self) -> int:
        """Those with a slot that are feasible."""
        is_any_lost = self.num_feasible < len(self.rows)
        return (
            int(np.count_nonzero(self.feasible[: self.num_started]))
            if is_any_lost
            else self.num_started
        )

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
        return self.decodes.mixed_s

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
    """Judge the decodes in `rows`; arguments as in `judge`, `lowest` is the lowest class there."""
    table, count = state.table, len(rows)
    decodes = Decodes(
        state, rows, ahead, np.empty(count, dtype=np.int64), np.empty(count), np.empty(count),
        np.empty(count, dtype=np.bool_),
    )  # fmt: skip
    num_alive, ctx_alive = load().follow_schedules(
        rows, ahead, state.now_s, keep, state.accepted_per_decode,
        table.num_prompt, table.num_output, table.first_token_s, table.due_s, table.tpot_s,
        decodes.ctx, decodes.bank_s, decodes.token_s, decodes.lost,
    )  # fmt: skip
    decodes.count(num_alive, float(ctx_alive))
    if state.has_e2e:
        _follow_ends(decodes, keep)
    behind = np.empty(count, dtype=np.bool_)
    num_behind, decodes.slack_s, decodes.least_token_s = load().find_slack(
        decodes.bank_s, decodes.token_s, decodes.lost, decodes.decode_s, behind
    )
    is_easy = not state.has_ranks
    if is_easy and num_behind:
        is_easy = _catch_up(decodes, behind.nonzero()[0], tuning)
    if not is_easy:
        judge_by_length(decodes, tuning, lowest)
    return decodes


def _follow_ends(decodes: Decodes, keep: float) -> None:
    """Where an end is due, the pace that it takes is a target for the next step and all others."""
    state = decodes.state
    step_s = state.accepted_per_decode * bear_s(state, decodes.rows, keep, decodes.ahead)
    np.minimum(decodes.bank_s, step_s, out=decodes.bank_s)
    np.minimum(decodes.token_s, step_s, out=decodes.token_s)
    if (step_s <= 0.0).any():
        decodes.lost |= step_s <= 0.0
        _count(decodes)


def _catch_up(decodes: Decodes, behind: IntArray, tuning: AttainTuning) -> bool:
    """Let these few catch up; false if some may be too slow for that, and all must be judged."""
    left = decodes.state.remaining(decodes.rows[behind], decodes.ahead[behind])
    bank_s, token_s = decodes.bank_s[behind], decodes.token_s[behind]
    sustain_s = _sustained_s(left / decodes.state.accepted_per_decode, bank_s, token_s)
    least_s = float(sustain_s.min())
    if decodes.decode_s * tuning.decode_margin > least_s:
        return False
    allowed_s = _allowed_s(decodes.decode_s, sustain_s, bank_s, token_s)
    decodes.slack_s = min(decodes.slack_s, float(allowed_s.min()))
    decodes.least_token_s = min(decodes.least_token_s, least_s)
    return True


def _sustained_s(steps: FloatArray, bank_s: FloatArray, token_s: FloatArray) -> FloatArray:
    """Longest mean step that meets TPOT after so many steps, seconds."""
    steps = np.maximum(steps, 1.0 + 1e-9)  # no further step x no target is no number
    sustain_s: FloatArray = (bank_s + (steps - 1.0) * token_s) / steps
    return sustain_s


def _allowed_s(
    decode_s: float, sustain_s: FloatArray, bank_s: FloatArray, token_s: FloatArray
) -> FloatArray:
    """The longest next step that keeps each on course, or brings it there, seconds.

    One behind its schedule catches up by steps halfway to what it could bear for long.
    """
    behind_s = decode_s + 0.5 * np.maximum(sustain_s - decode_s, 0.0)
    return np.where(bank_s >= behind_s, bank_s, np.minimum(behind_s, token_s))


def judge_by_length(decodes: Decodes, tuning: AttainTuning, lowest: int) -> None:
    """Tell who is too slow, and how long a step those behind their schedules allow."""
    state, sustain_s = decodes.state, decodes.sustain_s
    _lose_too_slow(decodes, tuning)
    allowed_s = _allowed_s(decodes.decode_s, sustain_s, decodes.bank_s, decodes.token_s)
    if state.has_ranks:  # they are strict: an upper one is served even when it has lost
        is_upper = state.rank_of(decodes.rows) < lowest
        is_free = is_upper & decodes.lost
        sustain_s[is_free] = allowed_s[is_free] = np.inf
        decodes.lost &= ~is_upper
        _count(decodes)
    decodes.slack_s = float(allowed_s[decodes.alive].min(initial=np.inf))
    decodes.least_token_s = 0.0


def _lose_too_slow(decodes: Decodes, tuning: AttainTuning) -> None:
    """Keep, of those not lost, the most whose bare steps are short enough for all of them."""
    order, sustain_s, margin = decodes.alive, decodes.sustain_s, tuning.decode_margin
    if not len(order) or decodes.decode_s * margin <= float(sustain_s[order].min()):
        return
    order = order[np.argsort(-sustain_s[order], kind="stable")]
    step_s = decodes.state.cost.decode_s(
        np.arange(1.0, len(order) + 1), np.cumsum(decodes.ctx[order]).astype(np.float64)
    )
    fits = np.flatnonzero(step_s * margin <= sustain_s[order])
    decodes.lost[order[(fits[-1] + 1 if len(fits) else 0) :]] = True
    _count(decodes)


def _count(decodes: Decodes) -> None:
    alive = (~decodes.lost).nonzero()[0]
    decodes.count(len(alive), float(decodes.ctx[alive].sum()))


def judge_prefills(
    state: StepState,
    started: IntArray,
    decodes: Decodes,
    tuning: AttainTuning,
    keep: float,
    lowest: int,
) -> Prefills:
    """Judge the prefills in `started` and the waiting requests; arguments as in `judge`.

    Args:
        decodes: Those beside them.
    """
    table, cost = state.table, state.cost
    rows = np.concatenate([started, state.waiting]) if len(started) else state.waiting
    count = len(rows)
    prefills = Prefills(
        rows, len(started), np.empty(count), np.empty(count), np.empty(count), np.empty(count),
        np.empty(count, dtype=np.bool_), np.empty(count, dtype=np.bool_),
        state.rank_of(rows) if state.has_ranks else np.zeros(count, dtype=np.int64),
    )  # fmt: skip
    linear, gamma = cost.coefficients, cost.gamma.mixed
    prefills.num_feasible, prefills.num_urgent = load().judge_prefills(
        rows, state.now_s, decodes.decode_s, decodes.mixed_s, keep, tuning.prefill_margin,
        tuning.tight, gamma * linear.a0, gamma * linear.b0, gamma * linear.c0,
        table.prefill_target, table.num_computed, table.num_output, table.ttft_s, table.due_s,
        _limits(state, rows, decodes.decode_s, keep),
        prefills.deadline_s, prefills.new, prefills.has, prefills.service_s, prefills.feasible,
        prefills.hopeless,
    )  # fmt: skip
    if state.has_ranks:  # what an upper one has lost still goes before a lower one
        upper = ~prefills.feasible & (prefills.rank < lowest)
        prefills.deadline_s[upper] = np.inf
        prefills.feasible |= upper
        prefills.num_feasible = int(np.count_nonzero(prefills.feasible))
    return prefills


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
    if state.has_e2e:
        step_s = max(decode_s, float(state.cost.decode_s(1.0, 0.0)))  # it will be one of them
        least_s, usual_s = step_s / state.accepted_per_decode, usual_token_s(state, step_s)
        limit_s = np.minimum(limit_s, start_by_s(state, rows, keep, least_s, usual_s))
    return limit_s


def usual_token_s(state: StepState, decode_s: float) -> float:
    """Time between two tokens of a decode, with the prefills that come in between, seconds."""
    return decode_s / max(0.1, 1.0 - state.prefill_share) / state.accepted_per_decode
