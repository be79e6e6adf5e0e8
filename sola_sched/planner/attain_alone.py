"""Steps of `policy="attain"` without decodes: prompts alone, while all decodes can wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sola_sched.core.state import BoolArray, IntArray
from sola_sched.planner.attain_state import StepView
from sola_sched.planner.deadlines import Jobs

#: A prompt goes alone where a step with all decodes would take this share of its TTFT target:
#: those who arrive during a step wait for its end.
_TIGHT = 0.35
#: Share of the decodes' slack that a step without them may take.
_CAREFUL = 0.95


def prompts_alone(
    view: StepView,
    allowed_s: float,
    num_on_time: int,
    admissible: Callable[[IntArray], BoolArray],
) -> IntArray | None:
    """Whole prompts for a step without decodes, or None where decodes are to take part.

    A step lasts as long as its decodes and its prompts together, and the first tokens come at
    its end. Where TTFT targets are short beside that and decodes are ahead of their schedules,
    prompts are on time alone that would be late with them. The price is the constant cost of one
    more step, and that outputs end later: nothing for times in which slots are short.

    Args:
        view: What is to be decided.
        allowed_s: Longest step that keeps all decodes on course, seconds.
        num_on_time: Prefills that are on time in steps with decodes.
        admissible: Mask of the places for which there is room.

    Returns:
        Places by deadline; the step ends before the first deadline and within the slack of the
        decodes, and no fewer prefills are on time than `num_on_time`.
    """
    state, decodes, prefills = view.state, view.decodes, view.prefills
    if not decodes.num_alive or state.has_classes:
        return None
    fixed_s = float(state.cost.prefill_s(0.0, 0.0))
    room_s = _CAREFUL * (allowed_s - decodes.decode_s)
    if room_s <= fixed_s:
        return None
    (near,) = ((prefills.deadline_s < np.inf) & (prefills.deadline_s > fixed_s)).nonzero()
    num_waiting = int(np.count_nonzero(near >= prefills.num_started))
    if not len(near) or num_waiting > view.num_free_slots:
        return None
    service_s, due_s = prefills.service_s[near], prefills.deadline_s[near]
    with_decodes_s = view.mixed_s + service_s
    is_tight = with_decodes_s > _TIGHT * state.table.ttft_s[prefills.rows[near]]
    can_end = fixed_s + service_s <= np.minimum(due_s, room_s)
    is_urgent = can_end & (is_tight | (with_decodes_s > due_s))
    if not np.count_nonzero(is_urgent):
        return None
    (order,) = can_end.nonzero()
    order = order[due_s[order].argsort(kind="stable")]
    order = order[admissible(near[order])]
    if not len(order):
        return None
    fits = fixed_s + service_s[order].cumsum() <= min(room_s, float(due_s[order[0]]))
    fits &= prefills.new[near[order]].cumsum() <= state.max_num_tokens
    chosen = order[: len(fits) if fits.all() else int(fits.argmin())]
    if not is_urgent[chosen].any():
        return None
    step_s = fixed_s + float(service_s[chosen].sum())
    is_later = prefills.feasible[near].copy()
    is_later[chosen] = False
    later_s, later_due_s = service_s[is_later], due_s[is_later] - step_s - decodes.decode_s
    later = Jobs(later_s, later_due_s, lambda index: later_s[index])
    count = len(chosen) + len(later.on_time(view.prefill_share(allowed_s - step_s)))
    gains = count > num_on_time or (count == num_on_time and is_tight[chosen].any())
    return near[chosen] if gains else None
