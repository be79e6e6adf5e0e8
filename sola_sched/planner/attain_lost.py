"""One step of `policy="attain"`: what those get that have lost their SLO, and who makes room."""

from __future__ import annotations

import numpy as np

from sola_sched.planner.attain_state import BestEffort, StepView
from sola_sched.state import IntArray


class LostStep:
    """Service of the lost in one step, from what others leave over and from their own share."""

    def __init__(self, view: StepView, credit: BestEffort, *, rejects: bool) -> None:
        self.view, self.credit, self.rejects = view, credit, rejects

    def serve(
        self, limit_s: float, served: IntArray, tokens: int, has_backlog: bool
    ) -> tuple[IntArray, tuple[int, int, bool] | None]:
        """Lost requests for this step, strictly in the order of arrival.

        What the others leave over is free; beyond that a lost request spends the credit. A
        prefill paid by credit takes the whole chunk of a step.

        Args:
            limit_s: Time for the step, seconds.
            served: Places of the other prefills in the step.
            tokens: Tokens of these.
            has_backlog: Whether some of them must wait.

        Returns:
            Lost decodes to run, as indices; a prefill as (index, tokens, is_alone) or None.
        """
        view, state, table, credit = self.view, self.view.state, self.view.state.table, self.credit
        was_blocked, credit.is_blocked = credit.is_blocked, False
        is_lost = ~view.prefills.feasible
        if self.rejects:  # those will not be there any more
            first = view.prefills.num_started
            is_lost[first:] &= ~view.prefills.hopeless[first:]
        (prefills,) = is_lost.nonzero()
        (decodes,) = view.decodes.lost.nonzero()
        if not len(prefills) and not len(decodes):
            credit.forget()
            return decodes, None
        credit.earn(state.elapsed_s)
        cost = state.cost
        spare_s = 0.0
        if not has_backlog:
            spare_s = limit_s - view.decodes.decode_s
            spare_s -= float(cost.prefill_marginal_s(float(tokens), 0.0)) if tokens else 0.0
        room = view.token_room
        # What each lost decode adds to the step.
        added_s = cost.decode_s(2.0, view.decodes.ctx[decodes]) - cost.decode_s(1.0, 0.0)
        arrival = table.arrival_s[view.decodes.rows[decodes]]
        # Nobody passes the oldest lost prefill, so only the decodes before it count.
        oldest = -1
        if len(prefills):
            prefill_arrival = table.arrival_s[view.prefills.rows[prefills]]
            oldest = int(prefill_arrival.argmin())
            before = arrival <= prefill_arrival[oldest]
            decodes, added_s, arrival = decodes[before], added_s[before], arrival[before]
        order = arrival.argsort(kind="stable")
        added_s = added_s[order]
        used_s = added_s.cumsum()
        num_run = int(used_s.searchsorted(spare_s, side="right"))
        spare_used_s = float(used_s[num_run - 1]) if num_run else 0.0
        spare_s -= spare_used_s
        for added in added_s[num_run:].tolist():
            if added <= spare_s:
                spare_s -= added
                spare_used_s += added
            elif credit.credit_s > 0:
                credit.credit_s -= added
            else:
                break
            num_run += 1
        run = decodes[order[:num_run]]
        room -= num_run * state.tokens_per_decode
        index = int(prefills[oldest]) if oldest >= 0 else -1
        if index >= 0 and not self._has_room(index, run):
            # Once it has waited long enough to fill its credit, room is kept for it. What others
            # get from slack in the meantime does not count.
            credit.is_blocked = was_blocked or credit.is_full
            started = prefills[prefills < view.prefills.num_started]
            if num_run < len(order) or not len(started):
                return run, None
            index = int(started[np.argmin(table.arrival_s[view.prefills.rows[started]])])
            num_tokens = self._from_slack(index, spare_s, room, served, tokens)
            return run, (index, num_tokens, False) if num_tokens else None
        credit.received(spare_used_s)
        if num_run < len(order) or index < 0:
            return run, None
        return run, self._lost_prefill(index, limit_s, spare_s, room, served, tokens)

    def _from_slack(
        self, index: int, spare_s: float, room: int, served: IntArray, served_tokens: int
    ) -> int:
        """Tokens of a lost request that what others leave over pays for."""
        if spare_s <= 0:
            return 0
        view, prefills = self.view, self.view.prefills
        need, has = int(prefills.new[index]), float(prefills.has[index])
        limit_s = view.decodes.decode_s + spare_s
        tokens = min(need, view.tokens_in(limit_s, room - served_tokens, has))
        # vLLM serves running requests before waiting ones: a long one must not take the chunk of
        # those admitted beside it.
        first = prefills.num_started
        overtakes = index < first and bool((served >= first).any())
        return tokens if tokens == need or not overtakes else 0

    def _lost_prefill(
        self,
        index: int,
        limit_s: float,
        spare_s: float,
        room: int,
        served: IntArray,
        served_tokens: int,
    ) -> tuple[int, int, bool] | None:
        """The chunk of one lost request: from what is left over, else alone and on credit."""
        credit, cost, prefills = self.credit, self.view.state.cost, self.view.prefills
        need, has = int(prefills.new[index]), float(prefills.has[index])
        tokens = self._from_slack(index, spare_s, room, served, served_tokens)
        if tokens:
            credit.received(float(cost.prefill_marginal_s(float(tokens), has)))
            return index, tokens, False
        tokens = min(need, self.view.tokens_in(limit_s, room, has))
        if not tokens and credit.is_full:
            tokens = min(need, self.view.tile)
        seconds = float(cost.prefill_marginal_s(float(tokens), has))
        if not tokens or (credit.credit_s < seconds and not credit.is_full):
            return None
        credit.credit_s -= seconds
        return index, tokens, True

    def _has_room(self, index: int, lost_run: IntArray) -> bool:
        """Whether slot and memory can be had for a lost request, from decodes that sit out."""
        view, state, prefills = self.view, self.view.state, self.view.prefills
        if index < prefills.num_started:
            return True
        held = view.decodes.lost.copy()
        held[lost_run] = False
        free = state.num_free_blocks + int(view.decodes.ctx[held].sum()) // state.block_size
        slots = view.num_free_slots + int(np.count_nonzero(held))
        return slots > 0 and free > prefills.new[index] / state.block_size + 1

    def victims(self, admit: IntArray, lost_run: IntArray) -> IntArray:
        """Held decodes that leave for the slots and blocks this step needs, the youngest first.

        Args:
            admit: Rows that start in the step.
            lost_run: Places of the lost decodes that run.
        """
        view, state, table = self.view, self.view.state, self.view.state.table
        decodes = view.decodes
        is_held = decodes.lost.copy()
        is_held[lost_run] = False
        if not np.count_nonzero(is_held):
            return decodes.rows[:0]
        held, decoding = decodes.rows[is_held], decodes.rows[~is_held]
        tokens = table.num_prompt[decoding] + table.num_output[decoding]
        blocks = int((tokens % state.block_size == 0).sum())
        blocks += int(np.ceil(table.prefill_target[admit] / state.block_size).sum()) + 1
        num_slots = len(admit) - view.num_free_slots
        short = blocks - state.num_free_blocks
        chosen: list[int] = []
        for row in held[np.argsort(-table.arrival_s[held], kind="stable")].tolist():
            if num_slots <= 0 and short <= 0:
                break
            chosen.append(row)
            num_slots -= 1
            size = int(table.num_prompt[row] + table.num_output[row])
            short -= -(-size // state.block_size)
        return np.array(chosen, dtype=np.int64)
