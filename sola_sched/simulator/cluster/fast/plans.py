"""A step as `sola_sched` schedules it: the planner of `policy="attain"` decides, vLLM does it.

What a plan is made of is filled in as `StateMonitor` and `AttainPlanner` do it. The model decides
at the start of a step, so no token is in flight.
"""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.core.state import DECODE
from sola_sched.planner.attain import course
from sola_sched.planner.attain.records import ADMIT, PREEMPT, RUN
from sola_sched.simulator.cluster.fast.lengths import NUM_LIKELY, expected_left, likely_left
from sola_sched.simulator.cluster.fast.order import schedule_running, start
from sola_sched.simulator.cluster.fast.state import (
    CHUNKS,
    QUEUE,
    RUNNING,
    displace,
    finds_room,
    rows_in,
    takes_part,
    used,
)

#: What a plan comes to: nothing that could run, so that vLLM's own order is next; a step; a step
#: after which no plan is wanted while nobody comes or ends.
STALLED, PLANNED, SETTLED = range(3)
_PROBLEM_STALLED = course.PROBLEMS.index("stalled")


@compiled
def schedule_planned(e, now_s):
    """Fill the next step by a plan; what came of it, as above."""
    _fill_in(e, now_s)
    running = rows_in(e.lists[RUNNING])
    ahead, lifts = np.zeros(len(running), np.int64), np.empty(0, np.int64)
    parts = (
        e.plan, e.tuning, e.account, e.requests, e.decodes, e.prefills, e.plan_lists, lifts,
    )  # fmt: skip
    wanted = course.look(*parts, running, ahead, _waiting(e), 0)
    plan, lists = e.plan[0], e.plan_lists
    are_all = wanted == course.SETTLED
    if are_all:
        plan.num_preempt = plan.num_admit = 0
        plan.budget = e.at.budget
    else:
        problem = course.decide(*parts, *_lengths(e, wanted), 0)
        if problem == _PROBLEM_STALLED:
            return STALLED
        are_all = plan.num_run < 0
    for row in lists[PREEMPT, : plan.num_preempt]:
        displace(e, row)
    running, requests, truth = rows_in(e.lists[RUNNING]), e.requests, e.truth
    for row in running:
        truth[row].sits_out = not are_all and requests[row].phase == DECODE
    shown = running.copy() if are_all else lists[RUN, : plan.num_run].copy()
    for row in shown:
        truth[row].sits_out = False
    _schedule_shown(e, shown)
    if wanted == course.SETTLED:
        return SETTLED
    return PLANNED if _are_any(e) else STALLED


@compiled
def _schedule_shown(e, shown):
    """What vLLM makes of a plan: all that is shown, in its order."""
    plan, num_before = e.plan[0], e.lists[QUEUE, 0]
    room = schedule_running(e, shown, plan.budget)
    if e.lists[QUEUE, 0] > num_before:
        return  # it lets nobody start in a step in which it has preempted somebody
    for row in e.plan_lists[ADMIT, : plan.num_admit]:
        if room <= 0 or not finds_room(e, row):
            break
        room -= start(e, row, room)


@compiled
def _are_any(e):
    """Whether anybody takes part in the step."""
    if e.lists[CHUNKS, 0]:
        return True
    requests, truth = e.requests, e.truth
    for row in rows_in(e.lists[RUNNING]):  # noqa: SIM110 (numba has no `any`)
        if takes_part(requests[row], truth[row]):
            return True
    return False


@compiled
def _fill_in(e, now_s):
    """What the planner is told of the engine."""
    at, plan = e.at, e.plan[0]
    plan.now_s, plan.elapsed_s, at.elapsed_s = now_s, at.elapsed_s, 0.0
    plan.has_e2e = at.num_due > 0
    plan.max_num_running = at.slots - at.num_ending
    plan.num_free_blocks = int((at.capacity - used(e)) / plan.block_size)


@compiled
def _waiting(e):
    """Those that wait and had come when the step was scheduled."""
    waiting, requests = np.empty(e.lists[QUEUE, 0], np.int64), e.requests
    count, until_s = 0, e.at.known_until_s
    for row in rows_in(e.lists[QUEUE]):
        if requests[row].arrival_s <= until_s:
            waiting[count] = row
            count += 1
    return waiting[:count]


@compiled
def _lengths(e, wanted):
    """Likely lengths of all, and expected ones of decodes and prefills, as far as wanted."""
    plan, requests, decodes, prefills = e.plan[0], e.requests, e.decodes, e.prefills
    left = np.empty(plan.num_decodes)
    for place in range(len(left)):
        left[place] = expected_left(requests[decodes[place].row])
    left_prefills = np.empty(plan.num_prefills)
    for place in range(len(left_prefills)):
        left_prefills[place] = expected_left(requests[prefills[place].row])
    num_all = plan.num_decodes + plan.num_prefills
    likely = np.empty((num_all if wanted == course.WANTS_LIKELY else 0, NUM_LIKELY))
    for place in range(len(likely)):
        if place < plan.num_decodes:
            row = decodes[place].row
        else:
            row = prefills[place - plan.num_decodes].row
        likely_left(requests[row], likely[place])
    return likely, left, left_prefills
