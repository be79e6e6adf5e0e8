"""ProServe's SlideBatching."""

from __future__ import annotations

import numpy as np

from rivals.base import Rival, Step
from sola_sched.core.state import FloatArray


class SlideBatching(Rival, lam=1.0, floor=0.65, least=50):
    """One queue of prompts and decodes: by deadline at low load, the cheapest first at high load.

    Source: ProServe, arXiv 2512.12928, and its code in xLLM. With e the time of a request's next
    work, rem the time to its next deadline and c the constant of a step:

        b    = max(least rem of those with rem >= e + c, floor * shortest TPOT)
        load = sum(e) * b / (b - c)

    Those with rem < lam * load are urgent and come first, by weight / e, the largest first; then
    the others by rem. Each is taken as long as the sum of e fits into b; a prompt is cut to fit,
    but to no less than `least` tokens. The first that does not fit ends the step.

    Departures: deadlines of prompts are those of the first token. Memory and its victims are
    vLLM's, which takes KV from the last of the step.
    """

    def fill(self, step: Step) -> None:
        rows = np.concatenate([step.decodes, step.prompts])
        if not len(rows):
            return
        num_decodes, constant_s = len(step.decodes), step.constant_s()
        need_s = self._need_s(step, constant_s)
        due_s = np.concatenate([step.token_due_s(step.decodes), step.due_s(step.prompts)])
        rem_s = due_s - step.now_s
        in_time = rem_s[rem_s >= need_s + constant_s]
        floor_s = self.set.floor * step.shortest_tpot_s(rows)
        budget_s = float(in_time.min(initial=np.inf))
        budget_s = max(budget_s, floor_s if floor_s < np.inf else 0.0, 1.01 * constant_s)
        share = 1.0 if budget_s == np.inf else budget_s / (budget_s - constant_s)
        is_urgent = rem_s < self.set.lam * float(need_s.sum()) * share
        density = need_s / step.table.weight[rows]
        order = np.lexsort((np.where(is_urgent, density, rem_s), ~is_urgent))
        used_s = constant_s
        for place in order.tolist():
            row, left = int(rows[place]), step.left(rows[place : place + 1])[0]
            if place < num_decodes:
                used_s += need_s[place]
                if used_s > budget_s or not step.take_decodes(rows[place : place + 1]):
                    return
            elif step.may_take(row):
                tokens = step.room(row, budget_s)
                if tokens < left and tokens <= self.set.least:
                    return
                step.take(row, tokens)
                used_s = step.seconds()
                if tokens < left:
                    return

    def _need_s(self, step: Step, constant_s: float) -> FloatArray:
        """The time of each one's next work beside the constant of a step."""
        rows, count = step.decodes, max(1, len(step.decodes))
        decodes_s = step.decodes_s(rows) - constant_s
        each = np.full(len(rows), max(1e-9, decodes_s / count))
        prompts = [max(1e-9, step.alone_s(row) - constant_s) for row in step.prompts.tolist()]
        return np.concatenate([each, np.array(prompts)])
