"""What those get who have lost their SLO, or never had one: leftovers, and a share of the time."""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.core import state
from sola_sched.cost.times import chunk_s, decode_s
from sola_sched.planner.attain.admission import tokens_within
from sola_sched.planner.attain.held import has_spare
from sola_sched.planner.attain.lost import is_overdue, is_rejected
from sola_sched.planner.attain.pace import free_slots, token_room
from sola_sched.planner.attain.records import (
    ADMIT,
    CHOSEN,
    GIVING,
    LOST,
    MAY,
    NEAR,
    ORDER,
    PREEMPT,
    insert,
    is_in,
)

_blocks_of_step = compiled(state.blocks_of_step)
#: Credit of this share of the most counts as full: it has been waiting to be spent.
_FULL = 0.99


@compiled
def serve_lost(step):
    """Serve the lost from what is left over, decodes before prompts, and the oldest on credit.

    Sets `lost_run`, how many of the lost decodes take part, of `LOST` from the first, and
    `num_chosen` and `lost_tokens`, the prefills in `CHOSEN`; on credit nobody else computes a
    prompt beside them. What they get is booked in the account.
    """
    at, account, tuning = step.at, step.account, step.tuning
    was_blocked, account.is_blocked = account.is_blocked, False
    at.lost_run = at.num_chosen = at.lost_tokens = 0
    at.is_alone = at.is_blocked = False
    num_lost, num_places = _list_lost(step)
    if not num_lost and not num_places:
        # Credit is earned by those who wait for it, not kept for a burst.
        account.credit_s, account.unseen_s = min(account.credit_s, 0.0), 0.0
        return
    passed_s = account.unseen_s + at.elapsed_s
    account.credit_s = min(tuning.most_credit_s, account.credit_s + tuning.share * passed_s)
    account.unseen_s = 0.0
    _find_leftovers(step)
    if num_lost:
        _choose_decodes(step, num_lost, num_places > 0, passed_s)
    if num_places:
        if has_spare(step) and (at.num_jobs or not _has_traffic_stopped(step)):
            # Whoever comes meanwhile waits for the end of the step.
            longer_s = tuning.for_lost * (at.pace_s - at.decode_s)
            longer_s -= at.received_s + chunk_s(at, float(at.chunk), 0.0)
            at.spare_s = min(at.spare_s, longer_s)
        _choose_prefills(step, num_places)
    if at.is_blocked:  # what others get from slack while the oldest finds no room is no debt
        account.is_blocked = (
            was_blocked or _is_credit_full(step) or is_overdue(step, step.lists[NEAR, 0])
        )
    else:  # the share is a minimum, not an extra
        account.credit_s = max(account.credit_s - at.received_s, -tuning.most_credit_s)


@compiled
def _has_traffic_stopped(step):
    """Whether no request has come for `num_gaps` mean gaps between arrivals."""
    at = step.at
    gap_s = (at.last_came_s - at.first_came_s) / at.num_came if at.num_came else 0.0
    return at.now_s - at.last_came_s > step.tuning.num_gaps * gap_s


@compiled
def _may_spend(step):
    """Whether credit is spent now: others can wait for it, much is saved, or the share is large."""
    tuning = step.tuning
    if tuning.share > tuning.small_share or step.account.credit_s >= tuning.most_saved_s:
        return True
    return step.at.can_wait_s >= tuning.spare_steps * step.at.limit_s


@compiled
def _is_credit_full(step):
    """Whether the credit has, nearly, reached its bound."""
    return step.account.credit_s >= _FULL * step.tuning.most_credit_s


@compiled
def _list_lost(step):
    """List the lost decodes in `LOST` and the first of the lost prefills in `NEAR`; how many.

    Those first whose longest wait is over, by its end; the others by arrival.
    """
    at, num_lost, num_places = step.at, 0, 0
    keys = np.empty((at.num_decodes - at.num_alive, 2))
    for place in range(at.num_decodes):
        step.decodes[place].is_safe = False
        if step.decodes[place].is_lost:
            rank, key = _service_order(step, step.decodes[place].row)
            num_lost = insert(step.lists[LOST], keys, num_lost, place, rank, key)
    line = step.lists[NEAR]
    keys = np.empty((min(step.tuning.num_lost, len(line)), 2))
    for place in range(at.num_prefills):
        if not step.prefills[place].is_feasible and not is_rejected(step, place):
            rank, key = _service_order(step, step.prefills[place].row)
            num_places = insert(line, keys, num_places, place, rank, key)
    return num_lost, num_places


