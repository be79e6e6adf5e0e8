"""Estimated wait time (EWT): how long until a request that does not run will run.

Source: ALISE (Zhao and Wang, ICCAD 2024), Eq. 6 and 7: the execution time of all requests before
it, or the time until aging promotes it, whichever is less.

Departures, since requests run in batches and Eq. 6 adds their times as if they ran one by one:

- What a request waits for is a slot and KV blocks, and those before it hold a share of them each.
  The sum is over execution time x share: the serial sum divided by the parallelism that slots and
  blocks allow.
- That sum counts requests that will still be running when this one starts. The time at which
  enough slots and blocks will have been given back by those that run now is a second estimate,
  good for the first in the queue and far too long for the others. The smaller one counts.
- Nobody starts before the prompts before it are computed.
"""

from __future__ import annotations

import numpy as np

from sola_sched.core.state import (
    DECODE,
    BoolArray,
    FloatArray,
    IntArray,
    RequestTable,
    StepPlan,
    StepState,
)
from sola_sched.cost.execution import ExecutionTime


def update_waits(state: StepState, plan: StepPlan) -> None:
    """Write `RequestTable.ewt_s` of every running and waiting row. Call after planning.

    Not needed at every step: vectorised, but it asks for the lengths of all rows.
    """
    if not len(state.waiting) and plan.run is None and not len(plan.preempt):
        state.table.ewt_s[state.running] = 0.0  # all take part
        return
    order = queue_order(state) if plan.order is None else plan.order
    in_step = np.zeros(state.table.capacity, dtype=np.bool_)
    in_step[state.running if plan.run is None else plan.run] = True
    if plan.admit is not None:
        in_step[plan.admit] = True
    in_step[plan.preempt] = False
    waits_s = estimate_waits(state, order, in_step[order])
    if plan.promote_s is not None:
        np.minimum(waits_s, plan.promote_s, out=waits_s)
    state.table.ewt_s[order] = waits_s


def mean_and_longest(table: RequestTable) -> tuple[float, float]:
    """Mean and largest estimate over the live rows that wait or are held, seconds; 0 for none."""
    rows = np.fromiter(table.row_of.values(), np.int64, len(table))
    waits_s = table.ewt_s[rows]
    waits_s = waits_s[waits_s > 0.0]  # leaves out NaN
    return (float(waits_s.mean()), float(waits_s.max())) if len(waits_s) else (0.0, 0.0)


def queue_order(state: StepState) -> IntArray:
    """Rows in the order in which a deadline scheduler can be expected to serve them.

    By class; first those that run, then those whose TTFT deadline lies ahead, the earliest first,
    then those that have missed it, by arrival.
    """
    table = state.table
    rows = np.concatenate([state.running, state.waiting])
    due_s = table.due_s[rows]
    started = np.zeros(len(rows), dtype=np.bool_)
    started[: len(state.running)] = True
    on_time = started | (due_s > state.now_s)
    key_s = np.where(on_time & np.isfinite(due_s), due_s, table.arrival_s[rows])
    order: IntArray = rows[np.lexsort((key_s, ~on_time, ~started, table.priority[rows]))]
    return order


def estimate_waits(state: StepState, order: IntArray, in_step: BoolArray) -> FloatArray:
    """EWT of each row, Eq. 6 without the bound of Eq. 7.

    Args:
        state: The step's state.
        order: All running and waiting rows in order of service, [n].
        in_step: Those that take part in the step now, [n].

    Returns:
        Seconds [n]; 0 for rows in the step.
    """
    table, size = state.table, state.block_size
    if not len(order):
        return np.empty(0)
    is_running = np.zeros(table.capacity, dtype=np.bool_)
    is_running[state.running] = True
    holds_kv = is_running[order]
    left = state.remaining(order)
    is_decode = holds_kv & (table.phase[order] == DECODE)
    new = np.where(is_decode, 0, table.prefill_target[order] - table.num_computed[order])
    ctx = table.num_prompt[order] + table.num_output[order]
    num_running = max(1, int(in_step.sum()))
    time = ExecutionTime.of(state.cost, num_running)
    prefill_s = time.prefill_s(np.maximum(new, 0.0), table.num_computed[order].astype(np.float64))
    work_s = prefill_s + time.decode_s(ctx, left)
    # Its tokens come one per step of the whole batch.
    step_s = float(state.cost.decode_s(num_running, float(ctx[in_step].sum())))
    lasts_s = np.maximum(work_s, prefill_s + left * step_s)
    ready_s = _before(np.where(in_step, 0.0, prefill_s)) + prefill_s[in_step].sum()
    blocks = (ctx + 0.5 * left) / size + 0.5
    waits_s = np.maximum(
        _until_free(
            np.ones(len(order)), lasts_s, in_step, holds_kv,
            state.max_num_running, state.max_num_running - len(state.running),
        ),
        _until_free(
            blocks, lasts_s, in_step, holds_kv, state.num_blocks, state.num_free_blocks
        ),
    )  # fmt: skip
    # One that holds its slot and KV waits for the engine's time alone.
    result: FloatArray = np.where(holds_kv, _before(work_s), np.maximum(waits_s, ready_s))
    result[in_step] = 0.0
    return result


def _before(values: FloatArray) -> FloatArray:
    """Sum over all rows before each."""
    result: FloatArray = np.cumsum(values) - values
    return result


def _until_free(
    need: FloatArray,
    lasts_s: FloatArray,
    in_step: BoolArray,
    holds: BoolArray,
    capacity: float,
    num_free: float,
) -> FloatArray:
    """Seconds until each row finds `need` of a resource, those before it served first."""
    shared_s = _before(lasts_s * need) / max(capacity, 1.0)
    takes = np.where(holds | in_step, 0.0, need)
    wanted = np.cumsum(takes)
    num_free -= float(need[in_step & ~holds].sum())
    running = np.flatnonzero(in_step | holds)
    running = running[np.argsort(lasts_s[running], kind="stable")]
    freed = num_free + np.append(0.0, np.cumsum(need[running]))
    ends_s = np.append(np.append(0.0, lasts_s[running]), np.inf)
    first = np.searchsorted(freed, wanted - 1e-9, side="left")
    result: FloatArray = np.minimum(shared_s, ends_s[first])
    return result
