"""Who gets in: the chunk that fits the step, and slots and memory for those who start in it."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.cost.times import chunk_s, most_tokens
from sola_sched.planner.attain.held import hold_lower_classes
from sola_sched.planner.attain.lost import most_lent_s
from sola_sched.planner.attain.pace import open_slots, token_room
from sola_sched.planner.attain.records import MAY, ORDER

#: Tokens and times are turned into each other and back.
_ROUNDING = 1.0 + 1e-6


@compiled
def let_in(step):
    """The first of `ORDER` that the step has time for and that find slots and memory.

    Lists them in `MAY`: `num_served` of them, in the order of service, with `chunk` tokens in all;
    then `num_offered` waiting ones beyond the chunk, in case a prefix cache leaves budget over.
    While some are on time the others are only offered, but for strict ranks: they would lengthen
    the step for a first token that is late anyway.
    Sets `has_backlog`, whether some that can be on time must wait for a later step.
    """
    at, may = step.at, step.lists[MAY]
    count, num_on_time = _list_admissible(step)
    is_cut = _serve(step, count if at.has_ranks else num_on_time or count)
    at.has_backlog = is_cut or at.num_served < at.num_jobs
    # Budget is left over if those served hit a cache, not if they have begun.
    at.num_offered, is_one_starting = 0, False
    for i in range(at.num_served):
        is_one_starting = is_one_starting or may[i] >= at.num_started
    if at.chunks_prefills and is_one_starting:
        for i in range(at.num_served, min(count, at.num_served + step.tuning.num_spare_offers)):
            if may[i] >= at.num_started:
                may[at.num_served + at.num_offered] = may[i]
                at.num_offered += 1


@compiled
def tokens_within(step, need, limit_s, room, has):
    """Tokens of a chunk beside the decodes that take part in a step of `limit_s`.

    Args:
        need: Tokens that end a prompt; a chunk that ends before is a multiple, or none of a prompt
            that is computed whole.
        limit_s: Time for the step, seconds.
        room: Tokens that it may have.
        has: Tokens that the request has computed.
    """
    at, tuning, most = step.at, step.tuning, np.inf
    if not math.isinf(limit_s):
        most = most_tokens(at, limit_s, at.num_taking, at.ctx_taking, has)
    if need <= min(most * _ROUNDING, room):
        return int(need)
    if not at.chunks_prefills or room <= 0:
        return 0
    if most < room:
        multiple = tuning.tile if most >= tuning.many_tiles * tuning.tile else tuning.sub_tile
        return int(most // multiple * multiple)
    return int(room)


@compiled
def _serve(step, count):
    """Serve the first of `MAY` that the step has time for; whether one needs more.

    A whole prompt that is too long is in nobody's way. The most urgent one goes alone, in a longer
    step, once all decodes can make up for that by their predicted ends.
    """
    at, may, is_cut = step.at, step.lists[MAY], False
    at.num_served = at.chunk = 0
    if not count:
        return False
    first, room = may[0], token_room(at)
    has = step.prefills[first].has
    for i in range(count):
        prefill = step.prefills[may[i]]
        end = at.chunk + prefill.chunk
        limit_s = at.upper_limit_s if prefill.rank <= at.upper_rank else at.limit_s
        tokens = tokens_within(step, end, limit_s, room, has)
        if at.has_ranks and tokens < end:
            most = tokens_within(step, end, limit_s, at.max_num_tokens, has)
            room = hold_lower_classes(step, prefill, most, room)
            tokens = tokens_within(step, end, limit_s, room, has)
        is_cut = is_cut or tokens < end or prefill.chunk < prefill.new
        if tokens > at.chunk:
            may[at.num_served], at.chunk = may[i], tokens
            at.num_served += 1
        if tokens < end and at.chunks_prefills:
            return True
    is_first_in = at.num_served > 0 and may[0] == first
    urgent = step.prefills[first]
    whole_s = at.mixed_s + chunk_s(at, urgent.chunk, urgent.has)
    if not is_first_in and whole_s <= most_lent_s(step):
        may[0], at.num_served, at.chunk = first, 1, int(urgent.chunk)
    return is_cut


# Slots and memory ---------------------------------------------------------------------------


@compiled
def _list_admissible(step):
    """List in `MAY` those of `ORDER` that have begun, and its first waiting ones that find slots
    and memory; how many, and how many of them are on time."""
    at, line, may = step.at, step.lists[ORDER], step.lists[MAY]
    num_starts = 0
    if at.has_ranks or not step.account.is_blocked:
        num_starts = open_slots(at)
    needs, is_any = np.zeros((3, _NUM_BINS)), False
    is_short = _is_memory_short(step, num_starts)
    if is_short:
        is_any = _add_growing(step, needs)
    capacity = step.tuning.planned_memory * at.num_blocks * at.block_size
    num_may = num_on_time = 0
    for i in range(at.num_order):
        place = line[i]
        if place >= at.num_started:
            if is_short and num_starts > 0:
                _add(step, step.prefills[place].row, 0, at.num_decodes + place, needs)
                if is_any and _peak_tokens(needs) > capacity:
                    num_starts = 0
                is_any = True
            num_starts -= 1
            if num_starts < 0:
                continue
        may[num_may] = place
        num_may += 1
        num_on_time += i < at.num_on_time
    return num_may, num_on_time


@compiled
def _is_memory_short(step, num_starts):
    """Whether with the prompts of those who find slots much of the KV memory is used."""
    at, line, need = step.at, step.lists[ORDER], 0.0
    for i in range(at.num_order):
        if line[i] >= at.num_started and num_starts > 0:
            need += step.prefills[line[i]].new + step.prefills[line[i]].has
            num_starts -= 1
    used = 1.0 - (at.num_free_blocks - need / at.block_size) / max(1, at.num_blocks)
    return used > step.tuning.memory_threshold and len(step.likely) > 0


#: Output lengths that are left are sorted into so many bins, eight for each factor of two.
_NUM_BINS = 18 * 8


@compiled
def _add_growing(step, needs):
    """Count those who run and are not lost; whether there are any."""
    at = step.at
    for place in range(at.num_decodes):
        decode = step.decodes[place]
        if not decode.is_lost:
            _add(step, decode.row, decode.ahead, place, needs)
    for place in range(at.num_started):
        _add(step, step.prefills[place].row, 0, at.num_decodes + place, needs)
    return at.num_alive + at.num_started > 0


@compiled
def _add(step, row, ahead, place, needs):
    """Count a request, with each of the equally likely values of what it will still add."""
    request = step.requests[row]
    for left in step.likely[place]:
        at = min(_NUM_BINS - 1, int(8.0 * math.log2(max(left, 1.0))))
        needs[0, at] += request.num_prompt + request.num_output + ahead
        needs[1, at] += 1.0
        needs[2, at] += left


@compiled
def _peak_tokens(needs):
    """Largest KV need, in tokens, until every request has finished, as `base.peak_tokens`.

    Requests with nearly the same left end together here, at the mean of it.
    """
    used = num = peak = 0.0
    for at in range(_NUM_BINS - 1, -1, -1):
        if needs[1, at]:
            used += needs[0, at]
            num += needs[1, at]
            peak = max(peak, used + num * (needs[2, at] / needs[1, at]))
    return peak / 5.0