@compiled
def _service_order(step, row):
    """The key by which the lost are served: the end of the longest wait, once it is over; else
    arrival, behind all of those."""
    request = step.requests[row]
    if request.served_by_s <= step.at.now_s:
        return 0, request.served_by_s
    return 1, request.arrival_s


@compiled
def _blocks(step, place):
    """KV blocks of a prefill when it has ended, and one to spare."""
    prefill = step.prefills[place]
    return (prefill.new + prefill.has) / step.at.block_size + 1.0


@compiled
def _find_leftovers(step):
    """What the others of the step leave over: time, tokens, slots and blocks.

    `slots` and `free` are free, `lost_slots` and `lost_blocks` those of the lost decodes;
    `num_starts` others start, and `starting` are their blocks.
    """
    at, may = step.at, step.lists[MAY]
    at.num_starts, at.starting, at.received_s = 0, 0.0, 0.0
    for i in range(at.num_served):
        if may[i] >= at.num_started:
            at.num_starts += 1
            at.starting += _blocks(step, may[i])
    at.room, at.spare_s = token_room(at) - at.chunk, 0.0
    if not at.has_backlog and not at.is_holding:
        at.spare_s = at.limit_s - at.decode_s - chunk_s(at, float(at.chunk), 0.0)
    at.slots = free_slots(at) - at.num_starts
    at.free = at.num_free_blocks - at.starting
    at.lost_slots, ctx = at.num_decodes - at.num_alive, 0
    for place in range(at.num_decodes):
        if step.decodes[place].is_lost:
            ctx += step.decodes[place].ctx
    at.lost_blocks = ctx / at.block_size


