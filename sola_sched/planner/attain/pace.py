"""How long may the step be, and which prefills are on time in steps of that length."""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.cost.times import chunk_s
from sola_sched.planner.attain.held import load_of_traffic
from sola_sched.planner.attain.lost import is_rejected, most_lent_s
from sola_sched.planner.attain.records import NEAR, ORDER


@compiled
def find_pace(step):
    """The longest step that keeps all decodes on course, and the most prefills on time in such.

    A step ends before the deadline of its first prefill: nobody gets a token earlier. Where
    somebody would be late, decodes lend of their later time, if then all are on time. Where
    somebody is lost already they do so only if all that comes can be served: past that the time
    lent is missing later.

    Sets `limit_s`, and lists in `ORDER` the first prefills that can be on time, in the order of
    service: `num_on_time` of them are so together.
    """
    at, tuning, prefills = step.at, step.tuning, step.prefills
    at.limit_s = at.slack_s
    for place in range(at.num_prefills):
        prefill = prefills[place]
        prefill.is_job = prefill.is_feasible and not is_rejected(step, place)
    _find_jobs(step)
    at.num_on_time = at.num_order = 0
    if not at.num_jobs:
        return
    kept = np.zeros(at.num_near, np.bool_)
    at.num_on_time = _keep_on_time(step, at.limit_s, kept)
    if at.num_on_time < at.num_jobs and tuning.lends:
        is_anybody_lost = at.num_alive < at.num_decodes or at.num_hopeless > 0
        if not is_anybody_lost or (tuning.lends_past_lost and _is_sustained(step)):
            need_s = _all_on_time_s(step)
            if need_s < most_lent_s(step):
                at.num_on_time, at.limit_s = at.num_jobs, need_s
    _put_in_order(step, kept)
    if at.num_on_time and tuning.ends_with_first:
        first = step.prefills[step.lists[ORDER, 0]]
        need_s = at.least_s + first.service_s
        at.limit_s = min(at.limit_s, max(first.due_s, need_s))


@compiled
def _is_sustained(step):
    """Whether what comes can be served at the pace of the tightest target, and TPOT is tight.

    Where it is not, steps within the schedules have room for any prompt that is worth it.
    """
    _, _, decodes, total = load_of_traffic(step.at)
    return total <= 1.0 and decodes >= step.tuning.near


# Which prefills are on time together ------------------------------------------------------------


@compiled
def _find_jobs(step):
    """List in `NEAR` the first of those marked `is_job`, by class and deadline; count them all."""
    at, prefills, line = step.at, step.prefills, step.lists[NEAR]
    most = min(step.tuning.num_examined, len(line))
    keys, ranks = np.empty(most), np.empty(most)
    at.num_jobs = at.num_near = 0
    for place in range(at.num_prefills):
        prefill = prefills[place]
        if prefill.is_job:
            at.num_jobs += 1
            at.num_near = _insert_by_rank(
                line, at.num_near, most, place, ranks, float(prefill.rank), keys, prefill.due_s
            )
    total_s = 0.0
    for i in range(at.num_near):
        total_s += step.prefills[line[i]].service_s
    at.delay_s = at.taking_s
    # The step ends with the deadline of its first prefill. Where one could hold many, those who
    # are to be on time are so a step early, or steps would end with one each.
    is_short = total_s / max(1, at.num_near) < at.mixed_s
    at.lead_s = at.mixed_s if is_short and step.tuning.leads else 0.0


@compiled
def _insert_by_rank(line, count, most, place, ranks, rank, keys, key):
    """As `records.insert`, by rank and then by key."""
    if count == most:
        last = count - 1
        if rank > ranks[last] or (rank == ranks[last] and not key < keys[last]):
            return count
        count -= 1
    at = count
    while at > 0 and (rank < ranks[at - 1] or (rank == ranks[at - 1] and key < keys[at - 1])):
        line[at], ranks[at], keys[at] = line[at - 1], ranks[at - 1], keys[at - 1]
        at -= 1
    line[at], ranks[at], keys[at] = place, rank, key
    return count + 1


