"""Who is lost: the decodes and prefills of a step, judged by what they can still meet."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.core.state import DECODE
from sola_sched.cost.times import chunk_overhead_s, chunks_alone_s, chunks_s, decode_s, most_tokens
from sola_sched.planner.attain.held import wait_for_first
from sola_sched.planner.attain.records import (
    GIVING,
    NUM_KINDS,
    NUM_LENGTHS,
    NUM_SIZES,
    PREEMPT,
    insert,
    is_in,
    rank_of,
)


@compiled
def gather(step, running, ahead, waiting, num_victims):
    """List the requests of the step: all that hold a slot, but for the victims, and that wait."""
    at, requests, decodes, prefills = step.at, step.requests, step.decodes, step.prefills
    victims = step.lists[PREEMPT]
    at.num_decodes = at.num_prefills = 0
    for place in range(len(running)):
        row = running[place]
        if num_victims and is_in(victims, num_victims, row):
            continue
        if requests[row].phase == DECODE:
            decodes[at.num_decodes].row, decodes[at.num_decodes].ahead = row, ahead[place]
            at.num_decodes += 1
        else:
            prefills[at.num_prefills].row = row
            at.num_prefills += 1
    at.num_started = at.num_prefills
    for row in waiting:
        prefills[at.num_prefills].row = row
        at.num_prefills += 1
    at.num_running, at.num_waiting = len(running), len(waiting)
    at.lowest = np.iinfo(np.int64).min
    if at.has_ranks:
        for place in range(at.num_decodes):
            at.lowest = max(at.lowest, rank_of(step.lifts, requests[decodes[place].row]))
        for place in range(at.num_prefills):
            at.lowest = max(at.lowest, rank_of(step.lifts, requests[prefills[place].row]))


# Decodes ------------------------------------------------------------------------------------


@compiled
def judge_decodes(step):
    """Judge the decodes. Ranks are strict: one of an upper rank is served even when lost."""
    at, tuning, requests, decodes = step.at, step.tuning, step.requests, step.decodes
    gives_up = _is_room_wanted(step)
    for place in range(at.num_decodes):
        decode = decodes[place]
        request = requests[decode.row]
        _follow_schedule(at, tuning.keep, decode, request)
        if gives_up and math.isinf(request.due_s) and math.isinf(decode.token_s):
            decode.is_lost = True
    weigh(step)
    if at.has_e2e:
        _lose_hurried(step)
    if at.decode_s * tuning.decode_margin > at.bear_s:
        _lose_too_slow(step)
    if at.num_alive == at.num_decodes:
        return
    for place in range(at.num_decodes):
        decode = decodes[place]
        request = requests[decode.row]
        if decode.is_lost and at.has_ranks and rank_of(step.lifts, request) < at.lowest:
            decode.bank_s = decode.token_s = decode.sustain_s = np.inf
            decode.is_lost = False
        if decode.is_lost and min(request.due_s, request.tpot_s, request.e2e_due_s) < np.inf:
            _note_lost(at, request, np.nan)
    if at.has_ranks:
        weigh(step)


@compiled
def _note_lost(at, request, need_s):
    """A request misses a target, for its report: when that was found first, and what it needed."""
    if request.lost_s != request.lost_s:  # NaN: not yet
        request.lost_s, request.need_s = at.now_s, need_s


@compiled
def _follow_schedule(at, keep, decode, request):
    """Where a decode stands; a share `keep` of its targets is planned for.

    Where an end is due, the pace that it takes is a target for the next step and all others.
    """
    out = max(request.num_output + decode.ahead, 1)
    first_s = request.first_token_s
    if not first_s <= at.now_s:  # NaN: it comes with the step in flight
        first_s = at.now_s
    target_s, pace_s = keep * request.tpot_s, keep * (request.e2e_due_s - at.now_s) / decode.left
    decode.ctx = request.num_prompt + out
    ahead_s = target_s * (out + (at.per_step - 1.0))
    decode.bank_s = min(first_s + ahead_s - at.now_s, at.per_step * pace_s)
    decode.token_s = at.per_step * min(target_s, pace_s)
    decode.is_lost = first_s > request.due_s or pace_s <= 0.0
    steps = max(decode.left / at.per_step, 1.0 + 1e-9)  # no further step x no target is no number
    decode.sustain_s = (decode.bank_s + (steps - 1.0) * decode.token_s) / steps


@compiled
def _is_room_wanted(step):
    """Whether slots or memory are short and somebody waits who is to begin or end by a time.

    Decodes without any target miss nothing when they give theirs up.
    """
    at = step.at
    used = 1.0 - at.num_free_blocks / max(1, at.num_blocks)
    if at.num_running < at.max_num_running and used <= step.tuning.memory_threshold:
        return False
    for place in range(at.num_started, at.num_prefills):
        request = step.requests[step.prefills[place].row]
        if min(request.due_s, request.e2e_due_s) < np.inf:
            return True
    return False


@compiled
def weigh(step):
    """Sum up the decodes that are alive: the time of their step, and what they allow.

    One that has more in the bank than halfway from a bare step to what it sustains is on course.
    One that has less catches up by steps of that length.
    """
    at, decodes, catching_up = step.at, step.decodes, step.tuning.catching_up
    at.num_alive, ctx = 0, 0
    for place in range(at.num_decodes):
        if not decodes[place].is_lost:
            at.num_alive += 1
            ctx += decodes[place].ctx
    at.ctx_alive = ctx
    at.decode_s = decode_s(at, at.num_alive, ctx) if at.num_alive else 0.0
    at.mixed_s = at.decode_s + (chunk_overhead_s(at) if at.num_alive else 0.0)
    at.slack_s = at.bear_s = at.pace_s = np.inf
    for place in range(at.num_decodes):
        decode = decodes[place]
        if decode.is_lost:
            continue
        at.slack_s = min(at.slack_s, _bears_s(at, catching_up, decode))
        at.bear_s = min(at.bear_s, decode.sustain_s)
        at.pace_s = min(at.pace_s, decode.token_s)


@compiled
def _bears_s(at, catching_up, decode):
    """The longest next step that keeps one on course, or brings it there."""
    halfway_s = at.decode_s + catching_up * max(decode.sustain_s - at.decode_s, 0.0)
    if decode.bank_s >= halfway_s:
        return decode.bank_s
    return min(halfway_s, decode.token_s)


@compiled
def slack_up_to_s(step, rank):
    """As `slack_s`, of the decodes up to a rank alone; inf without any."""
    slack_s = np.inf
    for place in range(step.at.num_decodes):
        decode = step.decodes[place]
        if not decode.is_lost and rank_of(step.lifts, step.requests[decode.row]) <= rank:
            slack_s = min(slack_s, _bears_s(step.at, step.tuning.catching_up, decode))
    return slack_s


@compiled
def _lose_hurried(step):
    """Lose those whose last token is due before steps as usual bring it.

    One of them would keep all steps short, and the prompts of many others waiting.
    """
    at = step.at
    token_s = _usual_token_s(at, at.decode_s)
    for place in range(at.num_decodes):
        decode = step.decodes[place]
        left_s = step.tuning.keep * (step.requests[decode.row].e2e_due_s - at.now_s)
        if left_s < decode.left * token_s:
            decode.is_lost = True
    weigh(step)


@compiled
def _lose_too_slow(step):
    """Keep, of those not lost, the most whose bare steps are short enough for all of them.

    Those that sustain steps so much longer that they miss nothing when they wait, as those without
    a target do, get what the others leave over.
    """
    at, tuning, decodes = step.at, step.tuning, step.decodes
    for place in range(at.num_decodes):
        if decodes[place].sustain_s > tuning.can_wait * at.decode_s:
            decodes[place].is_lost = True
    weigh(step)
    if at.decode_s * tuning.decode_margin <= at.bear_s:
        return
    order, keys = step.lists[GIVING], np.empty((at.num_alive, 2))
    count, num_kept, ctx = 0, 0, 0
    for place in range(at.num_decodes):
        if not decodes[place].is_lost:
            count = insert(order, keys, count, place, 0.0, -decodes[place].sustain_s)
    for i in range(count):
        ctx += decodes[order[i]].ctx
        bare_s = decode_s(at, i + 1.0, ctx)
        if bare_s * tuning.decode_margin <= decodes[order[i]].sustain_s:
            num_kept = i + 1
    for i in range(num_kept, count):
        decodes[order[i]].is_lost = True
    weigh(step)


@compiled
def most_lent_s(step):
    """The longest next step after which all alive can still meet TPOT at their predicted ends.

    Assumes that later steps last the mean of a bare one and the target: the other half is for the
    prefills that come then.
    """
    at, decodes, most_s = step.at, step.decodes, np.inf
    for place in range(at.num_decodes):
        decode = decodes[place]
        if not decode.is_lost:
            gain_s = 0.5 * max(decode.token_s - at.decode_s, 0.0)
            # No further step x no target is no number.
            more = max(decode.left / at.per_step - 1.0, 1e-9)
            most_s = min(most_s, decode.bank_s + more * gain_s)
    return most_s


# Prefills -----------------------------------------------------------------------------------


@compiled
def judge_prefills(step):
    """What each prefill takes, and whether it can be on time beside the decodes."""
    at, tuning, requests, prefills = step.at, step.tuning, step.requests, step.prefills
    at.num_feasible = at.num_hopeless = at.num_kept = 0
    wait_for_first(step)
    chunk = _usual_chunk(at)
    for place in range(at.num_prefills):
        prefill = prefills[place]
        request = requests[prefill.row]
        prefill.rank = rank_of(step.lifts, request) if at.has_ranks else 0
        _judge_prefill(at, tuning, prefill, request, chunk)
        if not prefill.is_feasible and prefill.rank < at.lowest:
            # What an upper one has lost still goes before a lower one.
            prefill.due_s, prefill.is_feasible = np.inf, True
        if not prefill.is_feasible and prefill.due_s < np.inf:
            need_s = at.decode_s + prefill.service_s
            if tuning.prefill_margin * need_s <= prefill.due_s:  # its TPOT cannot be met
                need_s = np.nan
            _note_lost(at, request, need_s)
        at.num_feasible += prefill.is_feasible
        at.num_hopeless += prefill.is_hopeless
        at.num_kept += prefill.is_feasible and place < at.num_started


@compiled
def _usual_chunk(at):
    """Tokens of a chunk in a step as long as the tightest TPOT, >= 1.

    A long prompt is computed in such chunks, or whole where the engine cuts none. What the model
    says of one that is much longer than those it has learned from may be off by half.
    """
    if math.isinf(at.pace_s) or not at.chunks_prefills:
        return float(at.max_num_tokens)
    tokens = most_tokens(at, at.pace_s, at.num_alive, at.ctx_alive, 0.0)
    return max(1.0, min(tokens, float(at.max_num_tokens)))


@compiled
def _judge_prefill(at, tuning, prefill, request, chunk):
    """Find what a prefill costs, when it is due, and whether it is feasible.

    It is not if `prefill_margin` times what it needs is more than the time that is left, or if even
    steps of it alone would be too long for its TPOT: its tokens would be late whoever gave way.
    """
    is_first, left_s = request.num_output == 0, _limit_s(at, tuning, prefill, request)
    if is_first:
        left_s = min(left_s, request.due_s - at.now_s)
    done = float(request.num_computed)
    todo = max(float(request.prefill_target) - done, 1.0)
    prefill.new, prefill.has, prefill.chunk = todo, done, todo
    prefill.service_s = chunks_s(at, todo, done, chunk)
    if _is_judged_alone(at, tuning):
        prefill.service_s = min(prefill.service_s, chunks_alone_s(at, todo, done, chunk))
    prefill.weight_s = prefill.service_s / request.weight
    if at.max_chunk:  # the steps that a long prompt takes before its last one count
        prefill.chunk = min(todo, float(at.max_chunk))
        left_s -= (math.ceil(todo / prefill.chunk) - 1.0) * at.mixed_s
    need_s = at.taking_s + prefill.service_s
    prefill.is_feasible = left_s < np.inf and tuning.prefill_margin * need_s <= left_s
    prefill.is_hopeless = is_first and left_s < np.inf and not prefill.is_feasible
    if is_first and request.max_tokens > 1 and prefill.is_feasible:
        alone_s = tuning.decode_margin * decode_s(at, 1.0, float(request.prefill_target))
        prefill.is_feasible = alone_s <= tuning.keep * request.tpot_s * at.per_step
    prefill.due_s = left_s
    if is_first and request.ttft_s < np.inf:
        early_s = left_s - (1.0 - tuning.keep) * request.ttft_s
        if need_s <= early_s:
            prefill.due_s = early_s


@compiled
def _limit_s(at, tuning, prefill, request):
    """Time left until it must end for its other targets than TTFT, seconds; -inf if it is lost."""
    limit_s = np.inf
    if request.num_output:  # displaced after its first token: steps as usual bring it on course
        target_s = tuning.keep * request.tpot_s
        if request.first_token_s > request.due_s:
            limit_s = -np.inf
        elif target_s < np.inf:
            gain_s = max(target_s - _usual_token_s(at, at.decode_s), 0.0)
            ahead_s = target_s * request.num_output + gain_s * (prefill.left - 1.0)
            limit_s = request.first_token_s + ahead_s - at.now_s
    if request.e2e_due_s < np.inf:  # its tokens have to come in time too, at the usual pace
        left_s = tuning.keep * (request.e2e_due_s - at.now_s)
        step_s = max(at.decode_s, decode_s(at, 1.0, 0.0))  # it will be one of them
        token_s = _usual_token_s(at, step_s)
        if at.num_prefills == 1 and _is_judged_alone(at, tuning):  # no prompts come in between
            token_s = step_s / at.per_step
        limit_s = min(limit_s, left_s - (prefill.left - 1.0) * token_s)
    return limit_s


@compiled
def _is_judged_alone(at, tuning):
    """Whether nobody decodes, and who would be late is refused.

    Then its own steps tell what it takes. Steps beside decodes may not have run for long, and would
    not if what is known of them refused all.
    """
    return tuning.rejects and not at.num_decodes


@compiled
def is_rejected(step, place):
    """Whether a prefill is refused: it cannot have its first token in time, or is overdue."""
    rejects = step.tuning.rejects and place >= step.at.num_started
    return rejects and (step.prefills[place].is_hopeless or is_overdue(step, place))


@compiled
def is_overdue(step, place):
    """Whether a prefill misses its targets anyway and has waited long enough for its first token.

    One that had its first token and was displaced is not: two of them would displace each other for
    ever.
    """
    prefill = step.prefills[place]
    request = step.requests[prefill.row]
    is_first = request.num_output == 0
    return is_first and not prefill.is_feasible and request.served_by_s <= step.at.now_s


@compiled
def spare_one(step):
    """Of those that predictions alone refuse, spare one of each kind after many in a row.

    Whoever is refused computes nothing, so if all of a kind are, predictions that are wrong of it
    stay wrong. The one that is spared is served, late if need be, and until it is no other. Without
    a share of the time for the late it may not be served then, so it is refused.
    """
    at, account, tuning = step.at, step.account, step.tuning
    if not at.num_hopeless:
        return
    has_spared = np.zeros(NUM_KINDS, np.bool_)
    for place in range(at.num_started, at.num_prefills):
        kind, request = _kind(step, place), step.requests[step.prefills[place].row]
        may_be_served = tuning.share > 0.0 or not _is_late(at, request)
        if request.serial == account.spared[kind] and may_be_served:
            has_spared[kind] = True
            _spare(at, step.prefills[place])
    for place in range(at.num_started, at.num_prefills):
        kind, request = _kind(step, place), step.requests[step.prefills[place].row]
        is_hopeless = step.prefills[place].is_hopeless
        if not is_hopeless or _is_late(at, request) or has_spared[kind]:
            continue
        if account.num_refused[kind] < tuning.refused_in_a_row:
            account.num_refused[kind] += 1
            continue
        account.num_refused[kind], account.spared[kind] = 0, request.serial
        has_spared[kind] = True
        _spare(at, step.prefills[place])


@compiled
def _is_late(at, request):
    """Whether it is late by the clock, whatever is predicted."""
    return min(request.due_s, request.e2e_due_s) <= at.now_s


@compiled
def _spare(at, prefill):
    at.num_hopeless -= prefill.is_hopeless
    prefill.is_hopeless = False


@compiled
def note_begun(step, place):
    """If a prefill begins in this step, refusals of its kind are no longer in a row."""
    if place >= step.at.num_started:
        step.account.num_refused[_kind(step, place)] = 0


@compiled
def _kind(step, place):
    """Number of those prefills that are refused by the same predictions.

    What is learned of prompts is that of about the length that is left to compute. Where answers
    have to end in time, it is the output length of their class too.
    """
    prefill, lengths = step.prefills[place], 0
    request = step.requests[prefill.row]
    if request.e2e_due_s < np.inf:
        lengths = 1 + request.length_class % (NUM_LENGTHS - 1)
    return lengths * NUM_SIZES + min(NUM_SIZES - 1, int(math.log2(prefill.new)))


@compiled
def _usual_token_s(at, step_s):
    """Time between two tokens of a decode, with the prefills that come in between, seconds."""
    return step_s / max(0.1, 1.0 - at.prefill_share) / at.per_step