@compiled
def _choose_decodes(step, num_lost, are_prefills, passed_s):
    """Let the first of the lost decodes go on in what is left over.

    Those whose turn is before any lost prefill's also on credit, and without if their longest wait
    is over: else they would give up slot and KV to the next one that has waited. Of the others none
    whose slot or KV those who start may need. Where prompts that can be on time want them, credit
    also pays for these, as the same share of the time that has passed; whoever cannot pay goes on
    until one of those takes its place. With swapping only where slots are short: see `_mark_safe`.
    None on credit takes the tokens of a prompt of a higher class.
    """
    at, account, num_older, count = step.at, step.account, num_lost, 0
    if are_prefills:
        first, num_older = _service_order(step, step.prefills[step.lists[NEAR, 0]].row), 0
        for i in range(num_lost):
            num_older += _service_order(step, step.decodes[step.lists[LOST, i]].row) <= first
    can = max(0, min(at.room // at.tokens_per_decode, num_lost + min(0, at.slots)))
    if at.free < at.num_decodes:
        can = 0
    if _is_served_above(step, step.decodes[step.lists[LOST, 0]].row):
        num_older = min(num_older, at.room // at.tokens_per_decode)
    ctx = 0
    while count < max(can, num_older):
        decode = step.decodes[step.lists[LOST, count]]
        cost_s = decode_s(at, 2.0, decode.ctx) - decode_s(at, 1.0, 0.0)
        pays = count < num_older and (
            account.credit_s > 0.0 or not _service_order(step, decode.row)[0]
        )
        is_room_wanted = count >= can and at.num_jobs > 0 and (at.slots < 0 or not at.keeps_kv)
        if cost_s <= at.spare_s:
            at.spare_s -= cost_s
            at.received_s += cost_s
        elif pays:
            account.credit_s -= cost_s
        else:
            break
        decode.is_safe = pays or not is_room_wanted
        if pays and is_room_wanted:
            account.credit_s -= passed_s * _room_share(at, decode)
        ctx += decode.ctx
        count += 1
    at.room -= count * at.tokens_per_decode
    at.lost_slots -= count
    at.lost_blocks -= ctx / at.block_size
    at.lost_run = count


@compiled
def _is_served_above(step, row):
    """Whether a prompt of a higher class than that of a row is served."""
    if not step.at.has_ranks or not step.at.num_served:
        return False
    first = step.prefills[step.lists[MAY, 0]].row
    return step.requests[first].priority < step.requests[row].priority


@compiled
def _room_share(at, decode):
    """Share of the slots or of the KV memory that a decode holds, whichever is larger."""
    return max(1.0 / at.max_num_running, decode.ctx / (at.num_blocks * at.block_size))


@compiled
def _choose_prefills(step, count):
    """The oldest of the lost prefills, and others that end in the step.

    The oldest also in part, on credit, and for the KV of decodes that sit out. No prompt passes an
    older one, but for those that have begun while the oldest finds no room.
    """
    at, places = step.at, step.lists[NEAR]
    oldest = first = places[0]
    blocks = _blocks(step, oldest)
    slots, free = at.slots + at.lost_slots, at.free + at.lost_blocks
    has_room = oldest < at.num_started or (slots > 0 and free > blocks)
    at.is_blocked = not has_room and (slots + at.num_starts <= 0 or free + at.starting <= blocks)
    if at.is_blocked:
        num_begun = 0
        for i in range(count):
            if places[i] < at.num_started:
                places[num_begun] = places[i]
                num_begun += 1
        count = num_begun
        first = places[0]
    tokens = _left_over(step, first) if count and (has_room or at.is_blocked) else 0
    if not tokens and not at.is_blocked:
        tokens = _on_credit(step, oldest)
        at.is_alone = tokens > 0
    if not tokens:
        return
    if at.is_alone:
        at.slots += at.num_starts
        at.free += at.starting
        at.room += at.chunk
        at.num_served = at.num_offered = at.chunk = 0
        at.is_holding = False
        # With the next ones, as far as such a step costs anyway.
        at.spare_s = min(at.limit_s, 2.0 * at.mixed_s) - at.mixed_s
    _take(step, first, tokens)
    if at.is_alone:
        at.spare_s = min(at.spare_s, step.account.credit_s)
    if tokens < step.prefills[first].new or not step.tuning.serves_lost_together:
        return  # nothing comes between the chunks of one
    for i in range(1, count):
        if not _ends_beside(step, places[i]):
            return
        _take(step, places[i], int(step.prefills[places[i]].new))


@compiled
def _left_over(step, place):
    """Tokens of one for which what is left over is enough.

    None if it has begun, would go on later, and others start: vLLM serves running requests before
    waiting ones, so that it would get their tokens too.
    """
    at = step.at
    prefill, limit_s = step.prefills[place], at.decode_s + at.spare_s
    tokens = _tokens_in(step, prefill, limit_s, at.room)
    goes_on = place < at.num_started and tokens < prefill.new
    return 0 if goes_on and at.num_starts else tokens


@compiled
def _ends_beside(step, place):
    """Whether one ends in this step and displaces nobody."""
    at, prefill = step.at, step.prefills[place]
    if prefill.service_s > at.spare_s or prefill.new > at.room or prefill.chunk < prefill.new:
        return False
    return place < at.num_started or (at.slots > 0 and _blocks(step, place) <= at.free)


@compiled
def _take(step, place, tokens):
    """Put a chunk into the step."""
    at = step.at
    time_s = chunk_s(at, float(tokens), step.prefills[place].has)
    at.room -= tokens
    at.spare_s -= time_s
    if at.num_chosen or not at.is_alone:  # the first one alone is paid for
        at.received_s += time_s
    step.lists[CHOSEN, at.num_chosen] = place
    at.num_chosen += 1
    at.lost_tokens += tokens
    if place >= at.num_started:
        at.slots -= 1
        at.free -= _blocks(step, place)


@compiled
def _tokens_in(step, prefill, limit_s, room):
    """Tokens of one that a step of `limit_s` has time for, a multiple also at its end."""
    end = np.inf if step.at.chunks_prefills else prefill.chunk
    return min(int(prefill.chunk), tokens_within(step, end, limit_s, room, prefill.has))


@compiled
def _on_credit(step, place):
    """Tokens of one in a step without other prefills that the credit pays for; pays.

    Credit waits while the step would make others late, until much has been saved. One that is
    overdue is served whatever the credit is.
    """
    at, account, prefill = step.at, step.account, step.prefills[place]
    must = is_overdue(step, place)
    if account.credit_s <= 0.0 and not must:
        return 0
    if at.num_order and step.prefills[step.lists[ORDER, 0]].rank < prefill.rank:
        return 0  # an upper one would have to wait for it
    if not must and not _may_spend(step):
        return 0
    need, has = int(prefill.chunk), prefill.has
    tokens = _tokens_in(step, prefill, at.limit_s, at.room + at.chunk)
    if not tokens and (must or _is_credit_full(step)):
        tokens = min(need, step.tuning.tile) if at.chunks_prefills else need
    price_s = chunk_s(at, float(tokens), has)
    if place >= at.num_started and step.requests[prefill.row].num_preemptions:
        # Its place in memory is worth what computing the KV that comes back would be.
        price_s = chunk_s(at, tokens + has, 0.0)
    if not tokens or (account.credit_s < price_s and not must and not _is_credit_full(step)):
        return 0
    account.credit_s -= price_s
    return tokens


# Who leaves -------------------------------------------------------------------------------------


@compiled
def find_victims(step):
    """List in `PREEMPT` the lost requests that leave for the slots and blocks this step needs.

    The youngest first, of those that sit out and, with swapping, of decodes that run on what is
    left over; no more than are needed.
    """
    at, num_before = step.at, step.at.num_preempt
    num_giving = _list_giving(step)
    if not num_giving:
        return
    blocks = 1
    for place in range(at.num_decodes):
        decode = step.decodes[place]
        if not decode.is_lost or decode.is_safe:
            blocks += _blocks_of_step(decode.ctx, at.tokens_per_decode, at.block_size)
    for i in range(at.num_admit):
        target = step.requests[step.lists[ADMIT, i]].prefill_target
        blocks += -(-target // at.block_size)
    count, short, freed = max(0, at.num_admit - free_slots(at)), blocks - at.num_free_blocks, 0
    for i in range(num_giving):
        if i >= count and freed >= short:
            break
        row = step.lists[GIVING, i]
        freed += -(-_kv_tokens(step, row) // at.block_size)
        step.lists[PREEMPT, num_before + i] = row
        at.num_preempt += 1


@compiled
def _kv_tokens(step, row):
    """Tokens of KV that one holds for sure."""
    request = step.requests[row]
    if request.phase == state.DECODE:
        return request.num_prompt + request.num_output
    return request.num_computed


@compiled
def _list_giving(step):
    """List in `GIVING` the rows of those that may leave, the last to arrive first; how many."""
    at, line, count = step.at, step.lists[GIVING], 0
    keys = np.empty((at.num_decodes + at.num_started, 2))
    _mark_safe(step)
    for place in range(at.num_decodes):
        decode = step.decodes[place]
        if decode.is_lost and not decode.is_safe:
            key = -step.requests[decode.row].arrival_s
            count = insert(line, keys, count, decode.row, 0, key)
    may = step.lists[MAY]
    for place in range(at.num_started):
        prefill = step.prefills[place]
        is_served = is_in(step.lists[CHOSEN], at.num_chosen, place)
        is_served = is_served or is_in(may, at.num_served, place)
        if not prefill.is_feasible and not is_served and not is_overdue(step, place):
            key = -step.requests[prefill.row].arrival_s
            count = insert(line, keys, count, prefill.row, 0, key)
    return count


@compiled
def _mark_safe(step):
    """Mark the lost decodes that run and that no other request displaces.

    Those that `_choose_decodes` has marked. With swapping, where memory is what is short, running
    on what is left over of the time must not keep it from those on time: the first by arrival
    stay, up to the share of the memory that the share of the time is.
    """
    at, room = step.at, step.tuning.share * step.at.num_blocks * step.at.block_size
    if not at.keeps_kv or at.num_admit > free_slots(at):
        return
    ctx = 0
    for i in range(at.lost_run):
        decode = step.decodes[step.lists[LOST, i]]
        ctx += decode.ctx
        decode.is_safe = i == 0 or ctx <= room
