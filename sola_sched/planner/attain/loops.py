"""The loops of one plan over its requests, on plain arrays.

`load` compiles them where numba is installed, as with every vLLM; without it the same source runs
as Python. Arrays that are written come last; rows are places in the columns of `RequestTable`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sola_sched.core.state import BoolArray, FloatArray, IntArray

_INTS, _FLOATS, _BOOLS = "int64[::1]", "float64[::1]", "boolean[::1]"


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
    """How many of those not lost are `behind`; the least bank and target of the others, seconds.

    Ahead is who has a step of its own target in the bank, where steps of `decode_s` meet it.
    """
    num_behind, least_bank_s, least_token_s = 0, float("inf"), float("inf")
    for place in range(len(bank_s)):
        bank, token = bank_s[place], token_s[place]
        behind[place] = not lost[place] and not (bank >= token and token >= decode_s)
        if behind[place]:
            num_behind += 1
        elif not lost[place]:
            least_bank_s = min(least_bank_s, bank)
            least_token_s = min(least_token_s, token)
    return num_behind, least_bank_s, least_token_s


def judge_prefills(
    rows: IntArray,
    decode_s: float,
    keep: float,
    margin: float,
    per_ctx_s: float,
    per_square_s: float,
    per_token_s: float,
    prefill_target: IntArray,
    num_computed: IntArray,
    num_output: IntArray,
    ttft_s: FloatArray,
    deadline_s: FloatArray,
    new: FloatArray,
    has: FloatArray,
    service_s: FloatArray,
    feasible: BoolArray,
) -> int:
    """What each prefill takes, and whether it can be on time; how many can.

    A step without prefill takes `decode_s`; lost is who misses its deadline by more than a share
    `1 - margin` of its time; the next three are SOLA's Eq. 3. Then come columns. Written are, as in
    `Prefills`, `deadline_s` (less the margin of `keep` where there is time for it), `new`, `has`,
    `service_s` and `feasible`.
    """
    num_feasible = 0
    for place in range(len(rows)):
        row = rows[place]
        done, left_s = float(num_computed[row]), deadline_s[place]
        todo = max(float(prefill_target[row]) - done, 1.0)
        time_s = todo * (per_ctx_s * done + per_square_s * todo + per_token_s)
        new[place], has[place], service_s[place] = todo, done, time_s
        need_s = decode_s + time_s
        feasible[place] = left_s < float("inf") and margin * need_s <= left_s
        if feasible[place]:
            num_feasible += 1
            early_s = left_s - (1.0 - keep) * ttft_s[row]
            if num_output[row] == 0 and need_s <= early_s:
                deadline_s[place] = early_s
    return num_feasible


def keep_on_time(
    service_s: FloatArray,
    due_s: FloatArray,
    slot_s: FloatArray,
    weight_s: FloatArray,
    rank: IntArray,
    share: float,
    slots_busy_s: float,
    kept: BoolArray,
) -> int:
    """Mark the most jobs that can be on time; how many.

    Source: Moore and Hodgson (1968), for the fewest late jobs on one machine: take the jobs by
    deadline and, whenever the last one taken would be late, give up the one that costs most. Here
    the cost is a weight of its own, and slots are a second machine: a job that is late for a slot
    makes the costliest go of those that wait for one.

    Args:
        service_s: Time of the machine, by (rank, deadline), [n].
        due_s: Latest ends, seconds, [n].
        slot_s: Time of a slot; 0 for who has one, [n].
        weight_s: Costs, [n].
        rank: Class; nobody is given up for one of a lower class (a larger number), [n].
        share: Share of its time that the machine has for them.
        slots_busy_s: Slots are taken until then; < 0 while some are free.
        kept: Who is kept, [n].
    """
    busy_s, num_kept = 0.0, 0
    for last in range(len(service_s)):
        kept[last] = True
        num_kept += 1
        busy_s += service_s[last]
        slots_busy_s += slot_s[last]
        while True:
            lacks_slot = slot_s[last] > 0.0 and slots_busy_s > due_s[last]
            if not lacks_slot and busy_s <= share * due_s[last]:
                break
            worst = -1
            for place in range(last + 1):
                if kept[place] and rank[place] == rank[last]:
                    if lacks_slot and slot_s[place] == 0.0:
                        continue
                    if worst < 0 or weight_s[place] > weight_s[worst]:
                        worst = place
            if worst < 0:  # what a higher class has kept is too much by itself
                break
            kept[worst] = False
            num_kept -= 1
            busy_s -= service_s[worst]
            slots_busy_s -= slot_s[worst]
    return num_kept


_SIGNATURES: dict[Callable[..., Any], str] = {
    follow_schedules: f"UniTuple(int64, 2)({_INTS}, {_INTS}, float64, float64, float64, "
    f"{_INTS}, {_INTS}, {_FLOATS}, {_FLOATS}, {_FLOATS}, "
    f"{_INTS}, {_FLOATS}, {_FLOATS}, {_BOOLS})",
    find_slack: f"Tuple((int64, float64, float64))({_FLOATS}, {_FLOATS}, {_BOOLS}, float64, "
    f"{_BOOLS})",
    judge_prefills: f"int64({_INTS}, float64, float64, float64, float64, float64, float64, "
    f"{_INTS}, {_INTS}, {_INTS}, {_FLOATS}, "
    f"{_FLOATS}, {_FLOATS}, {_FLOATS}, {_FLOATS}, {_BOOLS})",
    keep_on_time: f"int64({_FLOATS}, {_FLOATS}, {_FLOATS}, {_FLOATS}, {_INTS}, float64, float64, "
    f"{_BOOLS})",
}


@functools.cache
def load() -> SimpleNamespace:
    """The loops by name, compiled if numba is there; call before the first step."""
    try:
        import numba  # type: ignore[import-untyped]
    except ImportError:
        return SimpleNamespace(**{loop.__name__: loop for loop in _SIGNATURES})
    compiled = {}
    for loop, signature in _SIGNATURES.items():
        try:
            compiled[loop.__name__] = numba.njit(signature, cache=True)(loop)
        except RuntimeError:  # nowhere to keep what is compiled
            compiled[loop.__name__] = numba.njit(signature)(loop)
    return SimpleNamespace(**compiled)
