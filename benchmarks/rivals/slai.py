"""SLAI."""

from __future__ import annotations

import numpy as np

from rivals.base import Rival, Step, by

_FULL_RATIO, _MOST_DECODES = 0.96, 128
_OLD_WEIGHT = 0.95


class Slai(Rival, chunk=512, k=5.0):
    """Decodes wait until their last moment; short prompts go first.

    Source: SLAI, arXiv 2508.01002, and its published code. A decode's last moment is its last
    token + P - k mean step times, or 2k where 96 % of the KV memory is taken. A step of `chunk`
    tokens has the decodes past their last moment, then prompts that have begun by arrival, then
    waiting ones, the shortest first, then other decodes; 128 decodes at most.

    Departures: memory and its victims are vLLM's. The mean step time is a moving average.
    """

    _mean_s = 0.0

    def fill(self, step: Step) -> None:
        state, table, decodes = step.state, step.table, step.decodes
        if state.elapsed_s > 0.0:
            weight = _OLD_WEIGHT if self._mean_s else 0.0
            self._mean_s = weight * self._mean_s + (1.0 - weight) * state.elapsed_s
        is_full = state.num_free_blocks < (1.0 - _FULL_RATIO) * state.num_blocks
        k = self.set.k * (2.0 if is_full else 1.0)
        is_coming = table.num_in_flight[decodes] > 0
        latest_s = np.where(is_coming, step.now_s, table.last_token_s[decodes])
        moment_s = latest_s + table.tpot_s[decodes] - k * self._mean_s
        is_due = step.now_s >= moment_s
        step.take_decodes(by(moment_s[is_due], decodes[is_due])[:_MOST_DECODES])
        is_begun = np.array([step.is_running(row) for row in step.prompts.tolist()], dtype=bool)
        begun, waiting = step.prompts[is_begun], step.prompts[~is_begun]
        begun = by(table.arrival_s[begun], begun)
        waiting = by(table.num_prompt[waiting].astype(float), waiting)
        for row in [*begun.tolist(), *waiting.tolist()]:
            step.take(row, min(step.room(row, np.inf), self._left(step)))
            if self._left(step) < 1:
                break
        others = by(moment_s[~is_due], decodes[~is_due])
        most = min(_MOST_DECODES - step.work.num_decodes, self._left(step))
        step.take_decodes(others[: max(0, most)])

    def _left(self, step: Step) -> int:
        """Tokens of the step that are left."""
        return int(self.set.chunk) - step.work.num_decodes - step.work.tokens
