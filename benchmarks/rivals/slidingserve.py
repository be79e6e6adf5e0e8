"""SlidingServe, as far as it is described."""

from __future__ import annotations

from functools import cache

import numpy as np

from rivals.base import Rival, Step
from sola_sched.core.state import IntArray


class SlidingServe(Rival, margin=1.1, grain=16):
    """Chunks that two steps together make the most of; prompts that can be in time are protected.

    Source: SlidingServe, arXiv 2606.05933, by its abstract and a review: prompts stand in order of
    (protected, urgency, work left); the chunk of this step is the one with which this and the next
    step together compute the most prompt tokens within the deadlines of the decodes, found by
    ternary search; where first tokens would be late, a knapsack chooses who runs.

    Departures: the details were not at hand. Each request counts the same, so the knapsack is the
    rule of Moore and Hodgson: by deadline, and whenever one would be late the longest so far is
    left out; whoever stays is protected. `margin` is a factor on predicted times.
    """

    def fill(self, step: Step) -> None:
        decodes = step.decodes
        due_s = (step.token_due_s(decodes) - step.now_s) / self.set.margin
        tpot_s = step.table.tpot_s[decodes] / self.set.margin
        first_s, both_s = (float(each.min(initial=np.inf)) for each in (due_s, due_s + tpot_s))
        step.take_decodes(decodes)
        pending = int(step.left(step.prompts).sum())
        chunk = self._chunk(step, pending, first_s, both_s)
        if chunk < 1:
            return
        limit_s = step.seconds_of(step.work.with_chunk(chunk, 0))
        order = self._order(step, chunk / limit_s)
        for row in filter(step.may_take, order.tolist()):
            tokens = min(step.room(row, max(limit_s, first_s)), chunk - step.work.tokens)
            step.take(row, tokens)
            if tokens < step.left(np.array([row]))[0]:
                return

    def _chunk(self, step: Step, pending: int, first_s: float, both_s: float) -> int:
        """Tokens of this step of the best two; the larger chunk where both are as good."""
        most = min(pending, step.most_tokens(first_s))
        grain = self.set.grain

        @cache
        def total(count: int) -> int:
            now = min(most, count * grain)
            used_s = step.seconds_of(step.work.with_chunk(now, 0)) if now else step.seconds()
            return min(pending, now + step.most_tokens(both_s - used_s))

        low, high = 0, -(-most // grain)
        while high - low > 2:
            third = (high - low) // 3
            left, right = low + third, high - third
            low, high = (low, right - 1) if total(left) > total(right) else (left, high)
        best = max(range(low, high + 1), key=lambda count: (total(count), count))
        return min(most, best * grain)

    def _order(self, step: Step, speed: float) -> IntArray:
        """Protected prompts before the others, each by deadline and work left."""
        rows, left, due_s = step.prompts, step.left(step.prompts), step.due_s(step.prompts)
        kept: list[int] = []
        for place in np.lexsort((left, due_s)).tolist():
            kept.append(place)
            if step.now_s + left[kept].sum() / speed > due_s[place]:
                kept.remove(max(kept, key=lambda each: int(left[each])))
        is_exposed = ~np.isin(np.arange(len(rows)), kept)
        order: IntArray = rows[np.lexsort((left, due_s, is_exposed))]
        return order
