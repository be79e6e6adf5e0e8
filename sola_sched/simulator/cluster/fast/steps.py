"""What a fast engine does from one event to the next.

Between an arrival, an end and a prompt, all that an engine does is one decode step after the
other, each a little longer than the one before. Their sum has a closed form, so what is paid for
is the event, not the step.
"""

from __future__ import annotations

import math

import numpy as np

from sola_sched.core.compiled import compiled, entry
from sola_sched.prediction.length import NUM_LEVELS
from sola_sched.simulator.cluster.fast import course, prompts
from sola_sched.simulator.cluster.fast.state import (
    CHUNKS,
    DECODES,
    DUE,
    ENDED,
    HELD,
    LATE,
    LOST,
    PREFILLS,
    QUEUE,
    RUNNING,
    TURN,
    Engine,
    append,
    decode,
    discard,
    displace,
    finds_room,
    peek,
    push,
    release,
    start,
    used,
)
from sola_sched.simulator.cluster.fast.times import decode_line, step_s


@entry
def add(
    engine, requests, lists, times, slot, prompt_len, output_len, ttft_s, tpot_s, arrival_s,
    quantiles, now_s,
):  # fmt: skip
    """A request comes, into a free slot.

    Returns:
        When the engine has to be advanced next.
    """
    e = Engine(engine[0], requests, lists, times)
    request = e.requests[slot]
    request.prompt_len, request.output_len, request.num_prompt = prompt_len, output_len, prompt_len
    request.num_computed = request.num_done = request.joined = request.ends = request.chunk = 0
    request.arrival_s, request.ttft_s, request.tpot_s = arrival_s, ttft_s, tpot_s
    request.first_s = request.last_s = request.due_s = math.nan
    request.runs = request.is_decoding = request.is_held = request.is_lost = False
    request.quantiles[:] = quantiles
    push(e, slot)
    at = e.at
    if math.isinf(at.next_s):
        at.next_s, at.known_until_s = now_s, math.inf
    elif at.k > 1 and e.lists[RUNNING, 0] < at.slots:
        # The first step that ends after now is the last, or under async scheduling the next.
        steps = math.ceil(_steps_in(e, now_s - at.start_s) - 1e-9)
        at.k = min(at.k, max(1, steps) + (1 if at.is_async else 0))
        at.next_s = _boundary_s(e, at.k)
    return at.next_s


@entry
def remove(engine, requests, lists, times, slot):
    """Forget a request, wherever it is."""
    e = Engine(engine[0], requests, lists, times)
    if requests[slot].runs:
        release(e, slot)
        discard(lists[CHUNKS], slot)
    elif not discard(lists[QUEUE], slot):
        discard(lists[LATE], slot)
    _forget(e, slot)


@entry
def advance(engine, requests, lists, times, now_s):
    """The steps under way are done, and the next are decided on.

    If requests have ended, which `ENDED` lists, it has to be called again for the second part: what
    has been served counts for what comes.

    Returns:
        How many have ended, and when the engine has to be advanced next.
    """
    e = Engine(engine[0], requests, lists, times)
    if lists[ENDED, 0]:
        lists[ENDED, 0] = 0
    elif e.at.k:
        _finish(e, now_s)
    if not lists[ENDED, 0]:
        _begin(e, now_s)
    return lists[ENDED, 0], e.at.next_s


@compiled
def _finish(e, now_s):
    """The steps under way are done."""
    at, lists, requests = e.at, e.lists, e.requests
    last_start_s = _boundary_s(e, at.k - 1)
    at.known_until_s = last_start_s if at.is_async else math.inf
    at.step += at.k
    at.ctx += at.k * at.num_decodes
    at.k = 0
    for slot in lists[CHUNKS, 1 : lists[CHUNKS, 0] + 1]:
        request = requests[slot]
        request.num_computed += request.chunk
        at.prefill_kv += request.chunk
        if request.num_computed == request.num_prompt:
            _begin_to_decode(e, slot, now_s)
    lists[CHUNKS, 0] = 0
    place = 1
    while place <= lists[DECODES, 0]:
        slot = lists[DECODES, place]
        if requests[slot].ends <= at.step:
            _end(e, slot)
        else:
            place += 1


