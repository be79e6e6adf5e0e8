"""How much an engine wants the next turn: a number for its requests, the smaller the sooner.

`latest_start_s` is the rule of deadlines: when the engine's next step has to start, at the latest,
for all its requests that can still meet their targets. It is a time on the clock that all
processes of a machine share, so that engines can be compared, and the earliest goes first. Where
all can be met by some order of the steps, and steps are short, they are met by this one (earliest
deadline first).

`least_product_s2` is the rule of policies without targets: O_r, the least of which goes first.

Source: SeaLLM (Zhao et al.), section 4.2. There the next batch of all services is that of the
request with the least O_r = T'_r L_r (Eq. 7), remaining times execution time, which minimizes the
mean latency over execution time. Deadlines are ours.
"""

from __future__ import annotations

import math

import numpy as np

from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import (
    DECODE,
    FREE,
    PARKED,
    IntArray,
    LengthModel,
    RequestTable,
)
from sola_sched.cost.execution import ExecutionTime
from sola_sched.cost.model import CostModel


def urgency(goes_by_targets: bool, monitor: StateMonitor, now_s: float) -> float:
    """How much an engine wants its next turn.

    Args:
        goes_by_targets: As its policy says in `PolicyTraits`.
        monitor: What is known of its requests.
        now_s: The present, seconds.
    """
    table, lengths, cost = monitor.table, monitor.lengths, monitor.cost
    if goes_by_targets:
        return latest_start_s(table, lengths, cost, now_s)
    return least_product_s2(table, lengths, cost)


def urgency_of_a_waiter(
    goes_by_targets: bool, monitor: StateMonitor, now_s: float, shortest_ttft_s: float
) -> float:
    """As `urgency`; who waits sees no arrivals, so there may be one from now on."""
    unseen_s = now_s + shortest_ttft_s if goes_by_targets else math.inf
    return min(urgency(goes_by_targets, monitor, now_s), unseen_s)


def latest_start_s(
    table: RequestTable, lengths: LengthModel, cost: CostModel, now_s: float
) -> float:
    """When the next step must start for those alive to be in time, seconds on the table's clock.

    Args:
        table: The engine's requests.
        lengths: Output lengths to expect.
        cost: Its step times; while they are being learned, any request is urgent now.
        now_s: The present, seconds.

    Returns:
        May lie in the past; inf if no request has a target that it can still meet.
    """
    rows = _alive(table)
    if not len(rows):
        return math.inf
    if not cost.is_ready:
        return now_s if np.isfinite([table.ttft_s[rows], table.tpot_s[rows]]).any() else math.inf
    is_decode = table.phase[rows] == DECODE
    decodes, prefills = rows[is_decode], rows[~is_decode]
    context = float((table.num_prompt[decodes] + table.num_output[decodes]).sum())
    decode_s = float(cost.decode_s(len(decodes), context)) if len(decodes) else 0.0
    return now_s + min(
        _slack_of_decodes_s(table, decodes, lengths, decode_s, now_s),
        _slack_of_prefills_s(table, prefills, cost, decode_s, now_s),
    )


def least_product_s2(table: RequestTable, lengths: LengthModel, cost: CostModel) -> float:
    """The least O_r = T'_r L_r of the engine's requests, seconds squared; inf without requests.

    Source: SeaLLM, Eq. 7. L_r is the execution time by the step-time model and the expected length,
    in batches as large as now; the paper profiles it on one GPU, for a service as a whole.

    Args:
        table: The engine's requests.
        lengths: Output lengths to expect.
        cost: Step times; while they are being learned, any request goes first.
    """
    rows = _alive(table)
    if not len(rows):
        return math.inf
    if not cost.is_ready:
        return 0.0
    output, prompt = table.num_output[rows], table.num_prompt[rows]
    left = lengths.remaining(table.length_class[rows], output, table.max_tokens[rows])
    time = ExecutionTime.of(cost, float(len(rows)))
    has = table.num_computed[rows].astype(np.float64)
    target = np.maximum(table.prefill_target[rows], prompt)
    todo = np.where(table.phase[rows] == DECODE, 0.0, np.maximum(target - has, 1.0))
    remaining_s = time.prefill_s(todo, has) + time.decode_s(prompt + output, left)
    whole_s = time.prefill_s(prompt.astype(np.float64), np.zeros(len(rows))) + time.decode_s(
        prompt, output + left
    )
    return float((remaining_s * whole_s).min())


def _alive(table: RequestTable) -> IntArray:
    """Rows whose requests may be in the next step."""
    (rows,) = ((table.phase != FREE) & (table.phase != PARKED)).nonzero()
    return np.asarray(rows, dtype=np.int64)


def _slack_of_decodes_s(
    table: RequestTable, rows: IntArray, lengths: LengthModel, decode_s: float, now_s: float
) -> float:
    """Until the next token is due, or the last one that is expected, less what is left to compute.

    Token j after the first is due at ``first + j * TPOT``, as in `planner/attain`. The target is a
    mean, so a request that is behind may catch up by its end; it is lost if it would not even
    with every step from now on.
    """
    output = table.num_output[rows]
    first_s, tpot_s = table.first_token_s[rows], table.tpot_s[rows]
    next_s = first_s + tpot_s * output - now_s - decode_s
    left = lengths.remaining(table.length_class[rows], output, table.max_tokens[rows])
    gain_s = (left - 1.0) * np.where(np.isfinite(tpot_s), tpot_s - decode_s, 0.0)
    slack_s = np.where(next_s >= 0.0, next_s, next_s + gain_s)
    lost = (first_s > table.due_s[rows]) | (slack_s < 0.0)
    return float(slack_s[~lost].min(initial=math.inf))


def _slack_of_prefills_s(
    table: RequestTable, rows: IntArray, cost: CostModel, decode_s: float, now_s: float
) -> float:
    """The least time that prompts, one after the other by deadline, leave before their ends."""
    due_s = table.due_s[rows] - now_s
    again = table.num_output[rows] > 0  # displaced: its next token is due, not its first
    if again.any():
        back = rows[again]
        next_s = table.first_token_s[back] + table.tpot_s[back] * table.num_output[back] - now_s
        due_s[again] = np.where(table.first_token_s[back] > table.due_s[back], math.inf, next_s)
    target = np.maximum(table.prefill_target[rows], table.num_prompt[rows])
    has = table.num_computed[rows].astype(np.float64)
    need_s = cost.prefill_marginal_s(np.maximum(target - has, 1.0), has)
    extra_s = max(decode_s, float(cost.prefill_s(1.0)) - float(cost.prefill_marginal_s(1.0)))
    can = np.isfinite(due_s) & (again | (need_s + extra_s <= due_s))
    if not can.any():
        return math.inf
    due_s, need_s = due_s[can], need_s[can]
    order = np.argsort(due_s, kind="stable")
    return float((due_s[order] - np.cumsum(need_s[order])).min()) - extra_s
