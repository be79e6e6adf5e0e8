"""Which decodes sit a step out: those ahead of their schedules, while prompts want the time, and
those of lower classes, while prompts want the tokens."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.cost.times import chunk_overhead_s, chunk_s, decode_s, prompts_constant_s
from sola_sched.planner.attain.records import GIVING, NEAR, ORDER, insert


@compiled
def note_room(step, need):
    """Set `has_room`: all that wait, `need` tokens in all, would find slots and memory now.

    Decodes are held only then: their outputs end later and keep slots and memory longer, which
    costs nothing while nobody waits for these.
    """
    at = step.at
    num_blocks = need / at.block_size
    fits = at.num_running + at.num_waiting <= at.max_num_running
    at.has_room = fits and num_blocks <= at.num_free_blocks and not at.has_ranks


@compiled
def has_spare(step):
    """Whether decodes leave a large share of steps as long as TPOT allows."""
    at = step.at
    return usual_s(step, at.pace_s) <= step.tuning.near * at.pace_s


@compiled
def usual_s(step, step_s):
    """Time of the decodes in one of many steps of this length, where those far ahead sit out.

    Each takes part once in its `token_s`.
    """
    at, num, ctx = step.at, 0.0, 0.0
    for place in range(at.num_decodes):
        decode = step.decodes[place]
        if not decode.is_lost:
            share = 1.0
            if step_s < decode.token_s and _is_due(step, decode.token_s):
                share = step_s / decode.token_s
            num += share
            ctx += share * decode.ctx
    return decode_s(at, num, ctx) if num else 0.0


@compiled
def _is_due(step, token_s):
    """Whether a decode has a target for its next token: neither none nor one that is hours away."""
    return token_s < step.tuning.can_wait * step.at.decode_s


@compiled
def wait_for_first(step):
    """Count no decodes before the prompt that is due first if it could be on time without them."""
    at, alone_s, first_s = step.at, np.inf, np.inf
    _take_all(at)
    if not at.has_room or not step.tuning.holds:
        return
    for place in range(at.num_prefills):
        request = step.requests[step.prefills[place].row]
        left_s = request.due_s - at.now_s
        if request.num_output == 0 and left_s < first_s:
            done = float(request.num_computed)
            todo = max(float(request.prefill_target) - done, 1.0)
            needs_s = prompts_constant_s(at) + chunk_s(at, todo, done)
            if needs_s <= left_s:
                alone_s, first_s = needs_s, left_s
    if alone_s + at.decode_s <= at.slack_s and _is_due(step, at.pace_s):
        at.taking_s, at.least_s = 0.0, prompts_constant_s(at)


@compiled
def _take_all(at):
    """All decodes that are alive take part."""
    at.is_holding = False
    at.num_taking, at.ctx_taking, at.taking_s = at.num_alive, at.ctx_alive, at.decode_s
    at.least_s = at.mixed_s


@compiled
def hold_decodes(step):
    """Mark the decodes that sit the step out.

    All, where one of its prompts would be late with them or a step with them takes a large share
    of its TTFT target, if then nobody's token is late. Otherwise, while the step has no time for
    all jobs, those whose next token is due at least a TPOT after its end.
    """
    at, total_s = step.at, 0.0
    _take_all(at)
    if not step.tuning.holds or not at.num_jobs or not at.num_alive or not at.has_room:
        return
    for i in range(at.num_near):
        total_s += step.prefills[step.lists[NEAR, i]].service_s
    has_backlog = at.mixed_s + total_s > at.limit_s or at.num_near < at.num_jobs
    step_s = min(at.limit_s, prompts_constant_s(at) + total_s)
    # Where none is due by a time nothing else would bring them back.
    can_all = step_s + at.decode_s <= at.slack_s and _is_due(step, at.pace_s)
    are_all = can_all and _is_urgent(step)
    if not are_all and not (has_backlog and has_spare(step)):
        return
    num_taking, ctx = 0, 0.0
    for place in range(at.num_decodes):
        decode = step.decodes[place]
        if not decode.is_lost:
            decode.is_held = are_all or step_s + decode.token_s <= decode.bank_s < np.inf
            if not decode.is_held:
                num_taking += 1
                ctx += decode.ctx
    _take_part(at, num_taking, ctx)


@compiled
def _take_part(at, num, ctx):
    """So many of the decodes that are alive take part."""
    at.is_holding, at.num_taking, at.ctx_taking = num < at.num_alive, num, ctx
    at.taking_s = decode_s(at, num, ctx) if num else 0.0
    at.least_s = at.taking_s + chunk_overhead_s(at) if num else prompts_constant_s(at)


@compiled
def _is_urgent(step):
    """Whether one of the step would be late with all decodes, or nearly."""
    at, ends_s, first_s = step.at, step.at.mixed_s, np.inf
    for i in range(at.num_order):
        prefill = step.prefills[step.lists[ORDER, i]]
        ends_s += prefill.service_s
        ttft_s = step.requests[prefill.row].ttft_s
        first_s = min(first_s, min(prefill.due_s, step.tuning.tight * ttft_s))
        if ends_s > first_s:
            return True
        if ends_s > at.limit_s:  # those that follow are in a later step
            return False
    return False


@compiled
def hold_lower_classes(step, prefill, most, room):
    """Mark decodes of lower classes that sit out so that a prefill finds tokens; the new room.

    As few as let its prompt end in as many steps as without any of them: the lowest class first,
    and of a class those that came last.

    Args:
        most: Tokens for prompts up to this one that the step has time for.
        room: Tokens that the decodes which take part leave over.
    """
    at, decodes, requests = step.at, step.decodes, step.requests
    if most <= room:
        return room
    priority, num_uppers = requests[prefill.row].priority, 0
    for place in range(at.num_decodes):
        if not at.is_holding:
            decodes[place].is_held = False
        is_lower = requests[decodes[place].row].priority > priority
        num_uppers += not decodes[place].is_lost and not is_lower
    least_room = at.max_num_tokens - num_uppers * at.tokens_per_decode
    most = min(most, least_room) - at.chunk
    if most <= 0 or (not at.chunks_prefills and most < prefill.new):
        return room
    wanted = at.chunk + math.ceil(prefill.new / math.ceil(prefill.new / most))
    lacking = math.ceil((wanted - room) / at.tokens_per_decode)
    if lacking <= 0:
        return room
    line, keys, count, ctx = step.lists[GIVING], np.empty((lacking, 2)), 0, at.ctx_taking
    for place in range(at.num_decodes):
        decode = decodes[place]
        request = requests[decode.row]
        if request.priority > priority and not decode.is_lost and not decode.is_held:
            count = insert(line, keys, count, place, -request.priority, -request.arrival_s)
    for i in range(count):
        decodes[line[i]].is_held = True
        ctx -= decodes[line[i]].ctx
    _take_part(at, at.num_taking - count, ctx)
    return room + count * at.tokens_per_decode
