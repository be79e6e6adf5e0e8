"""What a fast engine knows: records of its requests, and lists of them.

The records are those of the planner (`core.state.REQUEST`), with what no scheduler may know beside
them (`TRUTH`). Both have the same rows. A list of rows is a row of `Engine.lists`, whose first
number is its length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.core.state import DECODE, FREE, PREFILL, WAITING

#: Lists: those that wait, in vLLM's order; those that run, by admission; the prompts of the steps
#: under way; those that have ended in the last.
QUEUE, RUNNING, CHUNKS, ENDED = range(4)
NUM_LISTS = 4

#: What an engine is and where it stands.
#:
#: - capacity, slots, budget: KV tokens, most requests that run, most tokens of a step.
#: - half_block: tokens that a request is taken to waste.
#: - is_slo, is_async: what it does; see `FastInstance`.
#: - num_limited, num_due: requests with any target, and with one for their last token.
#: - num_added: requests so far.
#: - kv: tokens of those that run.
#: - num_ending, kv_ending: requests that have ended, but take part in the next step too, and their
#:   KV: under async scheduling vLLM learns of an end after it has scheduled that step. Not those
#:   that end at their limit, which it knows beforehand.
#: - start_s, k, c1, c2: the steps under way began there, are k, and the first i of them take
#:   c1 i + c2 i^2 seconds.
#: - num_decodes, ctx: decodes of the steps under way, and their KV before the first of them; those
#:   that are ending are not counted.
#: - tokens, squares, pairs: of the prompts in it: the sums of tokens, of their squares, and of
#:   tokens x tokens that were computed before.
#: - known_until_s: arrivals up to there may be scheduled in the next step.
#: - next_s: when something happens next.
#: - elapsed_s: engine time since the last plan.
#: - num_done, num_steps, next_fit, is_fit_due: entries of `memory` of each kind of step so far;
#:   steps; after how many the step times are fitted again; whether that is to be done. See
#:   `learned`.
ENGINE = np.dtype([
    ("capacity", "i8"), ("slots", "i8"), ("budget", "i8"), ("half_block", "f8"),
    ("is_slo", "?"), ("is_async", "?"), ("num_limited", "i8"), ("num_due", "i8"),
    ("num_added", "i8"), ("kv", "i8"), ("num_ending", "i8"), ("kv_ending", "i8"),
    ("start_s", "f8"), ("k", "i8"), ("c1", "f8"), ("c2", "f8"), ("num_decodes", "i8"),
    ("ctx", "i8"), ("tokens", "i8"), ("squares", "f8"), ("pairs", "f8"),
    ("known_until_s", "f8"), ("next_s", "f8"), ("elapsed_s", "f8"),
    ("num_done", "i8", (3,)), ("num_steps", "i8"), ("next_fit", "i8"),
    ("is_fit_due", "?"),
], align=True)  # fmt: skip

#: What is known of a request beside its `REQUEST`.
#:
#: - output_len: tokens that it will have.
#: - chunk: tokens of its prompt in the steps under way.
#: - sits_out: it decodes, but not in the steps under way.
TRUTH = np.dtype([("output_len", "i8"), ("chunk", "i8"), ("sits_out", "?")], align=True)


class Engine(NamedTuple):
    """All of it.

    Attributes:
        at: Its record (`ENGINE`); as Python passes it in, an array of one.
        requests: Records (`REQUEST`), [rows]. Of a decode `num_computed` is its KV.
        truth: Records (`TRUTH`), [rows].
        lists: [`NUM_LISTS`, rows + 1].
        times: See `times.pack`.
        memory: Steps that are remembered; see `cost.memory`.
        plan, tuning, account, decodes, prefills, plan_lists: What plans are made of; see
            `planner.attain.records.Step`. The first three are arrays of one.
    """

    at: Any
    requests: Any
    truth: Any
    lists: Any
    times: Any
    memory: Any
    plan: Any
    tuning: Any
    account: Any
    decodes: Any
    prefills: Any
    plan_lists: Any


# In loops arrays are taken out of the engine first: each access to one of its fields counts
# references to that array.


# Lists.


@compiled
def append(line, row):
    line[0] += 1
    line[line[0]] = row


@compiled
def prepend(line, row):
    for place in range(line[0], 0, -1):
        line[place + 1] = line[place]
    line[1] = row
    line[0] += 1


@compiled
def discard(line, row):
    """Whether it was there."""
    for place in range(1, line[0] + 1):
        if line[place] == row:
            for i in range(place, line[0]):
                line[i] = line[i + 1]
            line[0] -= 1
            return True
    return False


@compiled
def rows_in(line):
    """The rows of a list."""
    return line[1 : line[0] + 1]


# Requests.


@compiled
def release(e, row):
    """Take the slot and the KV of one that runs."""
    discard(e.lists[RUNNING], row)
    e.at.kv -= e.requests[row].num_computed
    e.truth[row].sits_out = False


@compiled
def displace(e, row):
    """Preempt: what it has computed is lost, and it waits in front of the others."""
    release(e, row)
    request = e.requests[row]
    request.phase, request.num_computed = WAITING, 0
    request.prefill_target = request.num_prompt + request.num_output
    request.num_preemptions += 1
    prepend(e.lists[QUEUE], row)


@compiled
def forget(e, row):
    """It has gone, from wherever it was."""
    request = e.requests[row]
    if request.phase == PREFILL or request.phase == DECODE:
        release(e, row)
        discard(e.lists[CHUNKS], row)
    else:
        discard(e.lists[QUEUE], row)
    request.phase = FREE
    e.at.num_limited -= is_limited(request)
    e.at.num_due -= request.e2e_s < np.inf


@compiled
def is_limited(request):
    """Whether it has any target."""
    return min(request.ttft_s, request.tpot_s, request.e2e_s) < np.inf


@compiled
def takes_part(request, truth):
    """Whether one decodes in the steps under way."""
    return request.phase == DECODE and not truth.sits_out


@compiled
def used(e):
    """KV tokens taken when the next step is scheduled."""
    return e.at.kv + e.at.kv_ending + e.at.half_block * (e.lists[RUNNING, 0] + e.at.num_ending)


@compiled
def free_slots(e):
    """Slots that nobody holds then."""
    return e.at.slots - e.lists[RUNNING, 0] - e.at.num_ending


@compiled
def may_start(e, row):
    """Whether one that waits had come when the next step was scheduled."""
    return e.requests[row].arrival_s <= e.at.known_until_s


@compiled
def finds_room(e, row):
    """Whether one that waits may start now: its whole prompt, beside the chunks of this step."""
    chunks, truth = 0, e.truth
    for other in rows_in(e.lists[CHUNKS]):
        chunks += truth[other].chunk
    return (
        free_slots(e) > 0
        and may_start(e, row)
        and used(e) + chunks + e.requests[row].prefill_target <= e.at.capacity
    )
