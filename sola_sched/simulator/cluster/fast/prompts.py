"""Prompts of a step as `sola_sched` takes them, in the simplest form.

Kept of the `attain` planner (docs/design.md, "The objective"): prompts in order of their TTFT
deadlines; if not all can be on time, the costliest wait behind the others, and are given up once
they cannot even be on time alone; a step is as long as the decodes on course allow, or, where
somebody would be late, as they can catch up with, if nobody is lost or TPOT is tight and all that
comes can be served; of decodes that steps have become too long for, those that bear the least are
held, so that the others stay on course, and while prompts wait so are those that came too late. The
share of the lost shortens what the others may take, without being served.
Left out: prompts alone, slots and memory as resources to plan, classes.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from sola_sched.core.compiled import compiled
from sola_sched.core.traffic import NUM_ENOUGH
from sola_sched.planner.attain import AttainTuning
from sola_sched.simulator.cluster.fast import course
from sola_sched.simulator.cluster.fast.state import (
    DECODES,
    HELD,
    JOBS,
    LATE,
    LOST,
    PREFILLS,
    QUEUE,
    SAFETY,
    TURN,
    append,
    deadline_s,
    decode,
    discard,
    insert,
)
from sola_sched.simulator.cluster.fast.times import decode_s, prefill_s, step_s

#: Share of the time that the lost get; the scheduler's default.
_LOST_SHARE = 0.05
#: Chunks come in whole tiles of so many tokens, small ones in smaller multiples.
_TILE = 128
_SUB_TILE, _MANY_TILES = AttainTuning().sub_tile, AttainTuning().many_tiles
_PREFILL_MARGIN, _NEAR = AttainTuning().prefill_margin, AttainTuning().near


# The decodes.


@compiled
def bare_s(e):
    """Seconds of a step of the decodes alone."""
    return decode_s(e.times, e.at.num_decodes, e.at.ctx)


@compiled
def keep_on_course(e, now_s):
    """Hold decodes that steps are too long for, and those that are lost if it helps."""
    now_bare_s = bare_s(e)
    course.slack_s(e, now_s, now_bare_s)  # forgets who has ended
    if math.isinf(e.at.tightest_s):
        resume(e, math.inf)
        return
    is_anybody_lost = e.lists[LATE, 0] > 0 or e.lists[LOST, 0] > 0
    least_s = e.at.tightest_s * (1.0 - (_LOST_SHARE if is_anybody_lost else 0.0))
    if now_bare_s > least_s or e.lists[QUEUE, 0] or e.lists[PREFILLS, 0]:
        for slot in e.lists[LOST, 1 : e.lists[LOST, 0] + 1]:
            if e.requests[slot].is_decoding:
                _hold(e, slot, now_s)
        if bare_s(e) > least_s:
            for slot in course.lose_too_slow(e, now_s):
                _hold(e, slot, now_s)
    else:
        resume(e, least_s)


@compiled
def _hold(e, slot, now_s):
    request = e.requests[slot]
    steps = e.at.step - request.joined
    request.num_done += steps
    request.num_computed += steps
    request.last_s = now_s
    request.is_decoding, request.is_held = False, True
    e.at.num_decodes -= 1
    e.at.ctx -= request.num_computed
    e.at.held_kv += request.num_computed
    discard(e.lists[DECODES], slot)
    append(e.lists[HELD], slot)


@compiled
def resume(e, limit_s):
    """Those that were held go on as long as steps stay within the limit."""
    while e.lists[HELD, 0]:
        slot = e.lists[HELD, 1]
        request = e.requests[slot]
        ctx = e.at.ctx + request.num_computed
        if decode_s(e.times, e.at.num_decodes + 1, ctx) > limit_s:
            return
        discard(e.lists[HELD], slot)
        request.is_held = False
        e.at.held_kv -= request.num_computed
        decode(e, slot)


# The prompts.


@compiled
def room(e, now_s):
    """The largest chunk whose step keeps all on course, and whose turn it is."""
    most = e.at.budget - e.at.num_decodes
    e.lists[JOBS, 0] = e.lists[TURN, 0] = 0
    if most <= 0 or not (e.lists[PREFILLS, 0] or e.lists[QUEUE, 0] or e.lists[LATE, 0]):
        return most
    is_one_lost = _judge(e, now_s, most)
    longest_s = course.longest_s(e, now_s, bare_s(e))
    tokens = _tokens_within(e, longest_s, most)
    if e.lists[JOBS, 0]:
        token_s = _step_s(e, tokens) / tokens if tokens else math.inf
        if _share_for(e, now_s, token_s) > 1.0:
            is_one_lost = is_one_lost or e.lists[LOST, 0] > 0 or e.lists[LATE, 0] > 0
            if not is_one_lost or is_sustained(e, now_s):
                lent_s = _lent_s(e, now_s, most)
                if lent_s > 0.0:
                    # A little more than fits: a little less would not be in time.
                    enough = _tokens_within(e, lent_s, most) + _SUB_TILE
                    tokens = max(tokens, min(most, enough))
        if tokens:
            _sort_out(e, now_s, _step_s(e, tokens) / tokens)
    return tokens if tokens >= min(_SUB_TILE, _wanted(e)) else 0


@compiled
def _left(e, slot):
    return e.requests[slot].num_prompt - e.requests[slot].num_computed


@compiled
def _step_s(e, tokens):
    return step_s(e.times, e.at.num_decodes, e.at.ctx, tokens, float(tokens * tokens), 0.0, 1)


@compiled
def _judge(e, now_s, most):
    """Find those that can be on time, begun or not; give up the others that wait.

    A prompt can if it would be, alone beside the decodes, in steps of `most` tokens.

    Returns:
        Whether one that has begun cannot.
    """
    alone_s = _step_s(e, 0)
    token_s = (_step_s(e, most) - alone_s) / most
    is_one_lost = False
    for slot in e.lists[PREFILLS, 1 : e.lists[PREFILLS, 0] + 1]:
        if _can_be_on_time(e, slot, now_s, alone_s, token_s):
            _add_job(e, slot)
        else:
            is_one_lost = True
    queue, stay = e.lists[QUEUE], 0
    for place in range(1, queue[0] + 1):
        slot = queue[place]
        if _can_be_on_time(e, slot, now_s, alone_s, token_s):
            stay += 1
            queue[stay] = slot
            _add_job(e, slot)
        else:
            append(e.lists[LATE], slot)
    queue[0] = stay
    return is_one_lost


@compiled
def _can_be_on_time(e, slot, now_s, alone_s, token_s):
    request = e.requests[slot]
    deadline = deadline_s(request)
    need_s = alone_s + _left(e, slot) * token_s
    late_s = deadline + SAFETY * request.ttft_s
    return deadline == -math.inf or now_s + _PREFILL_MARGIN * need_s <= late_s


@compiled
def _add_job(e, slot):
    """By deadline, behind those that have the same."""
    jobs, deadline = e.lists[JOBS], deadline_s(e.requests[slot])
    place = jobs[0] + 1
    while place > 1 and deadline_s(e.requests[jobs[place - 1]]) > deadline:
        place -= 1
    insert(jobs, place, slot)


@compiled
def _sort_out(e, now_s, token_s):
    """Whose turn it is: the most that can be on time together (Moore and Hodgson), by deadline,
    then the others, the shortest first.

    Args:
        e: The engine.
        now_s: Now.
        token_s: What a prompt token takes, with the decodes beside it.
    """
    jobs, turn = e.lists[JOBS], e.lists[TURN]
    time_s = now_s
    # Heaps by cost, the largest first, and the smallest; sorting takes Numba longer to compile.
    kept = [(0, 0) for _ in range(0)]
    last = [(0, 0) for _ in range(0)]
    is_kept = np.ones(jobs[0] + 1, np.bool_)
    for place in range(1, jobs[0] + 1):
        left, deadline = _left(e, jobs[place]), deadline_s(e.requests[jobs[place]])
        heapq.heappush(kept, (-left, place))
        time_s += left * token_s
        if time_s > deadline > -math.inf:
            tokens, costliest = heapq.heappop(kept)
            time_s += tokens * token_s
            heapq.heappush(last, (-tokens, costliest))
            is_kept[costliest] = False
    for place in range(1, jobs[0] + 1):
        if is_kept[place]:
            append(turn, jobs[place])
    while last:
        append(turn, jobs[heapq.heappop(last)[1]])


@compiled
def _share_for(e, now_s, token_s):
    """The share of the time with which all prompts are on time, if a token takes so long."""
    tokens, share = 0, 0.0
    for slot in e.lists[JOBS, 1 : e.lists[JOBS, 0] + 1]:
        tokens += _left(e, slot)
        deadline = deadline_s(e.requests[slot])
        if deadline > -math.inf:
            share = max(share, tokens * token_s / max(deadline - now_s, 1e-9))
    return share


@compiled
def _lent_s(e, now_s, most):
    """The shortest step in which all prompts are on time, if decodes can catch up; else 0."""
    alone_s, longest_s = bare_s(e), _step_s(e, most)
    share = _share_for(e, now_s, (longest_s - alone_s) / most)
    if not alone_s < (1.0 - share) * longest_s:
        return 0.0
    need_s = alone_s / (1.0 - share)
    return need_s if need_s < course.can_lend_s(e, now_s, alone_s) else 0.0


@compiled
def is_sustained(e, now_s):
    """Whether what comes can be served at the pace of the tightest target, which is tight.

    See `RecentTraffic.load`, of which this is the form for one output token in a step.
    """
    at, step_s = e.at, e.at.tightest_s
    if at.num_came < NUM_ENOUGH or math.isnan(at.mean_output) or not 0.0 < step_s < math.inf:
        return False
    rate_per_s = at.num_came / max(now_s - at.first_came_s, 1e-9)
    num_decodes = rate_per_s * at.mean_output * step_s
    ctx = num_decodes * (at.mean_prompt + 0.5 * at.mean_output)
    decodes = decode_s(e.times, num_decodes, ctx) / step_s
    prompt_s = prefill_s(e.times, at.mean_prompt) - prefill_s(e.times, 0.0)
    return decodes + rate_per_s * prompt_s <= 1.0 and decodes >= _NEAR


@compiled
def _wanted(e):
    """Tokens of the prompt that is next."""
    for which in (TURN, PREFILLS, QUEUE, LATE):
        if e.lists[which, 0]:
            return _left(e, e.lists[which, 1])
    return 0


@compiled
def _tokens_within(e, limit_s, most):
    """Prompt tokens of a step that takes no longer."""
    if math.isinf(limit_s) or _step_s(e, most) <= limit_s:
        return most
    low, high = 0, most // _SUB_TILE
    while low < high:
        middle = (low + high + 1) // 2
        if _step_s(e, middle * _SUB_TILE) > limit_s:
            high = middle - 1
        else:
            low = middle
    tokens = low * _SUB_TILE
    return tokens // _TILE * _TILE if tokens >= _MANY_TILES * _TILE else tokens
