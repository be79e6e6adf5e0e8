"""SCORPIO."""

from __future__ import annotations

import numpy as np

from rivals.base import Rival, Step, Work, by
from sola_sched.core.state import IntArray

_SPARE_S, _TPOT_SHARE = 0.05, 0.99


class Scorpio(Rival, gate=1.3, chunk=0, refuse=True):
    """Refuses who would be late, admits while predicted TPOT holds, paces loose decodes.

    Source: SCORPIO, arXiv 2505.23022, and its published code. Each step: (1) along the queue by
    deadline, whoever cannot be reached 50 ms before it behind the prompts ahead is refused.
    (2) From the head, requests are admitted while gate * T(V, s) < 0.99 Pmin, with
    V = sum(Pmin / P_i) of those that run and the candidate, and s their mean length with half of
    the output that is expected; the first failure ends admission. (3) If prompts were admitted, the
    step has these alone; else decodes, of which the tightest class runs always and any other earns
    Pmin / P_i a step and pays 1 to run.

    Departures: with `chunk` > 0 a step has all decodes that may run and so many tokens of prompts
    (the base of the code had no chunks). Without `refuse` those that would be refused come last,
    and with an empty engine the first is admitted whatever the gate says.
    """

    def __init__(self, config: object) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self._credits: dict[int, float] = {}

    def fill(self, step: Step) -> None:
        waiting, begun = self._queue(step)
        new = [*begun, *self._admitted(step, waiting)]
        if self.set.chunk:
            self._take_decodes(step)
            most = max(1, self.set.chunk - step.work.num_decodes)
            for row in new:
                step.take(row, min(step.room(row, np.inf), most - step.work.tokens))
        else:
            step.take_prompts(new)
            if not step.taken:
                self._take_decodes(step)

    def _queue(self, step: Step) -> tuple[list[int], list[int]]:
        """Those that wait, in order, without the refused; and the prompts that have begun."""
        rows = by(step.due_s(step.prompts), step.prompts)
        begun = [row for row in rows.tolist() if step.is_running(row)]
        constant_s, kept, late = step.constant_s(), [], []
        wait_s = constant_s + sum(step.alone_s(row) - constant_s for row in begun)
        for row, due_s in zip(rows.tolist(), step.due_s(rows).tolist(), strict=True):
            if step.is_running(row):
                continue
            own_s = step.alone_s(row) - constant_s
            is_new = step.table.num_output[row] == 0
            if is_new and due_s - step.now_s < wait_s + own_s + _SPARE_S:
                late.append(row)
            else:
                wait_s += own_s
                kept.append(row)
        if self.set.refuse:
            step.rejected, late = late, []
        return kept + late, begun

    def _admitted(self, step: Step, waiting: list[int]) -> list[int]:
        """From the head, as long as the gate holds and their prompts find memory."""
        state, table, new = step.state, step.table, list[int]()
        free = state.num_free_blocks
        rows = np.concatenate([state.running, np.array(waiting, dtype=np.int64)])
        tpot_s = table.tpot_s[rows]
        length = table.num_prompt[rows] + step.given(rows) + 0.5 * state.remaining(rows)
        for row in waiting[: max(0, state.max_num_running - len(state.running))]:
            count = len(state.running) + len(new) + 1
            tightest_s = tpot_s[:count].min()
            free -= int(table.prefill_target[row]) // state.block_size + 1
            if free < 0 and count > 1:
                break
            is_free = tightest_s == np.inf or count == 1
            size = count if tightest_s == np.inf else float((tightest_s / tpot_s[:count]).sum())
            ctx = size * float(length[:count].mean())
            seconds = step.seconds_of(Work(max(1, round(size)), round(ctx)))
            if not is_free and self.set.gate * seconds >= _TPOT_SHARE * tightest_s:
                break
            new.append(row)
        return new

    def _take_decodes(self, step: Step) -> None:
        rows, tightest_s = step.decodes, step.shortest_tpot_s(step.decodes)
        serials, earned = step.table.serial[rows].tolist(), np.ones(len(rows))
        if tightest_s < np.inf:
            earned = tightest_s / step.table.tpot_s[rows]
        before = np.array([self._credits.get(serial, 0.0) for serial in serials])
        credit = before + earned
        runs = credit >= 1.0 - 1e-9
        self._credits = dict(zip(serials, (credit - runs).tolist(), strict=True))
        chosen: IntArray = rows[runs]
        step.take_decodes(chosen)
