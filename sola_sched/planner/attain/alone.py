"""Steps without decodes: prompts alone, while all decodes can wait."""

from __future__ import annotations

import numpy as np

from sola_sched.core.state import IntArray
from sola_sched.planner.attain.entry import admissible
from sola_sched.planner.attain.lost import Judged
from sola_sched.planner.attain.pace import Jobs, Pace


def find_prompts_alone(judged: Judged, pace: Pace, *, is_blocked: bool) -> IntArray | None:
    """Whole prompts for a step without decodes, or None where decodes are to take part.

    A step lasts as long as its decodes and its prompts together, and the first tokens come at its
    end. Where TTFT targets are short beside that and decodes are ahead of their schedules, prompts
    are on time alone that would be late with them. The price is the constant cost of one more step,
    and that outputs end later: nothing for times in which slots are short.

    Args:
        judged: The requests.
        pace: The step with decodes.
        is_blocked: As in `admissible`.

    Returns:
        Places by deadline; the step ends before the first deadline and within the slack of the
        decodes, and leaves time for the others that `pace` has on time.
    """
    state, decodes, prefills = judged.state, judged.decodes, judged.prefills
    if not prefills.num_urgent:
        return None
    tuning = judged.tuning
    fixed_s = float(state.cost.prefill_s(0.0, 0.0))
    room_s = tuning.careful * (decodes.slack_s - decodes.decode_s)
    if not decodes.num_alive or state.has_ranks or room_s <= fixed_s:
        return None
    due = prefills.deadline_s
    (near,) = ((due < np.inf) & (due > fixed_s)).nonzero()
    num_waiting = int(np.count_nonzero(near >= prefills.num_started))
    if not len(near) or num_waiting > judged.num_free_slots:
        return None
    service_s, due_s = prefills.service_s[near], prefills.deadline_s[near]
    with_decodes_s = judged.mixed_s + service_s
    is_tight = with_decodes_s > tuning.tight * state.table.ttft_s[prefills.rows[near]]
    can_end = fixed_s + service_s <= np.minimum(due_s, room_s)
    can_end &= prefills.chunk[near] == prefills.new[near]
    is_urgent = can_end & (is_tight | (with_decodes_s > due_s))
    if not np.count_nonzero(is_urgent):
        return None
    (order,) = can_end.nonzero()
    order = order[due_s[order].argsort(kind="stable")]
    order = order[np.isin(near[order], admissible(judged, near[order], is_blocked=is_blocked))]
    if not len(order):
        return None
    fits = fixed_s + service_s[order].cumsum() <= min(room_s, float(due_s[order[0]]))
    fits &= prefills.new[near[order]].cumsum() <= state.max_num_tokens
    chosen = order[: len(fits) if fits.all() else int(fits.argmin())]
    if not is_urgent[chosen].any():
        return None
    step_s = fixed_s + float(service_s[chosen].sum())
    is_later = np.zeros(len(due), dtype=np.bool_)
    is_later[near] = prefills.feasible[near]
    is_later[near[chosen]] = False
    count = len(chosen) + Jobs(judged, is_later, step_s).keep(decodes.slack_s - step_s)[0]
    is_better = count == pace.num_on_time and is_tight[chosen].any()
    return near[chosen] if is_better or count > pace.num_on_time else None
