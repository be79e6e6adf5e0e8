"""Which decodes sit a step out: those ahead of their schedules, while prompts want the time."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.core.traffic import NUM_ENOUGH
from sola_sched.cost.times import chunk_overhead_s, chunk_s, decode_s, prompts_constant_s
from sola_sched.planner.attain.records import MAY, NEAR, ORDER


@compiled
def take_all(at):
    """All decodes that are alive take part."""
    at.is_holding = False
    at.num_taking, at.ctx_taking, at.taking_s = at.num_alive, at.ctx_alive, at.decode_s
    at.least_s = at.mixed_s


@compiled
def find_room(step, need):
    """Whether all that wait, with so many tokens, would find slots and memory.

    Outputs that end later hold theirs longer: that costs nothing while nobody waits for them.
    """
    at = step.at
    num_blocks = need / at.block_size
    fits = at.num_running + at.num_waiting <= at.max_num_running
    at.has_room = fits and num_blocks <= at.num_free_blocks and not at.has_ranks


@compiled
def load_of_traffic(at):
    """What all that comes takes at the pace of the tightest target, as of a fluid; NaN if unknown.

    The compiled form of `RecentTraffic.load`: the decodes that run then, by Little's law, the KV
    tokens that they hold, and the shares of the time that they and that all work takes.
    """
    if at.num_came < NUM_ENOUGH or math.isnan(at.mean_output) or not 0.0 < at.pace_s < np.inf:
        return np.nan, np.nan, np.nan, np.nan
    rate_per_s = at.num_came / max(at.now_s - at.first_came_s, 1e-9)
    count = rate_per_s * at.mean_output / at.per_step * at.pace_s
    ctx = count * (at.mean_prompt + 0.5 * at.mean_output)
    decodes = decode_s(at, count, ctx) / at.pace_s
    return count, ctx, decodes, decodes + rate_per_s * chunk_s(at, at.mean_prompt, 0.0)


@compiled
def find_spare(step):
    """Whether decodes may take all the time that TPOT leaves them: nothing gets short that way.

    Time, slots and memory are enough for all that comes, and bare steps leave a large share of
    TPOT: what a decode gives up it has to gain again.
    """
    at = step.at
    count, ctx, _, total = load_of_traffic(at)
    is_short = total > 1.0 or count > at.max_num_running or ctx > at.num_blocks * at.block_size
    is_loose = at.decode_s <= step.tuning.near * at.pace_s
    at.has_spare = at.has_room and is_loose and not is_short


@compiled
def wait_for_first(step):
    """Count no decodes before the prompt that is due first if it could be on time without them."""
    at, alone_s, first_s = step.at, np.inf, np.inf
    take_all(at)
    find_spare(step)
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
    if alone_s + at.decode_s <= at.slack_s < np.inf:
        at.taking_s, at.least_s = 0.0, prompts_constant_s(at)


@compiled
def hold_decodes(step):
    """Hold decodes for the prompts of the step; whether any are held.

    All, where one would be late with them or a step with them takes a large share of its TTFT
    target, if then nobody's token is late. Otherwise those that are due two steps later, where not
    all prompts that can be on time are in the step and there is time to spare.
    """
    at = step.at
    if not step.tuning.holds or not at.num_jobs or not at.num_alive or not at.has_room:
        return False
    total_s = prompts_constant_s(at)
    for i in range(at.num_near):
        total_s += step.prefills[step.lists[NEAR, i]].service_s
    step_s = min(at.limit_s, total_s)
    # Where none has a TPOT target nothing else would bring them back.
    are_all = step_s + at.decode_s <= at.slack_s < np.inf and _is_urgent(step)
    if not are_all and not (at.has_backlog and at.has_spare):
        return False
    num_taking, ctx = 0, 0.0
    for place in range(at.num_decodes):
        decode = step.decodes[place]
        if not decode.is_lost:
            decode.is_held = are_all or step_s + decode.token_s <= decode.bank_s < np.inf
            if not decode.is_held:
                num_taking += 1
                ctx += decode.ctx
    at.is_holding, at.num_taking, at.ctx_taking = num_taking < at.num_alive, num_taking, ctx
    at.taking_s = decode_s(at, num_taking, ctx) if num_taking else 0.0
    at.least_s = at.taking_s + chunk_overhead_s(at) if num_taking else prompts_constant_s(at)
    return at.is_holding


@compiled
def _is_urgent(step):
    """Whether one of the step would be late with all decodes, or nearly."""
    at = step.at
    line, count = step.lists[MAY], at.num_served
    if not count:
        line, count = step.lists[ORDER], min(1, at.num_order)
    ends_s, first_s = at.mixed_s, np.inf
    for i in range(count):
        prefill = step.prefills[line[i]]
        ends_s += prefill.service_s
        ttft_s = step.requests[prefill.row].ttft_s
        first_s = min(first_s, min(prefill.due_s, step.tuning.tight * ttft_s))
    return ends_s > first_s
