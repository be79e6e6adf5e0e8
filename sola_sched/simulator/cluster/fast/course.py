"""Which decodes of the fast model of `sola_sched` are on course, and how long steps they bear.

Token j after the first is due at ``first + j * TPOT``. Whoever decodes gets a token in each step,
so one time tells its course: when its token in step 0 would have been due.
"""

from __future__ import annotations

import heapq
import math

from sola_sched.core.compiled import compiled
from sola_sched.planner.attain import AttainTuning
from sola_sched.prediction.length import NUM_LEVELS
from sola_sched.simulator.cluster.fast.state import DUE, SAFETY, append, discard, lose
from sola_sched.simulator.cluster.fast.times import decode_s

#: A decode is lost only if steps are longer than it bears by more than 1 / this.
_MARGIN = AttainTuning().decode_margin


@compiled
def target_s(request):
    """Its TPOT target, less the margin."""
    return request.tpot_s * (1.0 - SAFETY)


@compiled
def join(e, slot):
    """One has begun to decode."""
    request = e.requests[slot]
    discard(e.lists[DUE], slot)
    if request.first_s - request.arrival_s > request.ttft_s:
        lose(e, slot)
    elif math.isfinite(request.tpot_s):
        step_of_first = request.joined - request.num_done + 1
        request.due_s = request.first_s - target_s(request) * step_of_first
        append(e.lists[DUE], slot)


@compiled
def slack_s(e, now_s, bare_s):
    """Time until the next token of one on course is due; forgets who is not, notes the targets.

    Args:
        e: The engine.
        now_s: Now.
        bare_s: Of a step of the decodes alone.
    """
    slack_s, e.at.tightest_s, e.at.loosest_s = math.inf, math.inf, -math.inf
    tpot_s = _next_target_s(e, -math.inf)
    while tpot_s < math.inf:
        slot = _first_on_course(e, tpot_s, now_s, bare_s)
        if slot >= 0:
            slack_s = min(slack_s, _bank_s(e.requests[slot], e.at.step, now_s))
            e.at.tightest_s, e.at.loosest_s = min(e.at.tightest_s, tpot_s), tpot_s
        tpot_s = _next_target_s(e, tpot_s)
    return slack_s


@compiled
def _next_target_s(e, above_s):
    """The smallest of the targets above a time of those that may be on course; inf of none."""
    next_s = math.inf
    for slot in e.lists[DUE, 1 : e.lists[DUE, 0] + 1]:
        if above_s < target_s(e.requests[slot]) < next_s:
            next_s = target_s(e.requests[slot])
    return next_s


@compiled
def _first_on_course(e, tpot_s, now_s, bare_s):
    """Whose token is due first with that target, -1 if nobody's; forgets who is not on course."""
    while True:
        slot = _first_due(e, tpot_s)
        if slot < 0:
            return -1
        request = e.requests[slot]
        if request.is_decoding:
            bank_s = _bank_s(request, e.at.step, now_s)
            gain_s = (request.ends - e.at.step) * (tpot_s - _MARGIN * bare_s)
            if bank_s < 0.0 and bank_s + gain_s < 0.0:
                lose(e, slot)
            if not request.is_lost:
                return slot
        discard(e.lists[DUE], slot)


@compiled
def _first_due(e, tpot_s):
    first = -1
    for slot in e.lists[DUE, 1 : e.lists[DUE, 0] + 1]:
        request = e.requests[slot]
        if target_s(request) == tpot_s and (first < 0 or request.due_s < e.requests[first].due_s):
            first = slot
    return first


@compiled
def expected_steps(request, step):
    """Output that is expected to come yet, >= 1; see `prediction.length.remaining_mean`."""
    done = request.num_done + step - request.joined
    lives, mass = 0, 0.0
    for level in range(NUM_LEVELS):
        if request.quantiles[level] > done:
            lives += 1
            mass += request.quantiles[level]
    if lives:
        return max(mass / lives - done, 1.0)
    largest = request.quantiles[NUM_LEVELS - 1]
    doublings = math.floor(math.log2(done / largest)) + 1.0
    return max(largest * 2.0**doublings - done, 1.0)


@compiled
def longest_s(e, now_s, bare_s):
    """How long the next step may take; see `slack_s`.

    As long as the smallest bank, and where that is less than halfway from a bare step to what the
    decode sustains, as long as that.
    """
    longest_s = slack_s(e, now_s, bare_s)
    if math.isinf(e.at.tightest_s) or longest_s >= max(bare_s, e.at.loosest_s):
        return longest_s
    longest_s = math.inf
    for slot in e.lists[DUE, 1 : e.lists[DUE, 0] + 1]:
        request = e.requests[slot]
        if request.is_decoding:
            tpot_s, bank_s = target_s(request), _bank_s(request, e.at.step, now_s)
            halfway_s = bare_s + 0.5 * max(0.0, _sustain_s(request, e.at.step, now_s) - bare_s)
            bears_s = bank_s if bank_s >= halfway_s else min(halfway_s, tpot_s)
            longest_s = min(longest_s, bears_s)
    return longest_s


@compiled
def can_lend_s(e, now_s, bare_s):
    """The longest step that all can catch up with, in later ones halfway between bare steps and
    their targets."""
    longest_s = math.inf
    for slot in e.lists[DUE, 1 : e.lists[DUE, 0] + 1]:
        request = e.requests[slot]
        if request.is_decoding:
            gain_s = 0.5 * max(0.0, target_s(request) - bare_s)
            steps = expected_steps(request, e.at.step)
            longest_s = min(longest_s, _bank_s(request, e.at.step, now_s) + (steps - 1.0) * gain_s)
    return longest_s


@compiled
def lose_too_slow(e, now_s):
    """Keep the most of those on course whose bare steps are short enough for all of them.

    Returns:
        The others, which are lost now: their slots.
    """
    order = [(0.0, 0) for _ in range(0)]  # a heap; what bears the most first
    for place in range(1, e.lists[DUE, 0] + 1):
        request = e.requests[e.lists[DUE, place]]
        if request.is_decoding:
            heapq.heappush(order, (-_sustain_s(request, e.at.step, now_s), place))
    found = [0 for _ in range(0)]
    kept = ctx = 0
    while order:
        bears_s, place = heapq.heappop(order)
        request = e.requests[e.lists[DUE, place]]
        found.append(e.lists[DUE, place])
        ctx += request.num_computed + e.at.step - request.joined
        if _MARGIN * decode_s(e.times, len(found), ctx) <= -bears_s:
            kept = len(found)
    too_slow = found[kept:]
    for slot in too_slow:
        lose(e, slot)
    return too_slow


@compiled
def _bank_s(request, step, now_s):
    """Time until its next token is due."""
    return request.due_s + target_s(request) * (step + 1) - now_s


@compiled
def _sustain_s(request, step, now_s):
    """The longest mean step with which it meets its target."""
    steps = expected_steps(request, step)
    return (_bank_s(request, step, now_s) + (steps - 1.0) * target_s(request)) / steps
