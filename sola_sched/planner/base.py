"""What the planners share: the interface, peak memory and priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from sola_sched.config.policies import PolicyTraits
from sola_sched.core.state import DECODE, FloatArray, IntArray, StepPlan, StepState

#: Share of the KV cache that may be planned for; the rest absorbs partly filled blocks.
PLANNABLE = 0.97


class Planner(Protocol):
    """Decides one step. Called once per step, in order."""

    @property
    def traits(self) -> PolicyTraits:
        """What the policy says of itself; an attribute of the class, as a rule."""

    def plan(self, state: StepState) -> StepPlan:
        """Plan the step that `state` describes; must not change `state`."""


def peak_tokens(used: FloatArray | IntArray, left: FloatArray) -> float:
    """Largest KV need, in tokens, until every request has finished.

    Source: SOLA section 5.1, after LightLLM. With requests sorted by tokens left, longest
    first, the need when request i ends is ``sum_{j<=i} used_j + i * left_i``; the peak is the
    largest of these. With several equally likely values of what is left, each counts as a request
    of its own and for its share: the peak of the expected need. That is less than the need of
    expected lengths, since requests of equal expectations do not all end together.

    Args:
        used: Tokens each request holds now, [n].
        left: Tokens each request will still add, >= 0, [n] or [n, k].
    """
    return _Peak(used, left).tokens(len(used))


class _Peak:
    """`peak_tokens` of the first requests, for one count after another."""

    def __init__(self, used: FloatArray | IntArray, left: FloatArray) -> None:
        self._num_values = left.shape[1] if left.ndim == 2 else 1
        order = np.argsort(-left, axis=None)
        self._place = order // self._num_values
        self._used, self._left = used[self._place], left.ravel()[order]

    def tokens(self, count: int) -> float:
        is_in = self._place < count
        held = np.cumsum(self._used * is_in) + self._left * np.cumsum(is_in)
        return float(held.max(initial=0.0)) / self._num_values


def num_that_fit(
    state: StepState,
    growing: IntArray,
    index: IntArray,
    left: FloatArray,
    num_ahead: IntArray | int = 0,
    *,
    share: float = PLANNABLE,
) -> int:
    """How many waiting requests, from the front, keep the predicted peak inside the KV cache.

    Args:
        state: The step's state.
        growing: Rows that run on.
        index: Positions in `state.waiting` of the candidates, in the order of admission.
        left: Tokens that those in `growing` and the candidates will still add, as in `peak_tokens`.
        num_ahead: Of each of them, tokens in flight, which `left` does not count.
        share: Of the KV cache, that the peak may take.

    Returns:
        A count in [0, len(index)]; at least 1 when nothing else holds KV.
    """
    if not len(index):
        return 0
    rows = np.concatenate([growing, state.waiting[index]])
    peak = _Peak(state.table.num_prompt[rows] + state.table.num_output[rows] + num_ahead, left)
    capacity = state.num_blocks * state.block_size * share

    def fits(count: int) -> bool:
        return peak.tokens(len(growing) + count) <= capacity

    if fits(len(index)):
        return len(index)
    low, high = 0, len(index)  # fits(low) or low == 0; not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0 and not len(growing):
        return 1
    return low


def most_blocks(state: StepState, plan: StepPlan) -> int:
    """KV blocks that a step of this plan takes, at most."""
    num_tokens = plan.token_budget or state.max_num_tokens
    return len(state.running) * state.tokens_per_decode + num_tokens // state.block_size


def priority_victims(state: StepState) -> IntArray:
    """Running rows that must give way to waiting ones of a higher priority class.

    vLLM stops admitting when every slot is taken, whatever waits (vLLM issue 40004). Here, when
    no slot is free, each waiting request may displace one running request of a strictly lower
    class (larger number); the lowest class goes first, the latest arrival first within it.
    """
    table, rows = state.table, state.running
    if not state.has_classes or len(rows) < state.max_num_running:
        return rows[:0]
    if not len(rows) or not len(state.waiting):  # idle sessions may hold all slots
        return rows[:0]
    running, waiting = table.priority[rows], np.sort(table.priority[state.waiting])
    if waiting[0] >= running.max():
        return rows[:0]
    order = np.lexsort((-table.arrival_s[rows], -running))
    count = min(len(order), len(waiting))
    gives_way = waiting[:count] < running[order[:count]]
    victims: IntArray = rows[order[:count][gives_way]]
    return victims


def with_memory_victims(
    state: StepState,
    planned: StepPlan,
    plan: Callable[[StepState, IntArray], StepPlan],
    left_of: Callable[[IntArray], FloatArray],
    share: float = PLANNABLE,
) -> StepPlan | None:
    """A plan in which lower classes give way so that a higher one finds memory.

    Args:
        state: The step's state.
        planned: The plan in which nobody gives way for memory.
        plan: Plans the step without the rows that it is given.
        left_of, share: What the planner takes the peak of memory from, as in `num_that_fit`.

    Returns:
        None where `planned` stands: nobody waits for the memory of a lower class, or would be
        admitted in its place.
    """
    table, waiting, admit = state.table, state.waiting, planned.admit
    if not state.has_classes or not len(state.running) or not len(waiting) or admit is None:
        return None
    priority = table.priority
    highest = priority[waiting].min()
    if highest >= priority[state.running].max():
        return None
    admitted = admit[priority[admit] == highest]
    first = int(waiting[np.lexsort((table.arrival_s[waiting], priority[waiting]))[0]])
    if len(admitted):
        first = int(admitted[0])
        if _num_short(state, first) <= blocks_held(state, planned.preempt).sum():
            return None
    victims = _memory_victims(state, first, left_of, share)
    if not len(victims):
        return None
    better = plan(state, victims)
    is_useful = better.admit is not None and (priority[better.admit] == highest).any()
    return better if is_useful else None


def _memory_victims(
    state: StepState, first: int, left_of: Callable[[IntArray], FloatArray], share: float
) -> IntArray:
    """The fewest running rows without which a waiting one finds memory.

    They are of the lowest classes, the latest arrivals first. Its prompt fits into what is free
    then, and its predicted peak beside those of all who stay. None if it fits as it is, or not even
    in place of all that are below it.
    """
    table, rows = state.table, state.running
    lower = rows[table.priority[rows] > table.priority[first]]
    lower = lower[np.lexsort((-table.arrival_s[lower], -table.priority[lower]))]
    freed = np.concatenate([[0], blocks_held(state, lower).cumsum()])
    short = _num_short(state, first)
    (place,) = np.nonzero(state.waiting == first)

    def fits(count: int) -> bool:
        if freed[count] < short:
            return False
        stay = rows[~np.isin(rows, lower[:count])]
        left = left_of(np.append(stay, first))
        return num_that_fit(state, stay, place, left, share=share) == 1

    if fits(0) or not fits(len(lower)):
        return rows[:0]
    low, high = 0, len(lower)  # not fits(low); fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    victims: IntArray = lower[:high]
    return victims


def _num_short(state: StepState, row: int) -> int:
    """Blocks that the prompt of a waiting row takes beyond those that are free."""
    num_blocks = int(state.table.prefill_target[row]) // state.block_size + 1
    return num_blocks - state.num_free_soon


def blocks_held(state: StepState, rows: IntArray) -> IntArray:
    """KV blocks that running rows give back when they leave."""
    table = state.table
    tokens = np.where(
        table.phase[rows] == DECODE,
        table.num_prompt[rows] + table.num_output[rows],
        table.num_computed[rows],
    )
    blocks: IntArray = tokens // state.block_size
    return blocks


def with_useful_victims(
    state: StepState, victims: IntArray, plan: Callable[[StepState, IntArray], StepPlan]
) -> StepPlan:
    """The plan with as many of `victims` as have a request of a higher class admitted for them.

    A victim must not lose its KV for a request that then finds no memory, or the two would trade
    places at every step.
    """
    while len(victims):
        planned = plan(state, victims)
        admitted = state.waiting[:0] if planned.admit is None else planned.admit
        priority = state.table.priority
        count = min(len(victims), len(admitted))
        gains = priority[admitted[:count]] < priority[victims[:count]]
        useful = count if gains.all() else int(np.argmin(gains))
        if useful == len(victims):
            return planned
        victims = victims[:useful]
    return plan(state, victims)


def learning(state: StepState) -> StepPlan:
    """The engine's own schedule while step times are unknown; slots go by class already."""
    return StepPlan(preempt=priority_victims(state), is_settled=not len(state.waiting))


def without_targets(state: StepState) -> StepPlan:
    """The engine's own schedule: nobody has a target."""
    return StepPlan(is_settled=not len(state.waiting))
