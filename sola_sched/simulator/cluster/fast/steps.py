"""What a fast engine does from one event to the next.

Between an arrival, an end and a prompt, all that an engine does is one decode step after the
other, each a little longer than the one before. Their sum has a closed form, so what is paid for
is the event, not the step.
"""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import compiled, entry
from sola_sched.core.state import DECODE, WAITING
from sola_sched.prediction.length import NUM_LEVELS
from sola_sched.simulator.cluster.fast.learned import note_steps, settled_steps
from sola_sched.simulator.cluster.fast.order import schedule_all
from sola_sched.simulator.cluster.fast.plans import SETTLED, STALLED, schedule_planned
from sola_sched.simulator.cluster.fast.state import (
    CHUNKS,
    ENDED,
    QUEUE,
    RUNNING,
    Engine,
    append,
    forget,
    is_limited,
    may_start,
    rows_in,
    takes_part,
    used,
)
from sola_sched.simulator.cluster.fast.times import decode_line, step_s


@entry
def add(
    row, prompt_len, output_len, max_tokens, ttft_s, tpot_s, e2e_s, weight, max_wait_s, arrival_s,
    quantiles, now_s, engine, requests, truth, lists, times, memory, plan, tuning, account, decodes,
    prefills, plan_lists,
):  # fmt: skip
    """A request comes, into a free row.

    Returns:
        When the engine has to be advanced next.
    """
    e = Engine(
        engine[0], requests, truth, lists, times, memory, plan, tuning, account, decodes, prefills,
        plan_lists,
    )  # fmt: skip
    at, request = e.at, requests[row]
    request.num_prompt = request.prefill_target = prompt_len
    request.num_output = request.num_computed = request.num_preemptions = 0
    request.max_tokens, request.phase, request.serial = max_tokens, WAITING, at.num_added
    request.ttft_s, request.tpot_s, request.e2e_s = ttft_s, tpot_s, e2e_s
    request.due_s, request.e2e_due_s = arrival_s + ttft_s, arrival_s + e2e_s
    request.arrival_s, request.weight = arrival_s, weight
    request.served_by_s, request.lost_s = arrival_s + max_wait_s, math.nan
    request.first_token_s = request.last_token_s = math.nan
    request.predicted[:] = quantiles
    truth[row].output_len, truth[row].chunk, truth[row].sits_out = output_len, 0, False
    at.num_added += 1
    at.num_limited += is_limited(request)
    at.num_due += e2e_s < np.inf
    append(lists[QUEUE], row)
    if math.isinf(at.next_s):
        at.next_s, at.known_until_s = now_s, math.inf
    elif at.k > 1 and (at.is_slo or lists[RUNNING, 0] < at.slots):
        # The first step that ends after now is the last, or under async scheduling the next.
        steps = math.ceil(_steps_in(e, now_s - at.start_s) - 1e-9)
        at.k = min(at.k, max(1, steps) + (1 if at.is_async else 0))
        at.next_s = _boundary_s(e, at.k)
    return at.next_s


@entry
def remove(row, engine, *rest):
    """Forget a request, wherever it is."""
    e = Engine(engine[0], *rest)
    if e.at.k and takes_part(e.requests[row], e.truth[row]):
        e.at.num_decodes -= 1
        e.at.ctx -= e.requests[row].num_computed
    forget(e, row)


@entry
def advance(
    now_s, engine, requests, truth, lists, times, memory, plan, tuning, account, decodes, prefills,
    plan_lists,
):  # fmt: skip
    """The steps under way are done, and the next are decided on.

    If requests have ended, which `ENDED` lists, it has to be called again for the second part: what
    has been served counts for what comes.

    Returns:
        How many have ended, and when the engine has to be advanced next.
    """
    e = Engine(
        engine[0], requests, truth, lists, times, memory, plan, tuning, account, decodes, prefills,
        plan_lists,
    )  # fmt: skip
    ended = e.lists[ENDED]
    if ended[0]:
        ended[0] = 0
    elif e.at.k:
        _finish(e, now_s)
    if not ended[0]:
        _begin(e, now_s)
    return ended[0], e.at.next_s