@compiled
def _begin_to_decode(e, slot, now_s):
    """Book the token at the end of a prompt; perhaps it is the last one."""
    request = e.requests[slot]
    discard(e.lists[PREFILLS], slot)
    e.at.prefill_kv -= request.num_computed
    request.num_done += 1
    request.last_s = now_s
    if math.isnan(request.first_s):
        request.first_s = now_s
    decode(e, slot)
    if request.ends == e.at.step:
        _end(e, slot)
    elif e.at.is_slo:
        course.join(e, slot)


@compiled
def _end(e, slot):
    release(e, slot)
    _forget(e, slot)
    append(e.lists[ENDED], slot)


@compiled
def _forget(e, slot):
    discard(e.lists[DUE], slot)
    if e.requests[slot].is_lost:
        discard(e.lists[LOST], slot)


@compiled
def _begin(e, now_s):
    """Decide on the next steps."""
    is_decided = False
    while not is_decided:
        if e.at.is_slo:
            prompts.keep_on_course(e, now_s)
        is_decided = _decide(e, now_s)
    if e.lists[HELD, 0] and math.isinf(e.at.next_s):
        # Nobody else has anything to do.
        prompts.resume(e, math.inf)
        _decide(e, now_s)


@compiled
def _decide(e, now_s):
    """The next steps; False if there are none, but would be if asked again."""
    at = e.at
    _make_room(e, now_s)
    _schedule_prompts(e, now_s)
    at.start_s = now_s
    chunks = e.lists[CHUNKS]
    if chunks[0]:
        tokens = squares = pairs = 0
        for slot in chunks[1 : chunks[0] + 1]:
            chunk = e.requests[slot].chunk
            tokens += chunk
            squares += chunk * chunk
            pairs += chunk * e.requests[slot].num_computed
        at.k, at.c2 = 1, 0.0
        at.c1 = step_s(e.times, at.num_decodes, at.ctx, tokens, squares, pairs, chunks[0])
    elif at.num_decodes:
        at.k = _num_steps(e)
        constant_s, slope = decode_line(e.times, at.num_decodes)
        at.c2 = 0.5 * slope * at.num_decodes
        at.c1 = constant_s + slope * at.ctx - at.c2
    elif at.known_until_s < math.inf and peek(e) >= 0:
        # Nothing is under way that what has come would have to wait for.
        at.known_until_s = math.inf
        return False
    else:
        at.next_s = math.inf
        return True
    at.next_s = _boundary_s(e, at.k)
    return True


@compiled
def _make_room(e, now_s):
    """Preempt the youngest until each decode has room for a token; those that are held first."""
    held, running = e.lists[HELD], e.lists[RUNNING]
    while held[0] and used(e) + e.at.num_decodes > e.at.capacity:
        displace(e, held[held[0]], now_s)
    while used(e) + e.at.num_decodes > e.at.capacity and running[0] > 1:
        displace(e, running[running[0]], now_s)


@compiled
def _schedule_prompts(e, now_s):
    """List the chunks of the next step."""
    room = prompts.room(e, now_s) if e.at.is_slo else e.at.budget - e.at.num_decodes
    e.lists[CHUNKS, 0] = 0
    for slot in e.lists[TURN, 1 : e.lists[TURN, 0] + 1]:
        if room <= 0:
            break
        if not e.requests[slot].runs:
            if not finds_room(e, slot):
                continue
            start(e, slot)
        room -= _take_chunk(e, slot, room)
    if e.lists[CHUNKS, 0]:
        return
    # Those that have begun, then the head of the queue; also if nobody whose turn it is finds room.
    for slot in e.lists[PREFILLS, 1 : e.lists[PREFILLS, 0] + 1]:
        if room > 0:
            room -= _take_chunk(e, slot, room)
    while room > 0:
        head = peek(e)
        if head < 0 or not finds_room(e, head):
            break
        start(e, head)
        room -= _take_chunk(e, head, room)


