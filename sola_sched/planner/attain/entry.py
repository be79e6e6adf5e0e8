"""Who gets in: the chunk that fits the step, and slots and memory for those who start in it."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.cost.times import most_tokens
from sola_sched.planner.attain.lost import most_lent_s
from sola_sched.planner.attain.pace import open_slots, token_room
from sola_sched.planner.attain.records import MAY, ORDER

#: Tokens and times are turned into each other and back.
_ROUNDING = 1.0 + 1e-6
_NO_ENDS = np.empty(0)


@compiled
def let_in(step):
    """The first of `ORDER` that the step has time for and that find slots and memory.

    Lists them in `MAY`: `num_served` of them, in the order of service, with `chunk` tokens in all;
    then `num_offered` waiting ones beyond the chunk, in case a prefix cache leaves budget over.
    Sets `has_backlog`, whether some that can be on time must wait for a later step.
    """
    at, tuning, may = step.at, step.tuning, step.lists[MAY]
    num_order = min(at.num_order, tuning.num_examined)
    count = find_admissible(step, step.lists[ORDER], num_order)
    is_cut = False
    if at.chunks_prefills:
        is_cut = _take_first_that_fit(step, count)
    else:
        _take_whole(step, count)
    at.has_backlog = is_cut or at.num_served < at.num_jobs
    # Budget is left over if those served hit a cache, not if they have begun.
    at.num_offered, is_one_starting = 0, False
    for i in range(at.num_served):
        is_one_starting = is_one_starting or may[i] >= at.num_started
    if at.chunks_prefills and is_one_starting:
        for i in range(at.num_served, min(count, at.num_served + tuning.num_spare_offers)):
            if may[i] >= at.num_started:
                may[at.num_served + at.num_offered] = may[i]
                at.num_offered += 1


@compiled
def tokens_in(step, limit_s, room, has, ends):
    """Tokens of a chunk, at most `room`, beside the decodes on course in a step of `limit_s`.

    Args:
        limit_s: Time for the step, seconds.
        room: Tokens.
        has: Tokens that the request has computed.
        ends: Where whole prompts end, tokens, ascending: a chunk that ends there is not rounded
            down further.
    """
    if room <= 0 or math.isinf(limit_s):
        return max(0, room)
    tokens, tuning = _most_beside(step.at, limit_s, has), step.tuning
    is_long = tokens >= tuning.many_tiles * tuning.tile
    multiple = tuning.tile if is_long else tuning.sub_tile
    rounded = float(tokens // multiple * multiple)
    for end in ends:
        if end <= tokens * _ROUNDING:
            rounded = max(rounded, end)
    return min(room, int(rounded))


@compiled
def _most_beside(at, limit_s, has):
    """The longest chunk beside the decodes that take part for which `limit_s` is enough, tokens."""
    return most_tokens(at, limit_s, at.num_taking, at.ctx_taking, has)


@compiled
def _take_first_that_fit(step, count):
    """Serve the first of `MAY` that a step of `limit_s` has time for; whether one needs more."""
    at, may = step.at, step.lists[MAY]
    at.num_served = at.chunk = 0
    if not count:
        return False
    ends = np.empty(count)
    total = 0.0
    for i in range(count):
        total += step.prefills[may[i]].chunk
        ends[i] = total
    has = step.prefills[may[0]].has
    tokens = tokens_in(step, at.limit_s, token_room(at), has, ends)
    if not tokens:
        return False
    is_cut = False
    while at.num_served < count and (at.num_served == 0 or ends[at.num_served - 1] < tokens):
        prefill = step.prefills[may[at.num_served]]
        is_cut = is_cut or prefill.chunk < prefill.new
        at.num_served += 1
    last = ends[at.num_served - 1]
    at.chunk = int(min(float(tokens), last))
    return is_cut or tokens < last


@compiled
def _take_whole(step, count):
    """Serve those of `MAY` that go whole into a step of `limit_s`.

    One that is too long is in nobody's way. The most urgent one goes alone, in a longer step,
    once all decodes can make up for that by their predicted ends.
    """
    at, may = step.at, step.lists[MAY]
    at.num_served = at.chunk = 0
    if not count:
        return
    first, room = may[0], float(token_room(at))
    if not math.isinf(at.limit_s):
        has = step.prefills[first].has
        room = min(room, _most_beside(at, at.limit_s, has) * _ROUNDING)
    is_first_in = step.prefills[first].chunk <= room
    for i in range(count):
        place = may[i]
        if step.prefills[place].chunk <= room:
            room -= step.prefills[place].chunk
            may[at.num_served] = place
            at.num_served += 1
            at.chunk += int(step.prefills[place].chunk)
    if not is_first_in and at.mixed_s + step.prefills[first].service_s <= most_lent_s(step):
        may[0], at.num_served, at.chunk = first, 1, int(step.prefills[first].chunk)


# Slots and memory ---------------------------------------------------------------------------


@compiled
def find_admissible(step, line, count):
    """List in `MAY` those of a line that have begun, and its first waiting ones that find slots
    and memory; how many."""
    at, may = step.at, step.lists[MAY]
    num_waiting = 0
    for i in range(count):
        num_waiting += line[i] >= at.num_started
    num_starts = 0
    if at.has_ranks or not step.account.is_blocked:
        num_starts = max(0, min(num_waiting, open_slots(at)))
        num_starts = _num_with_memory(step, line, count, num_starts)
    num_may = 0
    for i in range(count):
        if line[i] >= at.num_started:
            num_starts -= 1
        if line[i] < at.num_started or num_starts >= 0:
            may[num_may] = line[i]
            num_may += 1
    return num_may


@compiled
def _num_with_memory(step, line, count, num_starts):
    """How many waiting ones may start before the predicted peak of KV memory is too high."""
    at, tuning = step.at, step.tuning
    need, num_found = 0.0, 0
    for i in range(count):
        if line[i] >= at.num_started and num_found < num_starts:
            need += step.prefills[line[i]].new + step.prefills[line[i]].has
            num_found += 1
    used = 1.0 - (at.num_free_blocks - need / at.block_size) / max(1, at.num_blocks)
    if not num_starts or used <= tuning.memory_threshold or not len(step.likely):
        return num_starts
    capacity = tuning.planned_memory * at.num_blocks * at.block_size
    held, counts = np.zeros(_NUM_BUCKETS), np.zeros(_NUM_BUCKETS)
    left = np.zeros(_NUM_BUCKETS)
    num_growing = 0
    for place in range(at.num_decodes):
        decode = step.decodes[place]
        if not decode.is_lost:
            _add(step, decode.row, decode.ahead, place, held, counts, left)
            num_growing += 1
    for place in range(at.num_started):
        _add(step, step.prefills[place].row, 0, at.num_decodes + place, held, counts, left)
        num_growing += 1
    num_found = 0
    for i in range(count):
        if line[i] >= at.num_started and num_found < num_starts:
            row = step.prefills[line[i]].row
            _add(step, row, 0, at.num_decodes + line[i], held, counts, left)
            if _peak_tokens(held, counts, left) > capacity:
                return num_found if num_found or num_growing else 1
            num_found += 1
    return num_starts


#: Output lengths that are left are sorted into so many classes, eight for each factor of two.
_NUM_BUCKETS = 18 * 8


@compiled
def _add(step, row, ahead, place, held, counts, left):
    """Count a request, with each of the equally likely values of what it will still add."""
    request = step.requests[row]
    used = request.num_prompt + request.num_output + ahead
    for value in step.likely[place]:
        bucket = min(_NUM_BUCKETS - 1, int(8.0 * math.log2(max(value, 1.0))))
        held[bucket] += used
        counts[bucket] += 1.0
        left[bucket] += value


@compiled
def _peak_tokens(held, counts, left):
    """Largest KV need, in tokens, until every request has finished, as `base.peak_tokens`.

    Requests with nearly the same left end together here, at the mean of it.
    """
    used = num = peak = 0.0
    for bucket in range(_NUM_BUCKETS - 1, -1, -1):
        if counts[bucket]:
            used += held[bucket]
            num += counts[bucket]
            peak = max(peak, used + num * (left[bucket] / counts[bucket]))
    return peak / 5.0
