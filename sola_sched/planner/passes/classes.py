"""Priority classes are strict, whatever a plan is made of: the last look at every plan.

Planners order and admit by class themselves. Here a class gets what a lower one would have taken
from it in the step: the engine serves running requests before waiting ones, takes KV from the end
of what it is shown, and never from a request that sits the step out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sola_sched.core.state import DECODE, IntArray, StepPlan, StepState, blocks_of_step
from sola_sched.planner.base import blocks_held
from sola_sched.planner.passes.budgets import chunks

#: Above every class.
_NOBODY = np.iinfo(np.int64).min


def in_class_order(state: StepState, plan: StepPlan) -> StepPlan:
    """The plan, so that no class loses KV, its place in the step or a slot to a lower one.

    - Whoever runs is served, and keeps its KV, in the order of classes.
    - A running request takes part if anybody of a lower class does.
    - A prefill of a lower class that has begun waits where it would take the tokens of one that
      is admitted, and nobody is admitted past a waiting request of a higher class.
    - A prefill that has begun takes no tokens of the decodes behind it, unless others before it
      that are computed whole take more than it is to have.
    - Requests of a lower class that sit out leave when the KV memory may not do for the others.

    Args:
        state: The step's state.
        plan: A planner's; not changed. One without any order is the engine's own affair.
    """
    is_neutral = plan.run is None and plan.admit is None and plan.token_budget is None
    if not state.has_classes or is_neutral:
        return plan
    budget = plan.token_budget or state.max_num_tokens
    stay = state.running
    if len(plan.preempt):
        stay = stay[~np.isin(stay, plan.preempt)]
    admit = _admitted(state, plan.admit)
    all_decode = plan.run is None and state.are_decodes
    if all_decode and len(stay) * state.tokens_per_decode <= budget:
        # All are served, and the engine's own victim is of the lowest class.
        return dataclasses.replace(plan, admit=admit)
    run = stay if plan.run is None else plan.run[np.isin(plan.run, stay)]
    admit = _without_those_in_the_way(state, stay, run, admit)
    run, num_more = _with_uppers(state, stay, run, admit)
    budget = min(state.max_num_tokens, budget + num_more * state.tokens_per_decode)
    run, admit = _without_lower_prefills(state, run, admit, budget)
    fitting, cap = _beside_decodes(state, run, budget, plan.prefill_cap)
    if len(fitting) < len(run):
        out = state.table.priority[run[~np.isin(run, fitting)]]
        run, admit = fitting, admit[state.table.priority[admit] <= out.min()]
    leaving = _leaving(state, stay, run, budget, plan.preempt)
    if len(leaving):
        run = run[~np.isin(run, leaving)]
    if not len(run) and not len(admit):
        return StepPlan(problem="stalled", reject=plan.reject)
    return dataclasses.replace(
        plan,
        run=run,
        admit=admit,
        token_budget=None if plan.token_budget is None else budget,
        prefill_cap=cap,
        preempt=np.concatenate([plan.preempt, leaving]) if len(leaving) else plan.preempt,
    )


def _by_class(state: StepState, rows: IntArray) -> IntArray:
    """The rows by class, otherwise as they come."""
    ordered: IntArray = rows[state.table.priority[rows].argsort(kind="stable")]
    return ordered


def _admitted(state: StepState, admit: IntArray | None) -> IntArray:
    """By class, up to that of the first waiting request that is left out."""
    priority = state.table.priority
    if admit is None:
        admit = state.waiting[state.table.queue_pos[state.waiting].argsort()]
    out = state.waiting[~np.isin(state.waiting, admit)]
    if len(out):
        admit = admit[priority[admit] <= priority[out].min()]
    return _by_class(state, admit)


def _without_those_in_the_way(
    state: StepState, stay: IntArray, run: IntArray, admit: IntArray
) -> IntArray:
    """Those to admit, without the classes below decodes that sit out for a prompt of a higher one.

    Else these would take part, as nobody waits for a lower class, and leave the prompt no tokens.
    """
    table = state.table
    priority, is_decode = table.priority, table.phase[stay] == DECODE
    held = priority[stay[is_decode & ~np.isin(stay, run)]]
    if not len(held) or not (priority[admit] > held.min()).any():
        return admit
    prefills = np.concatenate([run[table.phase[run] != DECODE], admit])
    prefills = prefills[priority[prefills] < held.min()]
    tokens = int(np.count_nonzero(is_decode)) * state.tokens_per_decode
    if not len(prefills) or tokens + int(chunks(state, prefills).sum()) <= state.max_num_tokens:
        return admit
    left: IntArray = admit[priority[admit] <= held.min()]
    return left


def _with_uppers(
    state: StepState, stay: IntArray, run: IntArray, admit: IntArray
) -> tuple[IntArray, int]:
    """Those that run, by class, with all above the lowest that takes part; how many decodes more.

    A prefill is only in the way of another prefill.
    """
    table = state.table
    held = stay[~np.isin(stay, run)]
    is_decode = table.phase[held] == DECODE
    part = table.priority[np.concatenate([run, admit])]
    prefills = table.priority[np.concatenate([run[table.phase[run] != DECODE], admit])]
    lowest = np.where(is_decode, part.max(initial=_NOBODY), prefills.max(initial=_NOBODY))
    is_above = table.priority[held] < lowest
    more = held[is_above]
    return _by_class(state, np.concatenate([run, more])), int(is_decode[is_above].sum())


def _without_lower_prefills(
    state: StepState, run: IntArray, admit: IntArray, budget: int
) -> tuple[IntArray, IntArray]:
    """Without the prefills that would take the tokens of a higher class that is to start."""
    table = state.table
    is_prefill = table.phase[run] != DECODE
    if not len(admit) or not is_prefill.any():
        return run, admit
    is_lower = is_prefill & (table.priority[run] > table.priority[admit[0]])
    if not is_lower.any():
        return run, admit
    uppers = admit[table.priority[admit] < table.priority[run[is_lower]].max()]
    need = int(np.count_nonzero(~is_prefill)) * state.tokens_per_decode
    need += int(chunks(state, np.concatenate([run[is_prefill], uppers])).sum())
    if need <= budget:
        return run, admit
    return run[~is_lower], admit[table.priority[admit] <= table.priority[run[is_lower]].min()]


def _beside_decodes(
    state: StepState, run: IntArray, budget: int, cap: int | None
) -> tuple[IntArray, int | None]:
    """Who runs, and the most tokens of a prefill, so that the decodes behind it find theirs.

    The engine serves them in this order, and gives a prefill all that is left. The first that is to
    get a part of its tokens is kept to it, and those behind it sit out, unless it would also cut
    longer ones before it.
    """
    is_prefill = state.table.phase[run] != DECODE
    (places,) = is_prefill.nonzero()
    num_decodes = len(run) - len(places)
    room = budget - num_decodes * state.tokens_per_decode
    if not len(places) or places[0] >= num_decodes or room <= 0:
        return run, cap
    tokens = chunks(state, run[places])
    if cap is not None:
        tokens = np.minimum(tokens, cap)
    ends = tokens.cumsum()
    if ends[-1] <= room:
        return run, cap
    num_whole = int(ends.searchsorted(room, side="right"))
    part = room - int(tokens[:num_whole].sum())
    if part < tokens[:num_whole].max(initial=1):
        return run, cap
    return np.delete(run, places[num_whole + 1 :]), part


def _leaving(
    state: StepState, stay: IntArray, run: IntArray, budget: int, preempt: IntArray
) -> IntArray:
    """Those of the lowest classes down to ones that sit out and whose KV others may need now."""
    table, size = state.table, state.block_size
    is_held = ~np.isin(stay, run)
    if not len(run) or not (table.priority[stay[is_held]] > table.priority[run].min()).any():
        return stay[:0]
    is_decode = table.phase[run] == DECODE
    ahead = np.zeros(table.capacity, dtype=np.int64)
    ahead[state.running] = state.num_ahead
    decodes = run[is_decode]
    ctx = table.num_prompt[decodes] + table.num_output[decodes] + ahead[decodes]
    need = int(blocks_of_step(ctx, state.tokens_per_decode, size).sum())
    prefills = run[~is_decode]
    new = int((table.prefill_target[prefills] - table.num_computed[prefills]).sum())
    need += min(new, budget) // size + 2 * len(prefills)
    short = need - state.num_free_soon - int(blocks_held(state, preempt).sum())
    if short <= 0:
        return stay[:0]
    order = np.lexsort((-table.arrival_s[stay], ~is_held, -table.priority[stay]))
    count = int(blocks_held(state, stay[order]).cumsum().searchsorted(short)) + 1
    order = order[:count][table.priority[stay[order[:count]]] > table.priority[run].min()]
    # The last of these that run are left to the engine.
    (held,) = is_held[order].nonzero()
    leaving: IntArray = stay[order[: int(held[-1]) + 1 if len(held) else 0]]
    return leaving
