"""What a fast engine knows: records of its requests, and lists of them.

A request is a slot, the index of its record. A list of slots is a row of `Engine.lists`, whose
first number is its length.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sola_sched.core.compiled import compiled
from sola_sched.prediction.length import NUM_LEVELS

#: Lists: those that wait, in order, and, for `sola_sched`, those that wait behind them, being late;
#: those that run, by admission, and of them the ones whose prompt is under way, that decode, that
#: are held, that are lost; decodes that may be on course; prompts that can be on time, by deadline,
#: and whose turn it is; the prompts of the steps under way; those that have ended in the last.
QUEUE, LATE, RUNNING, PREFILLS, DECODES, HELD, LOST, DUE, JOBS, TURN, CHUNKS, ENDED = range(12)
NUM_LISTS = 12

#: What an engine is and where it stands.
#:
#: - capacity, slots, budget: KV tokens, most requests that run, most tokens of a step.
#: - half_block: tokens that a request is taken to waste.
#: - is_slo, is_async: what it does; see `FastInstance`.
#: - step: steps so far.
#: - num_decodes, ctx, prefill_kv, held_kv: decodes, their KV, that of prompts under way and of
#:   those held, tokens.
#: - start_s, k, c1, c2: the steps under way began there, are k, and the first i of them take
#:   c1 i + c2 i^2 seconds.
#: - known_until_s: arrivals up to there may be scheduled in the next step.
#: - next_s: when something happens next.
#: - tightest_s, loosest_s: of the TPOT targets of those on course, less the margin; inf and -inf
#:   where nobody is.
#: - num_came, first_came_s, mean_prompt, mean_output: of recent traffic; see `RecentTraffic`.
ENGINE = np.dtype([
    ("capacity", "i8"), ("slots", "i8"), ("budget", "i8"), ("half_block", "f8"),
    ("is_slo", "?"), ("is_async", "?"), ("step", "i8"),
    ("num_decodes", "i8"), ("ctx", "i8"), ("prefill_kv", "i8"), ("held_kv", "i8"),
    ("start_s", "f8"), ("k", "i8"), ("c1", "f8"), ("c2", "f8"),
    ("known_until_s", "f8"), ("next_s", "f8"), ("tightest_s", "f8"), ("loosest_s", "f8"),
    ("num_came", "i8"), ("first_came_s", "f8"), ("mean_prompt", "f8"), ("mean_output", "f8"),
], align=True)  # fmt: skip

#: A request.
#:
#: - prompt_len, output_len: what it asks for, tokens.
#: - num_prompt: tokens to compute before the next token: the prompt, after a preemption with the
#:   output; num_computed: of them, computed.
#: - num_done: tokens delivered before it last began to decode, that token included.
#: - joined, ends: number of the step that delivered that token, and of the one that delivers its
#:   last.
#: - chunk: tokens of it in the steps under way.
#: - due_s: when its token in step 0 would have been due, if it is in `DUE`.
#: - runs, is_decoding, is_held, is_lost: which lists it is in.
REQUEST = np.dtype([
    ("prompt_len", "i8"), ("output_len", "i8"), ("num_prompt", "i8"), ("num_computed", "i8"),
    ("num_done", "i8"), ("joined", "i8"), ("ends", "i8"), ("chunk", "i8"),
    ("arrival_s", "f8"), ("ttft_s", "f8"), ("tpot_s", "f8"), ("first_s", "f8"), ("last_s", "f8"),
    ("due_s", "f8"), ("runs", "?"), ("is_decoding", "?"), ("is_held", "?"), ("is_lost", "?"),
    ("quantiles", "f8", (NUM_LEVELS,)),
], align=True)  # fmt: skip

#: Share of each target kept as a margin; the scheduler's default.
SAFETY = 0.05


class Engine(NamedTuple):
    """All of it.

    Attributes:
        at: Its record (`ENGINE`); as Python passes it in, an array of that record.
        requests: Records (`REQUEST`), [slots].
        lists: [`NUM_LISTS`, slots + 1].
        times: See `times.pack`.
    """

    at: Any
    requests: Any
    lists: Any
    times: Any


# Lists.


@compiled
def append(line, slot):
    line[0] += 1
    line[line[0]] = slot


@compiled
def insert(line, place, slot):
    """In front of the one at a place, counted from 1."""
    for i in range(line[0], place - 1, -1):
        line[i + 1] = line[i]
    line[place] = slot
    line[0] += 1


@compiled
def discard(line, slot):
    """Whether it was there."""
    for place in range(1, line[0] + 1):
        if line[place] == slot:
            for i in range(place, line[0]):
                line[i] = line[i + 1]
            line[0] -= 1
            return True
    return False


# Requests.


@compiled
def deadline_s(request):
    """When its prompt must end, less the margin; -inf if it goes on after a preemption."""
    if not math.isnan(request.first_s):
        return -math.inf
    return request.arrival_s + request.ttft_s * (1.0 - SAFETY)


@compiled
def push(e, slot):
    """It waits: behind those that came before, or for `sola_sched` those with earlier deadlines."""
    queue = e.lists[QUEUE]
    place = queue[0] + 1
    if e.at.is_slo:
        deadline = deadline_s(e.requests[slot])
        while place > 1 and deadline_s(e.requests[queue[place - 1]]) > deadline:
            place -= 1
    insert(queue, place, slot)


@compiled
def push_back(e, slot):
    """It waits again, after a preemption."""
    if not e.at.is_slo:
        insert(e.lists[QUEUE], 1, slot)
    elif e.requests[slot].is_lost:
        insert(e.lists[LATE], 1, slot)
    else:
        push(e, slot)


@compiled
def peek(e):
    """Who is next of those that wait; -1 if nobody may."""
    if e.lists[QUEUE, 0]:
        return e.lists[QUEUE, 1]
    if e.lists[LATE, 0] and not e.lists[HELD, 0]:
        return e.lists[LATE, 1]
    return -1


@compiled
def start(e, slot):
    """One that waits runs."""
    if not discard(e.lists[QUEUE], slot):
        discard(e.lists[LATE], slot)
    e.requests[slot].runs = True
    append(e.lists[RUNNING], slot)
    append(e.lists[PREFILLS], slot)


@compiled
def release(e, slot):
    """Take the place and the KV of one that runs."""
    request = e.requests[slot]
    discard(e.lists[RUNNING], slot)
    request.runs = False
    if request.is_held:
        e.at.held_kv -= request.num_computed
        request.is_held = False
        discard(e.lists[HELD], slot)
    elif request.is_decoding:
        e.at.num_decodes -= 1
        e.at.ctx -= request.num_computed + e.at.step - request.joined
        request.is_decoding = False
        discard(e.lists[DECODES], slot)
    else:
        e.at.prefill_kv -= request.num_computed
        discard(e.lists[PREFILLS], slot)


@compiled
def decode(e, slot):
    """One that runs begins to decode, or goes on."""
    request = e.requests[slot]
    e.at.num_decodes += 1
    e.at.ctx += request.num_computed
    request.is_decoding = True
    request.joined = e.at.step
    request.ends = e.at.step + request.output_len - request.num_done
    append(e.lists[DECODES], slot)


@compiled
def displace(e, slot, now_s):
    """Preempt: what it has computed is lost."""
    request = e.requests[slot]
    if request.is_decoding:
        request.num_done += e.at.step - request.joined
        request.last_s = now_s
    release(e, slot)
    request.num_prompt, request.num_computed = request.prompt_len + request.num_done, 0
    push_back(e, slot)


@compiled
def lose(e, slot):
    """It cannot attain any more."""
    if not e.requests[slot].is_lost:
        e.requests[slot].is_lost = True
        append(e.lists[LOST], slot)


@compiled
def used(e):
    """KV tokens taken."""
    wasted = e.at.half_block * e.lists[RUNNING, 0]
    return e.at.ctx + e.at.prefill_kv + wasted + e.at.held_kv


@compiled
def finds_room(e, slot):
    """Whether one that waits may start now."""
    promised = 0
    for other in e.lists[PREFILLS, 1 : e.lists[PREFILLS, 0] + 1]:
        promised += e.requests[other].num_prompt - e.requests[other].num_computed
    request = e.requests[slot]
    return (
        e.lists[RUNNING, 0] < e.at.slots
        and request.arrival_s <= e.at.known_until_s
        and used(e) + promised + request.num_prompt <= e.at.capacity
    )