@compiled
def _finish(e, now_s):
    """The steps under way are done."""
    at, requests, truth, chunks = e.at, e.requests, e.truth, e.lists[CHUNKS]
    took_s = _boundary_s(e, at.k) - at.start_s
    at.known_until_s = _boundary_s(e, at.k - 1) if at.is_async else math.inf
    at.elapsed_s += took_s
    if at.is_slo:
        note_steps(e, took_s)
    for row in rows_in(e.lists[RUNNING]):
        request = requests[row]
        if takes_part(request, truth[row]):
            request.num_output += at.k
            request.num_computed += at.k
            request.last_token_s = now_s
            at.kv += at.k
    at.k = at.num_ending = at.kv_ending = 0
    for row in rows_in(chunks):
        request, chunk = requests[row], truth[row].chunk
        request.num_computed += chunk
        at.kv += chunk
        if request.num_computed == request.prefill_target:
            _begin_to_decode(request, now_s)
    _end_all(e, chunks)
    _end_all(e, e.lists[RUNNING])
    chunks[0] = 0


@compiled
def _begin_to_decode(request, now_s):
    """Book the token at the end of a prompt."""
    request.phase = DECODE
    request.num_output += 1
    request.last_token_s = now_s
    if math.isnan(request.first_token_s):
        request.first_token_s = now_s


@compiled
def _end_all(e, line):
    """End those of a list that have their last token."""
    place, requests, truth = 1, e.requests, e.truth
    while place <= line[0]:
        row = line[place]
        request = requests[row]
        if request.num_output < truth[row].output_len:
            place += 1
            continue
        if e.at.is_async and request.num_output < request.max_tokens:
            e.at.num_ending += 1
            e.at.kv_ending += request.num_computed
        forget(e, row)
        append(e.lists[ENDED], row)


@compiled
def _begin(e, now_s):
    """Decide on the next steps."""
    at, holds = e.at, True
    while True:
        holds = _schedule(e, now_s)
        if _measure(e) or not e.lists[QUEUE, 0] or math.isinf(at.known_until_s):
            break
        # Nothing is under way that what has come would have to wait for.
        at.known_until_s = math.inf
    at.start_s, at.next_s = now_s, math.inf
    if e.lists[CHUNKS, 0]:
        at.k, at.c1, at.c2 = 1, _mixed_step_s(e), 0.0
    elif at.num_decodes + at.num_ending:
        at.k = _num_steps(e) if holds else 1
        num_decodes, ctx = at.num_decodes + at.num_ending, at.ctx + at.kv_ending
        constant_s, slope = decode_line(e.times, num_decodes)
        at.c2 = 0.5 * slope * num_decodes
        at.c1 = constant_s + slope * ctx - at.c2
    if at.k:
        at.next_s = _boundary_s(e, at.k)


@compiled
def _schedule(e, now_s):
    """Fill the next step; whether the same holds for those after it, while nobody comes or ends."""
    is_planned = e.at.is_slo and e.at.num_limited > 0
    if is_planned:
        found = schedule_planned(e, now_s)
        if found != STALLED:
            return found == SETTLED
    schedule_all(e)
    return not is_planned


@compiled
def _measure(e):
    """Sum up who takes part in the next step; whether anybody does."""
    at, requests, truth = e.at, e.requests, e.truth
    at.num_decodes = at.ctx = at.tokens = 0
    at.squares = at.pairs = 0.0
    for row in rows_in(e.lists[RUNNING]):
        if takes_part(requests[row], truth[row]):
            at.num_decodes += 1
            at.ctx += requests[row].num_computed
    for row in rows_in(e.lists[CHUNKS]):
        chunk = truth[row].chunk
        at.tokens += chunk
        at.squares += float(chunk * chunk)
        at.pairs += float(chunk * requests[row].num_computed)
    return at.num_decodes + at.num_ending + at.tokens > 0


@compiled
def _mixed_step_s(e):
    """Time of a step with prompts. A chunk of one token takes what a decode takes."""
    at, requests, truth, num_ones, ctx_ones = e.at, e.requests, e.truth, 0, 0
    for row in rows_in(e.lists[CHUNKS]):
        if truth[row].chunk == 1:
            num_ones += 1
            ctx_ones += requests[row].num_computed
    return step_s(
        e.times, at.num_decodes + at.num_ending + num_ones, at.ctx + at.kv_ending + ctx_ones,
        at.tokens - num_ones, at.squares - num_ones, at.pairs - ctx_ones,
        e.lists[CHUNKS, 0] - num_ones,
    )  # fmt: skip