@compiled
def _keep_on_time(step, limit_s, kept):
    """Mark the most of `NEAR` that are on time together in steps of `limit_s`; how many.

    All a step early, if that is possible; else as many as are on time at all.
    """
    at = step.at
    share = max(step.tuning.least_share, 1.0 - at.mixed_s / max(limit_s, 1e-9))
    count = _keep(step, share, 0.0, False, kept)
    if count < at.num_near:
        count = _keep(step, share, at.lead_s, True, kept)
        if not count and at.lead_s:
            count = _keep(step, share, 0.0, True, kept)
    return count


@compiled
def _keep(step, share, lead_s, is_weighed, kept):
    """Mark the most jobs that can be on time; how many.

    Source: Moore and Hodgson (1968), for the fewest late jobs on one machine: take the jobs by
    deadline and, whenever the last one taken would be late, give up the one that costs most: time,
    or time for what it is worth. Nobody is given up for one of a lower class.

    Args:
        share: Share of its time that the machine has for them.
        lead_s: They are to end so much before their deadlines, seconds.
        is_weighed: Whether costs are weighed.
    """
    at, jobs, prefills = step.at, step.lists[NEAR], step.prefills
    busy_s, num_kept = 0.0, 0
    for last in range(at.num_near):
        job = prefills[jobs[last]]
        kept[last] = True
        num_kept += 1
        busy_s += job.service_s
        while busy_s > share * (job.due_s - (at.delay_s + lead_s)):
            worst, most_s = -1, 0.0
            for i in range(last + 1):
                other = prefills[jobs[i]]
                cost_s = other.weight_s if is_weighed else other.service_s
                if kept[i] and other.rank == job.rank and (worst < 0 or cost_s > most_s):
                    worst, most_s = i, cost_s
            if worst < 0:  # what a higher class has kept is too much by itself
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
        share = max(share, busy_s / max(prefill.due_s - at.delay_s, 1e-9))
    if at.num_near < at.num_jobs or num_starts > open_slots(at):
        return np.inf
    longest_s = at.mixed_s + chunk_s(at, float(token_room(at)), 0.0)
    return at.mixed_s / (1.0 - share) if at.mixed_s < (1.0 - share) * longest_s else np.inf


@compiled
def _put_in_order(step, kept):
    """List in `ORDER`, by class, those on time, by deadline, then the others.

    Those by what they cost, if the step gets to them.
    """
    at, near, order = step.at, step.lists[NEAR], step.lists[ORDER]
    if at.num_on_time == at.num_jobs:
        at.num_order = at.num_near
        for i in range(at.num_near):
            order[i] = near[i]
        return
    most = min(step.tuning.num_examined, len(order))
    keys, ranks = np.empty(most), np.empty(most)
    count, tokens = 0, 0.0
    for i in range(at.num_near):
        if kept[i]:
            prefill = step.prefills[near[i]]
            tokens += prefill.new
            count = _insert_by_rank(
                order, count, most, near[i], ranks, float(prefill.rank), keys, -np.inf
            )
            prefill.is_job = False
    gets_there = tokens < token_room(at)
    for i in range(at.num_near):
        if not kept[i]:
            count = _add_late(step, near[i], gets_there, count, most, ranks, keys)
    for place in range(at.num_prefills):
        if step.prefills[place].is_job:
            count = _add_late(step, place, gets_there, count, most, ranks, keys)
    at.num_order = count


@compiled
def _add_late(step, place, gets_there, count, most, ranks, keys):
    prefill = step.prefills[place]
    prefill.is_job = False
    key = prefill.weight_s if gets_there else 0.0
    rank = float(prefill.rank)
    return _insert_by_rank(step.lists[ORDER], count, most, place, ranks, rank, keys, key)


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
    """Slots that nobody holds who can still meet its targets."""
    return at.max_num_running - at.num_alive - at.num_kept
