"""Rules of a few lines: earliest deadline first, a budget by TPOT, Past-Future admission."""

from __future__ import annotations

import numpy as np

from rivals.base import Rival, Step, by
from sola_sched.core.state import IntArray
from sola_sched.planner.base import num_that_fit


class Edf(Rival, chunk=512):
    """Earliest deadline first in steps of a fixed size, decodes first (Sarathi-EDF).

    Source: the strongest rival in QoServe's own evaluation, arXiv 2503.22562. Prompts that have
    begun and that wait stand in one order.
    """

    def fill(self, step: Step) -> None:
        step.take_decodes(step.decodes)
        _fill_up(step, by(step.due_s(step.prompts), step.prompts), self.set.chunk)


class TpotBudget(Rival, share=0.8):
    """First come, first served, in steps no longer than a share of the tightest TPOT.

    Source: the dynamic batch of vLLM's Ascend plug-in (`scheduler_dynamic_batch.py`): the largest
    chunk whose step stays below a fixed time at the present number and context of decodes; it knows
    no deadlines. Departure: the limit is a share of the tightest target, to be swept.
    """

    def fill(self, step: Step) -> None:
        rows = np.concatenate([step.decodes, step.prompts])
        step.take_decodes(step.decodes)
        order = by(step.table.queue_pos[step.prompts].astype(float), step.prompts)
        step.take_prompts(order.tolist(), self.set.share * step.shortest_tpot_s(rows))


class PastFuture(Rival, chunk=512, memory=0.97):
    """First come, first served, as long as the predicted peak of KV memory fits.

    Source: Past-Future, arXiv 2507.10150, and LightLLM's code. With the requests sorted by tokens
    left, longest first, the peak is the largest of remaining_k * k + tokens that the first k hold.
    What is left is predicted from past lengths, given what is there. Decodes first, in steps of
    `chunk` tokens.
    """

    def fill(self, step: Step) -> None:
        state, table = step.state, step.table
        step.take_decodes(step.decodes)
        place = np.argsort(table.queue_pos[state.waiting], kind="stable")
        waiting = state.waiting[place]
        left = state.remaining(np.concatenate([state.running, waiting]))
        count = num_that_fit(state, state.running, place, left, share=self.set.memory)
        begun = step.prompts[: len(step.prompts) - len(waiting)]
        _fill_up(step, np.concatenate([begun, waiting[:count]]), self.set.chunk)


def _fill_up(step: Step, rows: IntArray, size: int) -> None:
    """Take prompts in order until the step has so many tokens; one prompt token at least."""
    most = max(1, size - step.work.num_decodes)
    for row in rows.tolist():
        step.take(row, min(step.room(row, np.inf), most - step.work.tokens))
        if step.work.tokens >= most:
            return