@compiled
def _num_steps(e):
    """Decode steps until something changes by itself."""
    at, lists, requests, truth = e.at, e.lists, e.requests, e.truth
    if at.num_ending:
        return 1
    steps = 1 << 40
    for row in rows_in(lists[RUNNING]):
        if requests[row].phase == DECODE:
            steps = min(steps, truth[row].output_len - requests[row].num_output)
    steps = min(steps, max(1, int((at.capacity - used(e)) / at.num_decodes)))
    queue = lists[QUEUE]
    if queue[0] and (at.is_slo or lists[RUNNING, 0] < at.slots):
        # The planner looks at all that wait, vLLM at the first.
        newest = queue[queue[0] if at.is_slo else 1]
        if not may_start(e, newest):
            return 1  # it could not be scheduled in this step; perhaps in the next
    if at.is_slo and at.num_limited:
        steps = min(steps, settled_steps(e))
    return steps


# What is asked in between.


@entry
def progress(row, now_s, engine, *rest):
    """Tokens of a request that have been delivered, and when the first and the last was."""
    e = Engine(engine[0], *rest)
    request = e.requests[row]
    if math.isnan(request.first_token_s):
        return 0, 0.0, 0.0
    steps = _steps_done(e, now_s) if takes_part(request, e.truth[row]) else 0
    last_s = _boundary_s(e, steps) if steps else request.last_token_s
    return request.num_output + steps, request.first_token_s, last_s


@entry
def rows(now_s, engine, *rest):
    """What a report is made of.

    Returns:
        KV tokens in use, then of those that wait and of those that run: a row for each attribute of
        `Row` but the quantiles and the targets, which are two rows, [7, n]; quantiles [n, 10].
    """
    e = Engine(engine[0], *rest)
    at, steps = e.at, _steps_done(e, now_s)
    waiting, running = rows_in(e.lists[QUEUE]), rows_in(e.lists[RUNNING])
    if at.is_slo:
        waiting = waiting[np.argsort(e.requests[waiting]["arrival_s"], kind="mergesort")]
    num_used = at.kv + at.half_block * len(running) + steps * at.num_decodes
    for row in rows_in(e.lists[CHUNKS]):
        # vLLM has taken blocks for them, and under async scheduling for the next ones.
        left = e.requests[row].prefill_target - e.requests[row].num_computed
        num_used += min(left, (2 if at.is_async else 1) * e.truth[row].chunk)
    num_used = min(int(num_used), at.capacity)
    return num_used, *_rows_of(e, waiting, 0), *_rows_of(e, running, steps)


@compiled
def _rows_of(e, chosen, steps):
    rows, quantiles = np.empty((7, len(chosen))), np.empty((len(chosen), NUM_LEVELS))
    requests, truth = e.requests, e.truth
    for i, row in enumerate(chosen):
        request = requests[row]
        more = steps if takes_part(request, truth[row]) else 0
        rows[0, i] = request.prefill_target
        rows[1, i] = request.num_computed + more
        rows[2, i] = request.num_output + more
        rows[3, i], rows[4, i] = request.ttft_s, request.tpot_s
        rows[5, i], rows[6, i] = request.arrival_s, request.first_token_s
        quantiles[i] = request.predicted
    return rows, quantiles


@compiled
def _steps_done(e, now_s):
    """Of the steps under way, those that have been delivered."""
    return min(e.at.k - 1, int(_steps_in(e, now_s - e.at.start_s))) if e.at.k else 0


@compiled
def _boundary_s(e, steps):
    return e.at.start_s + steps * (e.at.c1 + steps * e.at.c2)


@compiled
def _steps_in(e, seconds):
    """Steps, as a real number, that take so long."""
    if seconds <= 0.0:
        return 0.0
    c1, c2 = e.at.c1, e.at.c2
    if c2 < 1e-15:
        return seconds / c1
    return (math.sqrt(c1 * c1 + 4.0 * c2 * seconds) - c1) / (2.0 * c2)
