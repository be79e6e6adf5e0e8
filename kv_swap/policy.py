"""Who leaves the accelerator, in the order of estimated wait times, and what a copy is worth.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.2, Algorithm 2: jobs sorted by estimated wait
time (EWT, Eq. 6 and 7); those within the accelerator's limit stay or are uploaded, the others are
offloaded. Departures:

- The limit M is a number of jobs in the paper. Here it is memory: jobs leave, the longest wait
  first, when the blocks that the others take in the next steps are not free.
- The paper offloads every job beyond the limit at once. Here copies run ahead (`outward`), but
  blocks are given up only when somebody needs them: what stays need not come back.
- A copy is used only if it delays the requests less than computing the KV again (`Link`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sola_sched.core.state import DECODE, FloatArray, IntArray, StepPlan, StepState
from sola_sched.cost.model import CostModel
from sola_sched.kv_swap.jobs import Report

#: Steps for whose growth there must be room: a victim's blocks come two steps later, three under
#: asynchronous scheduling.
_ROOM_STEPS = 4
#: Copies run ahead when the growth of so many steps does not fit.
_AHEAD_STEPS = 64
#: Steps from the order to load until the request can run.
_RESUME_STEPS = 3
#: Most that one report takes from the memory of those before it.
_AVERAGING = 0.2
#: Requests refused a load in a row after which half the time is expected; doubled each time that
#: the next load shows that it had been right.
PATIENCE, MOST_PATIENCE = 32, 4096


class Link:
    """What copies from the host take, measured, against computing KV again.

    Loads that took long keep further ones from being made, and so from being measured. So after
    refusals in a row shorter ones are expected, until one is made.

    Attributes:
        s_per_token: Seconds per token of a load: those of the last loads, summed, by their
            tokens. So a short load, which takes a while whatever its length, counts for little.
            None before the first.
    """

    def __init__(self) -> None:
        self.s_per_token: float | None = None
        self._loads_s, self._load_tokens = 0.0, 0.0  # of the last loads, older ones for less
        self._measured_s: float | None = None  # what it was before refusals halved it
        self._num_refused, self._patience = 0, PATIENCE

    def observe(self, report: Report, num_tokens: int) -> None:
        """Learn from the loads that ended in a step; `num_tokens` are theirs, failed ones' not."""
        if not num_tokens or not report.load_s:
            return
        # Each worker copies its part of the KV, beside the others.
        loads_s = report.load_s / max(1, report.num_loading)
        before = self._measured_s
        self._num_refused, self._measured_s = 0, None
        if before is not None:
            is_as_slow = 2.0 * loads_s > before * num_tokens
            self._patience = min(2 * self._patience, MOST_PATIENCE) if is_as_slow else PATIENCE
            self._loads_s, self._load_tokens = 0.0, 0.0
        # Short loads make little of the long ones before them forgotten.
        lost = min(_AVERAGING, 2.0 * num_tokens / max(1.0, self._load_tokens))
        self._loads_s += loads_s - lost * self._loads_s
        self._load_tokens += num_tokens - lost * self._load_tokens
        self.s_per_token = self._loads_s / self._load_tokens

    def is_worth_loading(
        self, cost: CostModel, num_tokens: int, num_before: int, num_running: int
    ) -> bool:
        """Whether a load delays the requests less, in sum, than computing the tokens again.

        A load delays its own request, by the copy and the steps until it is noticed. Computing
        delays all that run, by the prefill.

        Args:
            cost: Step-time model.
            num_tokens: Tokens to restore, after `num_before` that are there.
            num_running: Requests in the step, the resumed one not counted.
        """
        return self._gain_s(cost, num_tokens, num_before, num_running) >= 0.0

    def count_refusal(
        self, cost: CostModel, num_tokens: int, num_before: int, num_running: int
    ) -> None:
        """A load was not worth it. Call once for a request each time it is preempted.

        Args:
            cost, num_tokens, num_before, num_running: As of `is_worth_loading`.
        """
        if self.s_per_token is None:
            return
        gain_s = self._gain_s(cost, num_tokens, num_before, num_running)
        if gain_s + num_tokens * self.s_per_token < 0.0:  # no speed makes it worth it
            return
        self._num_refused += 1
        if self._num_refused >= self._patience:
            if self._measured_s is None:
                self._measured_s = self.s_per_token
            self.s_per_token *= 0.5
            self._num_refused = 0

    def _gain_s(self, cost: CostModel, num_tokens: int, num_before: int, num_running: int) -> float:
        """By how much less a load delays the requests; infinite where nothing is known."""
        if self.s_per_token is None or not cost.is_ready:
            return np.inf
        step_s = float(cost.decode_s(max(1, num_running), 0.0))
        load_s = _RESUME_STEPS * step_s + num_tokens * self.s_per_token
        again_s = float(cost.prefill_marginal_s(float(num_tokens), float(num_before)))
        return again_s * (num_running + 1) - load_s

    def crossover_tokens(self, cost: CostModel, num_running: int) -> int | None:
        """Fewest tokens that are worth loading, within 1 %; None if none up to a million are."""
        high = 1
        while self._gain_s(cost, high, 0, num_running) < 0.0:
            high *= 2
            if high > 1 << 20:
                return None
        low = high // 2  # not worth it, or 0
        while high - low > max(1, high // 100):
            middle = (low + high) // 2
            if self._gain_s(cost, middle, 0, num_running) >= 0.0:
                high = middle
            else:
                low = middle
        return high


def leaving_order(state: StepState, plan: StepPlan) -> IntArray:
    """Running rows, the first to leave first.

    The reverse of the planner's order of service, in which waits grow, where it has one. Else by
    class, the lowest first; then those that sit this step out, under ``attain`` the ones that
    can no longer meet their SLO; then by estimated wait, the longest first; then the latest
    arrival, as vLLM chooses its victims.
    """
    table, rows = state.table, state.running
    rows = rows[~np.isin(rows, plan.preempt)]
    if plan.order is not None:
        reverse: IntArray = plan.order[np.isin(plan.order, rows)][::-1]
        return reverse
    held = np.zeros(len(rows)) if plan.run is None else ~np.isin(rows, plan.run)
    waits_s = np.nan_to_num(table.ewt_s[rows], nan=0.0)
    order: IntArray = rows[
        np.lexsort((-table.arrival_s[rows], -waits_s, ~held.astype(bool), -table.priority[rows]))
    ]
    return order


def make_room(state: StepState, plan: StepPlan) -> StepPlan:
    """The plan with victims, while the next steps of those that run would not fit.

    vLLM would choose them too, but among those that it sees - never one that is held - and only
    when it is short already, with the whole batch waiting for the copy.

    Args:
        state: The step's state.
        plan: Of the planner; not changed.
    """
    if plan.run is None or len(state.running) - len(plan.preempt) < 2:
        return plan
    free = state.num_free_soon + int(_blocks_of(state, plan.preempt).sum())
    run = plan.run
    victims: list[int] = []
    for row in leaving_order(state, plan).tolist():
        stays = run[~np.isin(run, victims)]
        if free >= _growth(state, stays, _ROOM_STEPS) or (len(stays) < 2 and row in stays):
            break
        victims.append(row)
        free += int(_blocks_of(state, np.array([row])).sum())
    if not victims:
        return plan
    gone = np.array(victims, dtype=np.int64)
    return dataclasses.replace(
        plan, run=run[~np.isin(run, gone)], preempt=np.concatenate([plan.preempt, gone])
    )


def give_way(state: StepState, plan: StepPlan) -> StepPlan:
    """The plan with held requests displaced for one that can still be on time.

    Under ``attain`` those that sit out have lost their SLO; they keep their KV while it is of use
    to nobody else. When the most urgent waiting request could still meet its TTFT but finds no
    blocks, they leave, the longest wait first.
    """
    if plan.run is None or plan.admit is None or not state.cost.is_ready:
        return plan
    if len(plan.run) == len(state.running) or not len(state.waiting):
        return plan  # nobody is held, or nobody waits
    table = state.table
    waiting = state.waiting[~np.isin(state.waiting, plan.admit)]
    waiting = waiting[np.isnan(table.first_token_s[waiting])]
    due_s = table.arrival_s[waiting] + table.ttft_s[waiting] - state.now_s
    new = (table.prefill_target[waiting] - table.num_computed[waiting]).astype(np.float64)
    is_on_time = np.isfinite(due_s) & (due_s > state.cost.prefill_s(new))
    if not is_on_time.any():
        return plan
    first = waiting[is_on_time][np.argmin(due_s[is_on_time])]
    need = int(table.prefill_target[first]) // state.block_size + 1
    need += _growth(state, plan.run, _ROOM_STEPS)
    need += int(np.ceil(table.prefill_target[plan.admit] / state.block_size).sum())
    free = state.num_free_soon + int(_blocks_of(state, plan.preempt).sum())
    if free >= need:
        return plan
    order = leaving_order(state, plan)
    held = order[~np.isin(order, plan.run) & (table.phase[order] == DECODE)]
    freed = free + np.cumsum(_blocks_of(state, held))
    count = int(np.searchsorted(freed, need)) + 1
    if count > len(held):
        return plan
    return dataclasses.replace(plan, preempt=np.concatenate([plan.preempt, held[:count]]))


def has_plenty(state: StepState) -> bool:
    """Whether even the fastest growth of all that run leaves blocks free; costs nothing to ask."""
    most = _AHEAD_STEPS * state.tokens_per_decode // state.block_size + 1
    return state.num_free_blocks >= len(state.running) * most


def room_for_loads(state: StepState, plan: StepPlan) -> int:
    """Blocks that loads may take ahead of need: those that the running requests will not."""
    run = state.running if plan.run is None else plan.run
    return state.num_free_blocks - _growth(state, run, _AHEAD_STEPS)


def is_short(state: StepState, plan: StepPlan) -> bool:
    """Whether the next steps of those that run do not fit."""
    run = state.running if plan.run is None else plan.run
    return state.num_free_blocks < _growth(state, run, _ROOM_STEPS)


def inward(state: StepState, rows: IntArray) -> IntArray:
    """Waiting rows whose KV is to be brought in ahead, the shortest estimated wait first."""
    waits_s = np.nan_to_num(state.table.ewt_s[rows], nan=np.inf)
    order: IntArray = rows[np.lexsort((state.table.queue_pos[rows], waits_s))]
    return order


def outward(state: StepState, plan: StepPlan) -> IntArray:
    """Running rows whose KV is to be copied ahead: those that leave first if memory runs short."""
    run = state.running if plan.run is None else plan.run
    short = _growth(state, run, _AHEAD_STEPS) - state.num_free_blocks
    if short <= 0:
        return run[:0]
    order = leaving_order(state, plan)
    freed = np.cumsum(_blocks_of(state, order))
    return order[: int(np.searchsorted(freed, short)) + 1]


def _growth(state: StepState, rows: IntArray, num_steps: int) -> int:
    """Blocks that decodes among `rows` take in the next steps."""
    rows = rows[state.table.phase[rows] == DECODE]
    size = state.block_size
    held = _tokens_of(state, rows)
    more = num_steps * state.tokens_per_decode
    # A request that ends sooner takes less.
    left = np.minimum(state.surely_remaining(rows), more) if len(rows) else np.zeros(0)
    return int((np.ceil((held + left) / size) - np.ceil(held / size)).sum())


def _tokens_of(state: StepState, rows: IntArray) -> FloatArray:
    table = state.table
    decode = (table.num_prompt[rows] + table.num_output[rows]).astype(np.float64)
    return np.where(table.phase[rows] == DECODE, decode, table.num_computed[rows])


def _blocks_of(state: StepState, rows: IntArray) -> FloatArray:
    """Blocks that rows give back; shared ones, which nobody counts here, are few."""
    return np.asarray(_tokens_of(state, rows) // state.block_size)