@compiled
def _take_chunk(e, slot, room):
    request = e.requests[slot]
    request.chunk = min(room, request.num_prompt - request.num_computed)
    append(e.lists[CHUNKS], slot)
    return request.chunk


@compiled
def _num_steps(e):
    """Decode steps until something changes by itself."""
    at = e.at
    steps = 1 << 40
    for slot in e.lists[DECODES, 1 : e.lists[DECODES, 0] + 1]:
        steps = min(steps, e.requests[slot].ends - at.step)
    steps = min(steps, max(1, int((at.capacity - used(e)) / at.num_decodes)))
    # Decode steps until the bank holds a chunk.
    quiet = 2 if at.is_slo else steps
    if e.lists[PREFILLS, 0]:
        # There was no room for the rest of a prompt; perhaps there is in the next step.
        steps = min(steps, quiet)
    else:
        head = peek(e)
        if head >= 0 and e.lists[RUNNING, 0] < at.slots:
            # It could not be scheduled in this step; perhaps in the next.
            is_new = e.requests[head].arrival_s > at.known_until_s
            steps = 1 if is_new else min(steps, quiet)
    # Who is on course changes as contexts grow.
    return min(steps, 8) if e.lists[HELD, 0] or e.lists[LOST, 0] else steps


# What is asked in between.


@entry
def progress(engine, requests, lists, times, slot, now_s):
    """Tokens of a request that have been delivered, and when the first and the last was."""
    e = Engine(engine[0], requests, lists, times)
    request = requests[slot]
    if math.isnan(request.first_s):
        return 0, 0.0, 0.0
    steps = _steps_done(e, now_s)
    last_s = max(request.last_s, request.first_s)
    if steps:
        last_s = _boundary_s(e, steps)
    if not request.is_decoding:
        return request.num_done, request.first_s, last_s
    if not steps and e.at.step > request.joined:
        last_s = e.at.start_s
    return request.num_done + e.at.step + steps - request.joined, request.first_s, last_s


@entry
def rows(engine, requests, lists, times, now_s):
    """What a report is made of.

    Returns:
        KV tokens in use, then of those that wait and of those that run: a row for each attribute of
        `Row` but the quantiles and the targets, which are two rows, [7, n]; quantiles [n, 10].
    """
    e = Engine(engine[0], requests, lists, times)
    steps = _steps_done(e, now_s)
    waiting = np.concatenate((
        lists[QUEUE, 1 : lists[QUEUE, 0] + 1], lists[LATE, 1 : lists[LATE, 0] + 1]
    ))  # fmt: skip
    if e.at.is_slo:
        waiting = waiting[np.argsort(requests[waiting]["arrival_s"], kind="mergesort")]
    running = lists[RUNNING, 1 : lists[RUNNING, 0] + 1]
    num_used = min(int(used(e) + steps * e.at.num_decodes), e.at.capacity)
    step = e.at.step + steps
    return num_used, *_rows_of(e, waiting, step), *_rows_of(e, running, step)


@compiled
def _rows_of(e, slots, step):
    rows, quantiles = np.empty((7, len(slots))), np.empty((len(slots), NUM_LEVELS))
    for i, slot in enumerate(slots):
        request = e.requests[slot]
        decoded = step - request.joined if request.is_decoding else 0
        rows[0, i] = request.num_prompt
        rows[1, i] = request.num_computed + decoded
        rows[2, i] = request.num_done + decoded
        rows[3, i], rows[4, i] = request.ttft_s, request.tpot_s
        rows[5, i], rows[6, i] = request.arrival_s, request.first_s
        quantiles[i] = request.quantiles
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
