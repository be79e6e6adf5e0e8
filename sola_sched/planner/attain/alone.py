"""Steps without decodes: prompts alone, while all decodes can wait."""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.cost.times import prompts_constant_s
from sola_sched.planner.attain.entry import find_admissible
from sola_sched.planner.attain.pace import find_jobs, free_slots, keep_on_time
from sola_sched.planner.attain.records import GIVING, MAY, insert


@compiled
def find_prompts_alone(step):
    """Whole prompts for a step without decodes: how many, listed in `MAY` by deadline.

    A step lasts as long as its decodes and its prompts together, and the first tokens come at its
    end. Where TTFT targets are short beside that and decodes are ahead of their schedules, prompts
    are on time alone that would be late with them. The price is the constant cost of one more step,
    and that outputs end later: nothing for times in which slots are short.

    The step ends before the first deadline and within the slack of the decodes, and leaves time for
    the others that `pace` has on time. 0 where decodes are to take part.
    """
    at, tuning = step.at, step.tuning
    if not at.num_urgent or not at.num_alive or at.has_ranks:
        return 0
    fixed_s = prompts_constant_s(at)
    room_s = tuning.careful * (at.slack_s - at.decode_s)
    if room_s <= fixed_s:
        return 0
    num_able = _list_able(step, fixed_s, room_s)
    if not num_able:
        return 0
    count = find_admissible(step, step.lists[GIVING], num_able)
    count = _first_in_time(step, count, fixed_s, room_s)
    return count if count and _costs_nobody(step, count, fixed_s) else 0


@compiled
def _list_able(step, fixed_s, room_s):
    """List in `GIVING` by deadline those that could end alone; none if nobody is urgent of them."""
    at, line = step.at, step.lists[GIVING]
    num_near = num_waiting = 0
    for place in range(at.num_prefills):
        if fixed_s < step.prefills[place].due_s < np.inf:
            num_near += 1
            num_waiting += place >= at.num_started
    if num_waiting > free_slots(at):
        return 0
    keys, count, is_anybody_urgent = np.empty(num_near), 0, False
    for place in range(at.num_prefills):
        prefill = step.prefills[place]
        if not fixed_s < prefill.due_s < np.inf:
            continue
        ends_s = fixed_s + prefill.service_s
        if ends_s <= min(prefill.due_s, room_s) and prefill.chunk == prefill.new:
            count = insert(line, count, num_near, place, keys, prefill.due_s)
            is_anybody_urgent = is_anybody_urgent or _is_urgent(step, prefill)
    return count if is_anybody_urgent else 0


@compiled
def _is_tight(step, prefill):
    """Whether a step with all decodes takes a large share of its TTFT target."""
    ttft_s = step.requests[prefill.row].ttft_s
    return step.at.mixed_s + prefill.service_s > step.tuning.tight * ttft_s


@compiled
def _is_urgent(step, prefill):
    is_late = step.at.mixed_s + prefill.service_s > prefill.due_s
    return is_late or _is_tight(step, prefill)


@compiled
def _first_in_time(step, count, fixed_s, room_s):
    """How many of `MAY`, from the first, end before its deadline; 0 if none of them is urgent."""
    may, ends_s, tokens, is_anybody_urgent = step.lists[MAY], 0.0, 0.0, False
    for i in range(count):
        prefill = step.prefills[may[i]]
        ends_s += prefill.service_s
        tokens += prefill.new
        first_s = step.prefills[may[0]].due_s
        if fixed_s + ends_s > min(room_s, first_s) or tokens > step.at.max_num_tokens:
            return i if is_anybody_urgent else 0
        is_anybody_urgent = is_anybody_urgent or _is_urgent(step, prefill)
    return count if is_anybody_urgent else 0


@compiled
def _costs_nobody(step, count, fixed_s):
    """Whether more are on time this way, or as many and the targets of these are tight."""
    at, may = step.at, step.lists[MAY]
    total_s, is_tight = 0.0, False
    for place in range(at.num_prefills):
        prefill = step.prefills[place]
        prefill.is_job = prefill.is_feasible and fixed_s < prefill.due_s < np.inf
    for i in range(count):
        prefill = step.prefills[may[i]]
        prefill.is_job = False
        total_s += prefill.service_s
        is_tight = is_tight or _is_tight(step, prefill)
    step_s, num_jobs = fixed_s + total_s, at.num_jobs
    find_jobs(step, step_s)
    kept = np.zeros(at.num_near, np.bool_)
    count += keep_on_time(step, at.slack_s - step_s, kept)
    at.num_jobs = num_jobs  # of the step with decodes
    return count > at.num_on_time or (count == at.num_on_time and is_tight)
