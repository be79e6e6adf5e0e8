"""The loops of one plan over its requests, on plain arrays.

Arrays that are written come last; rows are places in the columns of `RequestTable`, places those in
the arrays of `Decodes` or `Prefills`.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from sola_sched.core.compiled import BoolArray, FloatArray, IntArray, compile_loops


def follow_schedules(
    rows: IntArray,
    ahead: IntArray,
    now_s: float,
    keep: float,
    per_step: float,
    num_prompt: IntArray,
    num_output: IntArray,
    first_token_s: FloatArray,
    due_s: FloatArray,
    tpot_s: FloatArray,
    ctx: IntArray,
    bank_s: FloatArray,
    token_s: FloatArray,
    lost: BoolArray,
) -> tuple[int, int]:
    """Where each decode stands; how many are not lost by their TTFT, and their KV tokens.

    `rows` and `ahead`, the tokens in flight, are of the decodes; a share `keep` of targets is
    planned for, and a step brings `per_step` tokens. Then come columns. Written are, as in
    `Decodes`, `ctx`, `bank_s`, `token_s` and `lost`.
    """
    num_alive = ctx_alive = 0
    for place in range(len(rows)):
        row = rows[place]
        out = max(num_output[row] + ahead[place], 1)
        first_s = first_token_s[row]
        if not first_s <= now_s:  # NaN: it comes with the step in flight
            first_s = now_s
        target_s = keep * tpot_s[row]
        ctx[place] = num_prompt[row] + out
        bank_s[place] = first_s + target_s * (out + (per_step - 1.0)) - now_s
        token_s[place] = per_step * target_s
        lost[place] = first_s > due_s[row]
        if not lost[place]:
            num_alive += 1
            ctx_alive += ctx[place]
    return num_alive, ctx_alive


def find_slack(
    bank_s: FloatArray, token_s: FloatArray, lost: BoolArray, decode_s: float, behind: BoolArray
) -> tuple[int, float, float]:
    """How many of those not lost are `behind`; slack of the others, and what they bear at least.

    What one bears for long lies between its bank and its target. Behind is who has less in the bank
    than halfway from `decode_s` to that, or a target that such steps miss: then the length of its
    output decides. Of the others it does not.
    """
    num_behind, least_bank_s, least_token_s = 0, float("inf"), float("inf")
    for place in range(len(bank_s)):
        bank, token = bank_s[place], token_s[place]
        is_ahead = token >= decode_s and bank >= 0.5 * (decode_s + token)
        behind[place] = not lost[place] and not is_ahead
        if behind[place]:
            num_behind += 1
        elif not lost[place]:
            least_bank_s = min(least_bank_s, bank)
            least_token_s = min(least_token_s, min(bank, token))
    return num_behind, least_bank_s, least_token_s


def judge_prefills(
    rows: IntArray,
    now_s: float,
    decode_s: float,
    mixed_s: float,
    keep: float,
    margin: float,
    tight: float,
    per_ctx_s: float,
    per_square_s: float,
    per_token_s: float,
    prefill_target: IntArray,
    num_computed: IntArray,
    num_output: IntArray,
    ttft_s: FloatArray,
    due_s: FloatArray,
    limit_s: FloatArray,
    deadline_s: FloatArray,
    new: FloatArray,
    has: FloatArray,
    service_s: FloatArray,
    feasible: BoolArray,
    hopeless: BoolArray,
) -> tuple[int, int]:
    """What each prefill takes, and whether it can be on time; how many can, and are urgent.

    A step without prefill takes `decode_s`, one with a chunk `mixed_s` and the chunk. Lost is who
    misses its deadline by more than a share `1 - margin` of its time; urgent is who would be late
    beside the decodes, or `tight`. The next three are SOLA's Eq. 3. Then come columns, and what
    else limits each. Written are, as in `Prefills`, `deadline_s` (less the margin of `keep` where
    there is time for it) and the others.
    """
    num_feasible = num_urgent = 0
    for place in range(len(rows)):
        row = rows[place]
        is_first, left_s = num_output[row] == 0, limit_s[place]
        if is_first:
            left_s = min(left_s, due_s[row] - now_s)
        done = float(num_computed[row])
        todo = max(float(prefill_target[row]) - done, 1.0)
        time_s = todo * (per_ctx_s * done + per_square_s * todo + per_token_s)
        new[place], has[place], service_s[place] = todo, done, time_s
        need_s = decode_s + time_s
        feasible[place] = left_s < float("inf") and margin * need_s <= left_s
        hopeless[place] = is_first and left_s < float("inf") and not feasible[place]
        if feasible[place]:
            num_feasible += 1
            early_s = left_s - (1.0 - keep) * ttft_s[row]
            if is_first and need_s <= early_s:
                left_s = early_s
        deadline_s[place] = left_s
        if left_s < float("inf") and mixed_s + time_s > min(tight * ttft_s[row], left_s):
            num_urgent += 1
    return num_feasible, num_urgent


def find_near(
    candidates: BoolArray,
    first_waiting: int,
    service_s: FloatArray,
    deadline_s: FloatArray,
    rank: IntArray,
    near: IntArray,
) -> tuple[int, int, int, float]:
    """The first of the candidates by (rank, deadline), as many as `near` has places for.

    Returns:
        How many candidates there are, how many of them wait for a slot (they are in the places
        from `first_waiting` on), how many are near, and the mean time of those.
    """
    count = num_waiting = num_near = 0
    for place in range(len(candidates)):
        if not candidates[place]:
            continue
        count += 1
        if place >= first_waiting:
            num_waiting += 1
        at = num_near
        while at > 0:
            before = near[at - 1]
            if rank[before] < rank[place] or (
                rank[before] == rank[place] and deadline_s[before] <= deadline_s[place]
            ):
                break
            if at < len(near):
                near[at] = before
            at -= 1
        if at < len(near):
            near[at] = place
            num_near = min(num_near + 1, len(near))
    total_s = 0.0
    for at in range(num_near):
        total_s += service_s[near[at]]
    return count, num_waiting, num_near, total_s / max(1, num_near)


def keep_on_time(
    jobs: IntArray,
    service_s: FloatArray,
    due_s: FloatArray,
    weight_s: FloatArray,
    rank: IntArray,
    share: float,
    early_s: float,
    first_slot: int,
    slot_s: float,
    slots_busy_s: float,
    kept: BoolArray,
) -> int:
    """Mark the most jobs that can be on time; how many.

    Source: Moore and Hodgson (1968), for the fewest late jobs on one machine: take the jobs by
    deadline and, whenever the last one taken would be late, give up the one that costs most. Here
    the cost is a weight of its own, and slots are a second machine: a job that is late for a slot
    makes the costliest go of those that wait for one.

    Args:
        jobs: Places in the arrays that follow, by (rank, deadline), [n].
        service_s: Time of the machine.
        due_s: Latest ends, seconds.
        weight_s: Costs.
        rank: Class; nobody is given up for one of a lower class (a larger number).
        share: Share of its time that the machine has for them.
        early_s: They are to end so much before their deadlines.
        first_slot, slot_s: Jobs in places from this one on take a slot for so long.
        slots_busy_s: Slots are taken until then; < 0 while some are free.
        kept: Who is kept, [n].
    """
    busy_s, num_kept = 0.0, 0
    for last in range(len(jobs)):
        job = jobs[last]
        ends_s = due_s[job] - early_s
        kept[last] = True
        num_kept += 1
        busy_s += service_s[job]
        needs_slot = slot_s > 0.0 and job >= first_slot
        if needs_slot:
            slots_busy_s += slot_s
        while True:
            lacks_slot = needs_slot and slots_busy_s > ends_s
            if not lacks_slot and busy_s <= share * ends_s:
                break
            worst = -1
            for at in range(last + 1):
                if not kept[at] or rank[jobs[at]] != rank[job]:
                    continue
                if lacks_slot and jobs[at] < first_slot:
                    continue
                if worst < 0 or weight_s[jobs[at]] > weight_s[jobs[worst]]:
                    worst = at
            if worst < 0:  # what a higher class has kept is too much by itself
                break
            kept[worst] = False
            num_kept -= 1
            busy_s -= service_s[jobs[worst]]
            if slot_s > 0.0 and jobs[worst] >= first_slot:
                slots_busy_s -= slot_s
    return num_kept


@functools.cache
def load() -> SimpleNamespace:
    """The loops by name; call before the first step."""
    return compile_loops(follow_schedules, find_slack, judge_prefills, find_near, keep_on_time)
