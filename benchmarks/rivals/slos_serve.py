"""SLOs-Serve without speculation."""

from __future__ import annotations

import numpy as np

from rivals.base import Rival, Step, Work, by
from rivals.largest_set import largest_set, those_that_fit
from sola_sched.core.state import IntArray

#: In place of a deadline and of a TPOT that there is not.
_NEVER_S, _ANY_SPEED = 1e6, 1e9


class SlosServe(Rival, k=0.35):
    """Guarantees the largest set of requests that can all be in time; the rest is best effort.

    Source: SLOs-Serve, arXiv 2504.08784. At each arrival and end prompts are scanned by deadline.
    For each number admitted so far the plan keeps the most prompt tokens that could have been
    computed by then beyond what is promised: between deadlines the engine makes steps of t = k *
    the shortest TPOT, of which decodes take their share t / P each and prompts the rest. Earlier
    admissions stay; last, those that expected KV memory has no room for are dropped, the largest
    first. A step of t has the decodes of admitted requests that would be late, their prompts by
    deadline, their other decodes, and then best effort, which loses KV and slots to them.

    Departures: `k` is 1 in the paper; shorter steps leave less to best effort. There is one tier
    of memory. A request behind schedule is not given a tighter TPOT.
    """

    _admitted: frozenset[int] = frozenset()
    _seen = (-1, -1)

    def fill(self, step: Step) -> None:
        table = step.table
        rows = np.concatenate([step.decodes, step.prompts])
        length_s = self.set.k * step.shortest_tpot_s(rows)
        if (table.num_added, len(table)) != self._seen:
            self._seen = (table.num_added, len(table))
            self._admit(step, length_s)
        is_ours = np.isin(table.serial[step.decodes], list(self._admitted))
        decodes, others = step.decodes[is_ours], step.decodes[~is_ours]
        is_ours = np.isin(table.serial[step.prompts], list(self._admitted))
        prompts, rest = step.prompts[is_ours], step.prompts[~is_ours]
        prompts = by(step.due_s(prompts), prompts)
        rest = by(table.arrival_s[rest], rest)
        self._make_room(step, prompts, np.concatenate([others, rest]))
        others, rest = (rows[~np.isin(rows, step.preempted)] for rows in (others, rest))
        due_s = step.token_due_s(decodes)
        is_urgent = due_s - step.now_s < 2.0 * length_s
        step.take_decodes(by(due_s[is_urgent], decodes[is_urgent]))
        step.take_prompts(prompts.tolist(), length_s)
        step.take_decodes(by(due_s[~is_urgent], decodes[~is_urgent]), length_s)
        step.take_decodes(by(table.arrival_s[others], others), length_s)
        step.take_prompts(rest.tolist(), length_s)

    def _make_room(self, step: Step, prompts: IntArray, rest: IntArray) -> None:
        running = [row for row in rest.tolist() if step.is_running(row)]
        victims = sorted(running, key=lambda row: float(step.table.arrival_s[row]))
        for row in prompts.tolist():
            if not step.is_running(row):
                step.make_room(row, victims)

    def _admit(self, step: Step, length_s: float) -> None:
        """Choose anew who is guaranteed, beside those who are already."""
        table, rows = step.table, by(step.due_s(step.prompts), step.prompts)
        is_forced = np.isin(table.serial[rows], list(self._admitted))
        is_in_time = step.due_s(rows) > step.now_s
        rows, is_forced = rows[is_forced | is_in_time], is_forced[is_forced | is_in_time]
        due_s = np.clip(step.due_s(rows), step.now_s, step.now_s + _NEVER_S)
        chosen = largest_set(
            np.diff(due_s, prepend=step.now_s),
            step.left(rows),
            is_forced,
            self._speeds(step, length_s, len(rows)),
        )
        rows, is_forced, state = rows[chosen], is_forced[chosen], step.state
        held = step.ctx(step.decodes) + state.remaining(step.decodes).sum()
        memory = state.num_blocks * state.block_size - held
        need = table.prefill_target[rows] + state.remaining(rows)
        kept = rows[those_that_fit(need, is_forced, memory)]
        decodes = table.serial[step.decodes].tolist()
        self._admitted &= frozenset(decodes)
        self._admitted |= frozenset(table.serial[kept].tolist())

    def _speeds(self, step: Step, length_s: float, count: int) -> list[float]:
        """Prompt tokens per second beside the decodes there are and 0, 1, ... `count` more."""
        rows = np.concatenate([step.decodes, step.prompts])
        if length_s == np.inf or not len(rows):
            return [_ANY_SPEED] * (count + 1)
        share = float(np.minimum(1.0, length_s / step.table.tpot_s[rows]).mean())
        ctx = step.ctx(rows) / len(rows)
        steps = Step(step.state, step.seconds_of)
        speeds = []
        for more in range(count + 1):
            size = round(share * (len(step.decodes) + more))
            steps.work = Work(size, round(size * ctx))
            speeds.append(steps.most_tokens(length_s) / length_s)
        return speeds
