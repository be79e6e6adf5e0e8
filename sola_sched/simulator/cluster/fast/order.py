"""A step as vLLM schedules it: decodes, then prompts as they come, of those that it is shown."""

from __future__ import annotations

from sola_sched.compiled.functions import compiled
from sola_sched.core.state import DECODE, PREFILL
from sola_sched.simulator.cluster.fast.state import (
    CHUNKS,
    QUEUE,
    RUNNING,
    append,
    discard,
    displace,
    finds_room,
    rows_in,
    used,
)


@compiled
def schedule_all(e):
    """The step in vLLM's own order."""
    truth, num_before = e.truth, e.lists[QUEUE, 0]
    for row in rows_in(e.lists[RUNNING]):
        truth[row].sits_out = False
    room = schedule_running(e, rows_in(e.lists[RUNNING]).copy(), e.at.budget)
    if e.lists[QUEUE, 0] > num_before:
        return  # it lets nobody start in a step in which it has preempted somebody
    while room > 0 and e.lists[QUEUE, 0]:
        head = e.lists[QUEUE, 1]
        if not finds_room(e, head):
            break
        room -= start(e, head, room)


@compiled
def schedule_running(e, shown, budget):
    """Put those that run and are shown into the step, in this order; tokens that are left over.

    Whoever is last of them is preempted until each decode has room for a token.
    """
    requests, last = e.requests, len(shown) - 1
    e.lists[CHUNKS, 0] = num_decodes = 0
    for row in shown:
        num_decodes += requests[row].phase == DECODE
    while used(e) + num_decodes > e.at.capacity and last > 0:
        num_decodes -= requests[shown[last]].phase == DECODE
        displace(e, shown[last])
        last -= 1
    room = budget - num_decodes - e.at.num_ending
    for row in shown[: last + 1]:
        if requests[row].phase == PREFILL and room > 0:
            room -= take_chunk(e, row, room)
    return room


@compiled
def start(e, row, room):
    """One that waits runs, with a chunk of so many tokens at most; its tokens."""
    discard(e.lists[QUEUE], row)
    append(e.lists[RUNNING], row)
    e.requests[row].phase = PREFILL
    return take_chunk(e, row, room)


@compiled
def take_chunk(e, row, most):
    """Put a chunk of a prompt into the step; its tokens."""
    request = e.requests[row]
    tokens = min(most, request.prefill_target - request.num_computed)
    e.truth[row].chunk = tokens
    append(e.lists[CHUNKS], row)
    return tokens
