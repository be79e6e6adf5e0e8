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
    left: FloatArray,
    now_s: float,
    keep: float,
    per_step: float,
    num_prompt: IntArray,
    num_output: IntArray,
    first_token_s: FloatArray,
    due_s: FloatArray,
    tpot_s: FloatArray,
    e2e_due_s: FloatArray,
    ctx: IntArray,
    bank_s: FloatArray,
    token_s: FloatArray,
    sustain_s: FloatArray,
    lost: BoolArray,
) -> None:
    """Where each decode stands.

    `rows`, `ahead` and `left` are of the decodes; a share `keep` of targets is planned for, and a
    step brings `per_step` tokens. Then come columns. Where an end is due, the pace that it takes is
    a target for the next step and all others. Written is the rest, as in `Decodes`.
    """
    for place in range(len(rows)):
        row = rows[place]
        out = max(num_output[row] + ahead[place], 1)
        first_s = first_token_s[row]
        if not first_s <= now_s:  # NaN: it comes with the step in flight
            first_s = now_s
        target_s, pace_s = keep * tpot_s[row], keep * (e2e_due_s[row] - now_s) / left[place]
        ctx[place] = num_prompt[row] + out
        bank = min(first_s + target_s * (out + (per_step - 1.0)) - now_s, per_step * pace_s)
        token = per_step * min(target_s, pace_s)
        lost[place] = first_s > due_s[row] or pace_s <= 0.0
        steps = max(left[place] / per_step, 1.0 + 1e-9)  # no further step x no target is no number
        bank_s[place], token_s[place] = bank, token
        sustain_s[place] = (bank + (steps - 1.0) * token) / steps


def count_alive(ctx: IntArray, lost: BoolArray) -> tuple[int, int]:
    """How many are not lost, and their KV tokens."""
    num_alive = ctx_alive = 0
    for place in range(len(ctx)):
        if not lost[place]:
            num_alive += 1
            ctx_alive += ctx[place]
    return num_alive, ctx_alive


def find_slack(
    bank_s: FloatArray, token_s: FloatArray, sustain_s: FloatArray, lost: BoolArray, decode_s: float
) -> tuple[float, float]:
    """The longest next step, and the longest mean step, that all bear who are not lost.

    One that has more in the bank than halfway from a bare step to what it sustains is on course.
    One that has less catches up by steps of that length.
    """
    slack_s = bear_s = float("inf")
    for place in range(len(bank_s)):
        if lost[place]:
            continue
        bank, sustain = bank_s[place], sustain_s[place]
        halfway = decode_s + 0.5 * max(sustain - decode_s, 0.0)
        slack_s = min(slack_s, bank if bank >= halfway else min(halfway, token_s[place]))
        bear_s = min(bear_s, sustain)
    return slack_s, bear_s


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
    beside the decodes, or `tight`, and need not be. The next three are SOLA's Eq. 3. Then come
    columns, and what else limits each. Written are, as in `Prefills`, `deadline_s` (less the margin
    of `keep` where there is time for it) and the others.
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
        if time_s <= left_s < float("inf") and mixed_s + time_s > min(tight * ttft_s[row], left_s):
            num_urgent += 1
    return num_feasible, num_urgent


def keep_on_time(
    jobs: IntArray,
    service_s: FloatArray,
    due_s: FloatArray,
    weight_s: FloatArray,
    rank: IntArray,
    share: float,
    early_s: float,
    kept: BoolArray,
) -> int:
    """Mark the most jobs that can be on time; how many.

    Source: Moore and Hodgson (1968), for the fewest late jobs on one machine: take the jobs by
    deadline and, whenever the last one taken would be late, give up the one that costs most. Here
    the cost is a weight of its own.

    Args:
        jobs: Places in the arrays that follow, by (rank, deadline), [n].
        service_s: Time of the machine.
        due_s: Latest ends, seconds.
        weight_s: Costs.
        rank: Class; nobody is given up for one of a lower class (a larger number).
        share: Share of its time that the machine has for them.
        early_s: They are to end so much before their deadlines.
        kept: Who is kept, [n].
    """
    busy_s, num_kept = 0.0, 0
    for last in range(len(jobs)):
        job = jobs[last]
        kept[last] = True
        num_kept += 1
        busy_s += service_s[job]
        while busy_s > share * (due_s[job] - early_s):
            worst = -1
            for at in range(last + 1):
                if (
                    kept[at]
                    and rank[jobs[at]] == rank[job]
                    and (worst < 0 or weight_s[jobs[at]] > weight_s[jobs[worst]])
                ):
                    worst = at
            if worst < 0:  # what a higher class has kept is too much by itself
                break
            kept[worst] = False
            num_kept -= 1
            busy_s -= service_s[jobs[worst]]
    return num_kept


@functools.cache
def load() -> SimpleNamespace:
    """The loops by name; call before the first step."""
    return compile_loops(follow_schedules, count_alive, find_slack, judge_prefills, keep_on_time)
