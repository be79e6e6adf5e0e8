"""How long may the step be, and which prefills are on time in steps of that length."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.core.traffic import NUM_ENOUGH
from sola_sched.cost.times import chunk_s, decode_s
from sola_sched.planner.attain.held import has_spare, usual_s
from sola_sched.planner.attain.lost import is_rejected, most_lent_s, slack_up_to_s
from sola_sched.planner.attain.records import NEAR, ORDER, insert


@compiled
def find_pace(step):
    """The longest step that keeps all decodes on course, and the most prefills on time in such.

    A step ends before the deadline of its first prefill: nobody gets a token earlier. Where
    somebody would be late, decodes lend of their later time, if then all are on time. Where
    somebody is lost already they do so only if all that comes can be served: past that the time
    lent is missing later.

    Sets `limit_s`, and lists in `ORDER` the first prefills that can be on time, in the order of
    service: `num_on_time` of them are so together. Prefills up to `upper_rank` may take the step to
    `upper_limit_s`.
    """
    at, tuning = step.at, step.tuning
    at.limit_s = at.upper_limit_s = at.slack_s
    at.upper_rank = np.iinfo(np.int64).min
    _find_jobs(step)
    at.num_on_time = at.num_order = 0
    at.can_wait_s = np.inf
    if not at.num_jobs:
        return
    kept = np.zeros(at.num_near, np.bool_)
    at.num_on_time = _keep_on_time(step, kept)
    if at.num_on_time < at.num_jobs and tuning.lends:
        is_anybody_lost = at.num_alive < at.num_decodes or at.num_hopeless > 0
        if not is_anybody_lost or (tuning.lends_past_lost and _can_serve_arrivals(step)):
            need_s = _all_on_time_s(step)
            if need_s < most_lent_s(step):
                at.num_on_time, at.limit_s = at.num_jobs, need_s
                kept[:] = True
    if at.has_ranks:
        _lengthen_for_uppers(step, kept)
        at.num_on_time = np.count_nonzero(kept)
    _put_in_order(step, kept)
    if at.num_on_time and tuning.ends_with_first:
        first = step.prefills[step.lists[ORDER, 0]]
        end_s = max(first.due_s, at.least_s + first.service_s)
        at.limit_s, at.upper_limit_s = min(at.limit_s, end_s), min(at.upper_limit_s, end_s)
    at.upper_limit_s = max(at.upper_limit_s, at.limit_s)


@compiled
def _lengthen_for_uppers(step, kept):
    """Ranks are strict: decodes of lower ranks do not keep a prefill waiting until it is late.

    Where the first of `NEAR` that is late, or would be, is of an upper rank, steps may be longer
    for all up to its rank, within what the decodes up to its rank bear: by what those need that
    can be on time, or else to twice a bare step, so that the late get half of the time and those
    of their rank that come meanwhile are still on time. Others get no more time by that.
    """
    at = step.at
    for i in range(at.num_near):
        prefill = step.prefills[step.lists[NEAR, i]]
        if kept[i] and not _is_late(step, prefill) and _has_time_for(step, prefill):
            continue
        slack_s = slack_up_to_s(step, prefill.rank)
        if slack_s > at.limit_s:
            at.upper_rank = prefill.rank
            need_s = max(at.mixed_s, _keep_uppers(step, slack_s, kept))
            at.upper_limit_s = min(slack_s, max(at.mixed_s + need_s, at.limit_s))
            return


@compiled
def _is_late(step, prefill):
    """Whether it has a target and has missed it."""
    request = step.requests[prefill.row]
    has_target = request.ttft_s < np.inf or request.e2e_due_s < np.inf
    return math.isinf(prefill.due_s) and has_target


@compiled
def _has_time_for(step, prefill):
    """Whether a step of `limit_s` has time for the shortest chunk of a prefill."""
    tokens = min(prefill.new, float(step.tuning.sub_tile))
    return step.at.mixed_s + chunk_s(step.at, tokens, prefill.has) <= step.at.limit_s


@compiled
def _keep_uppers(step, limit_s, kept):
    """Mark anew those up to `upper_rank` that can be on time in steps of `limit_s`.

    Returns:
        The time that they take, seconds.
    """
    at, num_uppers, busy_s = step.at, 0, 0.0
    while num_uppers < at.num_near:
        if step.prefills[step.lists[NEAR, num_uppers]].rank > at.upper_rank:
            break
        num_uppers += 1
    share = max(1e-9, 1.0 - at.mixed_s / max(limit_s, 1e-9))
    _keep(step, share, 0.0, kept[:num_uppers])
    for i in range(num_uppers):
        prefill = step.prefills[step.lists[NEAR, i]]
        if kept[i] and prefill.due_s < np.inf:
            busy_s += prefill.service_s
    return busy_s


@compiled
def _can_serve_arrivals(step):
    """Whether what comes can be served at the pace of the tightest target, and TPOT is tight.

    As a fluid: by Little's law so many decodes run then, which take their share of the time, and
    the prompts theirs. Where TPOT is not tight, steps within the schedules have room for any
    prompt that is worth it.
    """
    at = step.at
    if at.num_came < NUM_ENOUGH or math.isnan(at.mean_output) or not 0.0 < at.pace_s < np.inf:
        return False
    rate_per_s = at.num_came / max(at.now_s - at.first_came_s, 1e-9)
    count = rate_per_s * at.mean_output / at.per_step * at.pace_s
    decodes = decode_s(at, count, count * (at.mean_prompt + 0.5 * at.mean_output)) / at.pace_s
    total = decodes + rate_per_s * chunk_s(at, at.mean_prompt, 0.0)
    return total <= 1.0 and decodes >= step.tuning.near


# Which prefills are on time together ------------------------------------------------------------


@compiled
def _find_jobs(step):
    """List in `NEAR` the first prefills that can be on time, by rank and deadline; count all."""
    at, line = step.at, step.lists[NEAR]
    keys = np.empty((min(step.tuning.num_examined, len(line)), 2))
    at.num_jobs = at.num_near = 0
    for place in range(at.num_prefills):
        prefill = step.prefills[place]
        if prefill.is_feasible and not is_rejected(step, place):
            at.num_jobs += 1
            at.num_near = insert(line, keys, at.num_near, place, prefill.rank, prefill.due_s)


@compiled
def _keep_on_time(step, kept):
    """Mark the most of `NEAR` that are on time together in steps of `limit_s`; how many.

    All of them, if that is possible. Else, where a step could hold many, those that are so a step
    early: it ends with the deadline of its first prefill, so that others would end with one each.
    """
    at, total_s, decodes_s = step.at, 0.0, step.at.mixed_s
    if step.tuning.holds and at.has_room and has_spare(step):
        decodes_s += usual_s(step, at.limit_s) - at.decode_s
    share = max(1e-9, 1.0 - decodes_s / max(at.limit_s, 1e-9))
    count = _keep(step, share, 0.0, kept)
    for i in range(at.num_near):
        total_s += step.prefills[step.lists[NEAR, i]].service_s
    are_many = total_s < at.mixed_s * at.num_near
    if count < at.num_near and are_many and step.tuning.leads:
        count = _keep(step, share, at.mixed_s, kept) or _keep(step, share, 0.0, kept)
    at.can_wait_s = _can_wait_s(step, share, kept)
    return count


@compiled
def _can_wait_s(step, share, kept):
    """How long prompts may wait while those that are kept stay on time; inf for none."""
    busy_s, least_s = 0.0, np.inf
    for i in range(step.at.num_near):
        job = step.prefills[step.lists[NEAR, i]]
        if kept[i]:
            busy_s += job.service_s
            least_s = min(least_s, job.due_s - step.at.taking_s - busy_s / share)
    return least_s


@compiled
def _keep(step, share, lead_s, kept):
    """Mark the most of the first `len(kept)` of `NEAR` that can be on time; how many.

    Source: Moore and Hodgson (1968), for the fewest late jobs on one machine: take the jobs by
    deadline and, whenever the last one taken would be late, give up the one that costs most time
    for what it is worth. Nobody is given up for one of a lower rank.

    Args:
        share: Share of its time that the machine has for them.
        lead_s: They are to end so much before their deadlines, seconds.
    """
    at, jobs, prefills = step.at, step.lists[NEAR], step.prefills
    busy_s, num_kept = 0.0, 0
    for last in range(len(kept)):
        job = prefills[jobs[last]]
        kept[last] = True
        num_kept += 1
        busy_s += job.service_s
        while busy_s > share * (job.due_s - (at.taking_s + lead_s)):
            worst = -1
            for i in range(last + 1):
                other = prefills[jobs[i]]
                costs_most = worst < 0 or other.weight_s > prefills[jobs[worst]].weight_s
                if kept[i] and other.rank == job.rank and costs_most:
                    worst = i
            if worst < 0:  # what an upper rank has kept is too much by itself
                break
            kept[worst] = False
            num_kept -= 1
            busy_s -= prefills[jobs[worst]].service_s
    return num_kept


@compiled
def _all_on_time_s(step):
    """The shortest steps in which all are on time together, seconds; inf if there are none."""
    at, near = step.at, step.lists[NEAR]
    num_starts, busy_s, share = 0, 0.0, -np.inf
    for i in range(at.num_near):
        prefill = step.prefills[near[i]]
        num_starts += near[i] >= at.num_started
        busy_s += prefill.service_s
        share = max(share, busy_s / max(prefill.due_s - at.taking_s, 1e-9))
    if at.num_near < at.num_jobs or num_starts > open_slots(at):
        return np.inf
    longest_s = at.mixed_s + chunk_s(at, float(token_room(at)), 0.0)
    return at.mixed_s / (1.0 - share) if at.mixed_s < (1.0 - share) * longest_s else np.inf


@compiled
def _put_in_order(step, kept):
    """List `NEAR` in `ORDER`: by rank, those on time by deadline, then the others by cost."""
    at, near = step.at, step.lists[NEAR]
    keys = np.empty((at.num_near, 2))
    for i in range(at.num_near):
        prefill = step.prefills[near[i]]
        key = float(i - at.num_near) if kept[i] else prefill.weight_s
        at.num_order = insert(step.lists[ORDER], keys, at.num_order, near[i], prefill.rank, key)


# Room -------------------------------------------------------------------------------------------


@compiled
def token_room(at):
    """Tokens of the step that the decodes on course leave over."""
    return at.max_num_tokens - at.num_taking * at.tokens_per_decode


@compiled
def free_slots(at):
    """Slots that nobody holds."""
    return at.max_num_running - (at.num_decodes + at.num_started)


@compiled
def open_slots(at):
    """Slots that nobody holds, and those of the lost, who can be displaced."""
    return at.max_num_running - at.num_alive - at.num_kept
