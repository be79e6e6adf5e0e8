"""What is done to records of the table, compiled: a new one, and sums over rows."""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import IntArray, Records, entry


@entry
def put(
    requests: Records,
    row: int,
    phase: int,
    serial: int,
    arrival_s: float,
    ttft_s: float,
    tpot_s: float,
    e2e_s: float,
    max_wait_s: float,
    weight: float,
    priority: int,
    service: int,
    length_class: int,
    queue_pos: int,
    num_prompt: int,
    num_cached: int,
    max_tokens: int,
) -> None:
    """Write the record of a request that has just come; as `RequestValues` where it is new."""
    request = requests[row]
    request.num_prompt, request.max_tokens = num_prompt, max_tokens
    request.num_output, request.num_in_flight, request.num_preemptions = 0, 0, 0
    request.num_computed, request.prefill_target = num_cached, num_prompt
    request.first_token_s, request.last_token_s = np.nan, np.nan
    request.arrival_s, request.ttft_s, request.due_s = arrival_s, ttft_s, arrival_s + ttft_s
    request.tpot_s, request.e2e_s, request.e2e_due_s = tpot_s, e2e_s, arrival_s + e2e_s
    request.served_by_s = arrival_s + max_wait_s
    request.weight, request.priority, request.service = weight, priority, service
    request.length_class, request.queue_pos = length_class, queue_pos
    request.phase, request.serial = phase, serial
    request.ewt_s, request.lost_s, request.need_s = np.nan, np.nan, np.nan
    request.predicted[:] = np.nan


@entry
def sum_tokens(requests: Records, rows: IntArray) -> int:
    """Prompt and output tokens of the rows, in sum."""
    total = 0
    for row in rows:
        total += requests[row].num_prompt + requests[row].num_output
    return total


@entry
def shortest_tpot_s(requests: Records, rows: IntArray) -> float:
    """The shortest TPOT target of the rows, inf for none."""
    shortest_s = np.inf
    for row in rows:
        shortest_s = min(shortest_s, requests[row].tpot_s)
    return shortest_s


def warm_up(requests: Records) -> None:
    """Compile what is not yet compiled."""
    none = np.empty(0, dtype=np.int64)
    sum_tokens(requests, none)
    shortest_tpot_s(requests, none)
