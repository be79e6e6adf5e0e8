"""One plan from its requests to its decisions: the compiled functions that Python calls."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import compiled, entry
from sola_sched.core.lengths import expected_left
from sola_sched.core.state import PREFILL
from sola_sched.cost.times import copy_times, decode_s
from sola_sched.planner.attain.admission import let_in
from sola_sched.planner.attain.best_effort import find_victims, serve_lost
from sola_sched.planner.attain.held import hold_decodes, note_room
from sola_sched.planner.attain.lost import (
    gather,
    is_rejected,
    judge_decodes,
    judge_prefills,
    note_begun,
    spare_one,
)
from sola_sched.planner.attain.pace import find_pace
from sola_sched.planner.attain.records import (
    ADMIT,
    CHOSEN,
    LOST,
    MAY,
    PREEMPT,
    REJECT,
    RUN,
    Step,
    is_in,
)

#: What `look` finds: nothing to decide; a pipeline to run; one for which equally likely output
#: lengths of all are wanted as well.
SETTLED, OPEN, WANTS_LIKELY = range(3)
#: What a plan is about, as in `StepPlan.problem`: all jobs are on time; some are not; nobody could
#: take part; decodes are held. (Where nothing is to decide, `AttainPlanner` says "decode".)
PROBLEMS = ("attain", "overload", "stalled", "prompts")
_ATTAIN, _OVERLOAD, _STALLED, _PROMPTS = range(len(PROBLEMS))

_NO_LIKELY = np.empty((0, 5))


@entry
def look(
    at, tuning, account, requests, decodes, prefills, lists, lifts, running, ahead, waiting,
    num_victims,
):  # fmt: skip
    """List the requests of a step, and say what is wanted to plan it.

    Args:
        at ... lifts: As in `Step`.
        running, ahead, waiting: As in `StepState`.
        num_victims: Rows that give way, in `PREEMPT`.
    """
    step = Step(at[0], tuning[0], account[0], requests, decodes, prefills, lists, lifts, _NO_LIKELY)
    if not num_victims and _is_settled(step, running, waiting):
        if len(waiting):
            step.account.unseen_s += step.at.elapsed_s
        return SETTLED
    gather(step, running, ahead, waiting, num_victims)
    need = 0
    for row in waiting:
        need += max(requests[row].prefill_target, requests[row].num_computed + 1)
    used = 1.0 - (step.at.num_free_blocks - need / step.at.block_size) / max(1, step.at.num_blocks)
    note_room(step, need)
    return WANTS_LIKELY if len(waiting) and used > step.tuning.memory_threshold else OPEN


@compiled
def _is_settled(step, running, waiting):
    """Nothing can be decided: only decodes, all served within their targets, no free slot."""
    at = step.at
    is_full = len(running) >= at.max_num_running
    if at.has_e2e or not len(running) or (len(waiting) and (step.tuning.rejects or not is_full)):
        return False
    ctx, shortest_s, could_give_way, could_if_due = 0, np.inf, False, False
    requests = step.requests
    for row in running:
        request = requests[row]
        if request.phase == PREFILL:
            return False
        ctx += request.num_prompt + request.num_output
        shortest_s = min(shortest_s, request.tpot_s)
        # Late with its first token, or behind its schedule.
        behind_s = at.now_s - request.first_token_s
        behind_s -= request.tpot_s * (request.num_output + request.num_in_flight)
        could_give_way = could_give_way or request.first_token_s > request.due_s or behind_s > 0.0
        could_if_due = could_if_due or math.isinf(min(request.due_s, request.tpot_s))
    bare_s = decode_s(at, len(running), ctx)
    if not bare_s <= step.tuning.keep * shortest_s * at.per_step:
        return False
    if not len(waiting):
        return True
    # One that is lost, or has no target, could give its slot to one that is still on time.
    if could_give_way:
        return False
    if could_if_due:
        for row in waiting:
            if requests[row].due_s < np.inf:
                return False
    return True


@entry
def decide(
    at, tuning, account, requests, decodes, prefills, lists, lifts, likely, left, left_prefills,
    num_victims,
):  # fmt: skip
    """Plan the step that `look` has listed; what it is about, as in `PROBLEMS`.

    Args:
        at ... likely: As in `Step`.
        left, left_prefills: Output tokens that are expected of decodes, after those in flight, and
            of prefills, >= 1.
        num_victims: As in `look`.
    """
    step = Step(at[0], tuning[0], account[0], requests, decodes, prefills, lists, lifts, likely)
    for place in range(len(left)):
        decodes[place].left = left[place]
    for place in range(len(left_prefills)):
        prefills[place].left = left_prefills[place]
    step.at.num_run, step.at.num_admit, step.at.num_reject = 0, 0, 0
    step.at.num_preempt, step.at.budget = num_victims, 0
    judge_decodes(step)
    judge_prefills(step)
    if step.tuning.rejects:
        spare_one(step)
    find_pace(step)
    hold_decodes(step)
    let_in(step)
    serve_lost(step)
    return _put_together(step)


@compiled
def _put_together(step):
    """Write the plan: `RUN`, `ADMIT`, `PREEMPT`, `REJECT`, `budget`; what it is about."""
    at, lists, decodes = step.at, step.lists, step.decodes
    _list_prefills(step, False)
    find_victims(step)
    for place in range(at.num_decodes):
        if not decodes[place].is_lost and not (at.is_holding and decodes[place].is_held):
            _run(step, decodes[place].row)
    for i in range(at.lost_run):
        row = decodes[lists[LOST, i]].row
        if not is_in(lists[PREEMPT], at.num_preempt, row):
            _run(step, row)
    num_decodes = at.num_run
    _list_prefills(step, True)
    if step.tuning.rejects:
        for place in range(at.num_started, at.num_prefills):
            if is_rejected(step, place):
                lists[REJECT, at.num_reject] = step.prefills[place].row
                at.num_reject += 1
        for i in range(at.num_served):
            note_begun(step, lists[MAY, i])
        for i in range(at.num_chosen):
            note_begun(step, lists[CHOSEN, i])
    for i in range(at.num_served, at.num_served + at.num_offered):
        _list_prefill(step, lists[MAY, i], False)
    if not at.num_run and not at.num_admit:
        at.num_preempt = 0
        return _STALLED
    tokens = num_decodes * at.tokens_per_decode + at.chunk + at.lost_tokens
    at.budget = max(1, min(tokens, at.max_num_tokens))
    if at.num_run == at.num_running == num_decodes and not at.num_preempt:
        at.num_run = -1  # all of them, as they stand
    if at.is_holding:
        return _PROMPTS
    return _OVERLOAD if at.num_on_time < at.num_jobs else _ATTAIN


@compiled
def _run(step, row):
    step.lists[RUN, step.at.num_run] = row
    step.at.num_run += 1


@compiled
def _list_prefills(step, have_begun):
    """Put those prefills of the step into the plan that have, or have not, begun."""
    for i in range(step.at.num_served):
        _list_prefill(step, step.lists[MAY, i], have_begun)
    for i in range(step.at.num_chosen):
        _list_prefill(step, step.lists[CHOSEN, i], have_begun)


@compiled
def _list_prefill(step, place, have_begun):
    at, row = step.at, step.prefills[place].row
    if place < at.num_started and have_begun:
        _run(step, row)
    elif place >= at.num_started and not have_begun:
        step.lists[ADMIT, at.num_admit] = row
        at.num_admit += 1


@entry
def plan(
    at, tuning, account, requests, decodes, prefills, lists, lifts, running, waiting, num_victims,
    bin_of, line, trusts_predictions, now_s, elapsed_s, per_step, prefill_share, num_free_blocks,
    has_e2e, has_ranks, keeps_kv, cost, num_came, first_came_s, last_came_s,
    mean_prompt, mean_output,
):  # fmt: skip
    """`look` and `decide` in one call, where the lengths of outputs can be told here.

    Args:
        at ... num_victims: As in `look`.
        bin_of, line, trusts_predictions: As in `expected_left`; a line without classes where only
            Python can tell lengths.
        now_s ... mean_output: What changes from step to step, as in `STEP`.
        cost: As `CostModel.model`.

    Returns:
        What the plan is about, as in `PROBLEMS`, >= 0. Otherwise -1 - what `look` has found: it is
        settled, or `decide` is to be called with the lengths that are wanted.
    """
    step = at[0]
    step.now_s, step.elapsed_s, step.per_step = now_s, elapsed_s, per_step
    step.prefill_share, step.num_free_blocks = prefill_share, num_free_blocks
    step.has_e2e, step.has_ranks, step.keeps_kv = has_e2e, has_ranks, keeps_kv
    copy_times(step, cost[0])
    step.num_came, step.first_came_s, step.last_came_s = num_came, first_came_s, last_came_s
    step.mean_prompt, step.mean_output = mean_prompt, mean_output
    ahead = np.empty(len(running), np.int64)
    for place in range(len(running)):
        ahead[place] = requests[running[place]].num_in_flight
    wanted = look(
        at, tuning, account, requests, decodes, prefills, lists, lifts, running, ahead, waiting,
        num_victims,
    )  # fmt: skip
    if wanted != OPEN or not line.shape[1]:
        return -1 - wanted
    for place in range(step.num_decodes):
        decode = decodes[place]
        decode.left = expected_left(
            bin_of, line, trusts_predictions, requests[decode.row], decode.ahead
        )
    for place in range(step.num_prefills):
        request = requests[prefills[place].row]
        if request.num_output or request.e2e_due_s < np.inf:  # those that `lost` asks for
            prefills[place].left = expected_left(bin_of, line, trusts_predictions, request, 0)
    none = np.empty(0)
    return decide(
        at, tuning, account, requests, decodes, prefills, lists, lifts, np.empty((0, 5)), none,
        none, num_victims,
    )  # fmt: skip
