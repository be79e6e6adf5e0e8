"""One step of `policy="attain"`: what those get that have lost their SLO, and who makes room."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.core.state import FloatArray, IntArray
from sola_sched.planner.attain_state import BestEffort, StepView

#: Shares of the slots and of the KV blocks that stay free when several lost requests start at once.
_SPARE_SLOTS, _SPARE_BLOCKS = 0.125, 0.5
#: Lost prefills in one step, but for the oldest, at most.
_MAX_MORE = 256
_NO_SECONDS: FloatArray = np.empty(0)


class LostStep:
    """Service of the lost in one step, from what others leave over and from their own share.

    Attributes:
        received_s: What they got from the others, as booked, seconds.
        are_there: Whether anybody is lost.
    """

    def __init__(self, view: StepView, credit: BestEffort, *, rejects: bool) -> None:
        self.view, self.credit, self.rejects = view, credit, rejects
        self.received_s, self.are_there = 0.0, True
        self._next: tuple[int, float, int] | None = None

    def serve(
        self, limit_s: float, served: IntArray, tokens: int, has_backlog: bool
    ) -> tuple[IntArray, tuple[IntArray, int, bool] | None]:
        """Lost requests for this step, strictly in the order of arrival.

        What the others leave over is free; beyond that a lost request spends the credit. A
        prefill paid by credit takes the whole chunk of a step.

        Args:
            limit_s: Time for the step, seconds.
            served: Places of the other prefills in the step.
            tokens: Tokens of these.
            has_backlog: Whether some of them must wait.

        Returns:
            Lost decodes to run, as indices; prefills as (indices, tokens, is_alone) or None.
        """
        view, state, table, credit = self.view, self.view.state, self.view.state.table, self.credit
        was_blocked, credit.is_blocked = credit.is_blocked, False
        is_lost = ~view.prefills.feasible
        if self.rejects:  # those will not be there any more
            first = view.prefills.num_started
            is_lost[first:] &= ~view.prefills.hopeless[first:]
        (prefills,) = is_lost.nonzero()
        if not len(prefills) and view.decodes.num_alive == len(view.decodes.rows):
            credit.forget()
            self.are_there = False
            return prefills, None
        credit.earn(state.elapsed_s)
        cost = state.cost
        spare_s = 0.0
        if not has_backlog:
            spare_s = limit_s - view.decodes.decode_s
            spare_s -= float(cost.prefill_marginal_s(float(tokens), 0.0)) if tokens else 0.0
        prefill_arrival = table.arrival_s[view.prefills.rows[prefills]]
        oldest = int(prefill_arrival.argmin()) if len(prefills) else -1
        oldest_s = float(prefill_arrival[oldest]) if len(prefills) else np.inf
        # Nobody passes the oldest lost prefill, so only the decodes before it count.
        (before, added_s), (later, later_s) = self._decodes_around(oldest_s)
        num_run, spare_used_s = self._first(added_s, spare_s)
        spare_s -= spare_used_s
        run = before[:num_run]
        room = view.token_room - num_run * state.tokens_per_decode
        if oldest < 0:
            self._receive(spare_used_s)
            return run, None
        index = int(prefills[oldest])
        has_room = self._has_room(index, run)
        if has_room:
            self._receive(spare_used_s)
        else:
            # Once it has waited long enough to fill its credit, room is kept for it. What others
            # get from slack in the meantime does not count.
            credit.is_blocked = was_blocked or credit.is_full
        if num_run < len(before):
            return run, None
        chosen, num_tokens = prefills[:0], 0
        if has_room:
            beside_s = spare_s if self._has_room(index, run, served) else 0.0
            lost_prefill = self._lost_prefill(index, limit_s, beside_s, room, served, tokens)
            if lost_prefill is not None:
                chosen, (num_tokens, is_alone) = np.array([index]), lost_prefill
                if num_tokens < view.prefills.size_of(index)[0]:
                    return run, (chosen, num_tokens, is_alone)
                first_s = float(view.prefills.service_s[index])
                if is_alone:
                    # One short prompt a step would never use up a large share.
                    spare_s = min(limit_s, 2.0 * view.mixed_s) - view.mixed_s - first_s
                    spare_s = min(spare_s, credit.credit_s)
                    served, tokens = served[:0], 0
                else:
                    spare_s -= first_s
                others = prefills[prefill_arrival.argsort(kind="stable")[1:]]
                starting = np.concatenate([served, chosen])
                more = self._more(others, spare_s, room - tokens - num_tokens, starting)
                chosen = np.concatenate([chosen, more])
                num_tokens += int(view.prefills.new[more].sum())
                if is_alone:
                    return run, (chosen, num_tokens, True)
                spare_s -= float(view.prefills.service_s[more].sum())
        elif len(started := prefills[prefills < view.prefills.num_started]):
            index = int(started[np.argmin(table.arrival_s[view.prefills.rows[started]])])
            num_tokens = self._from_slack(index, spare_s, room, served, tokens)
            if num_tokens:
                chosen = np.array([index])
                spare_s -= float(cost.prefill_marginal_s(float(num_tokens), 0.0))
        starting = np.concatenate([served, chosen])
        count = self._later(later_s, spare_s, room - tokens - num_tokens, starting)
        if count and has_room and len(chosen):
            self._receive(float(later_s[:count].sum()))
        run = np.concatenate([run, later[:count]])
        return run, (chosen, num_tokens, False) if len(chosen) else None

    def _receive(self, seconds: float) -> None:
        self.received_s += seconds
        self.credit.received(seconds)

    def _decodes_around(
        self, oldest_s: float
    ) -> tuple[tuple[IntArray, FloatArray], tuple[IntArray, FloatArray]]:
        """Lost decodes that arrived until `oldest_s`, and those after it, each by arrival.

        Returns:
            Their indices, and what each adds to the step, seconds; twice.
        """
        decodes = self.view.decodes
        (places,) = decodes.lost.nonzero()
        if not len(places):
            return (places, _NO_SECONDS), (places, _NO_SECONDS)
        arrival = self.view.state.table.arrival_s[decodes.rows[places]]
        order = arrival.argsort(kind="stable")
        places = places[order]
        cost = self.view.state.cost
        added_s = cost.decode_s(2.0, decodes.ctx[places]) - cost.decode_s(1.0, 0.0)
        split = int(arrival[order].searchsorted(oldest_s, side="right"))
        return (places[:split], added_s[:split]), (places[split:], added_s[split:])

    def _first(self, added_s: FloatArray, spare_s: float) -> tuple[int, float]:
        """How many lost decodes go on, from the first, on what is left over or on credit.

        Args:
            added_s: What each adds to the step, seconds, by arrival.
            spare_s: Time left over, seconds.

        Returns:
            Their number; how much of the time left over they take, seconds.
        """
        if not len(added_s):
            return 0, 0.0
        used_s = added_s.cumsum()
        count = int(used_s.searchsorted(spare_s, side="right"))
        spare_used_s = float(used_s[count - 1]) if count else 0.0
        for added in added_s[count:].tolist():
            if added <= spare_s - spare_used_s:
                spare_used_s += added
            elif self.credit.credit_s > 0:
                self.credit.credit_s -= added
            else:
                break
            count += 1
        return count, spare_used_s

    def _later(self, added_s: FloatArray, spare_s: float, room: int, starting: IntArray) -> int:
        """How many lost decodes that came after the oldest prefill go on beside it, from the first.

        They use what is left when nobody older can use it, and end sooner; but those whose slots
        the starting requests need, the last ones, sit out.

        Args:
            added_s: What each adds to the step, seconds, by arrival.
            spare_s: Time left over, seconds.
            room: Tokens left over.
            starting: Places of the prefills of the step.
        """
        if not len(added_s) or spare_s <= 0:
            return 0
        view, state, prefills = self.view, self.view.state, self.view.prefills
        starting = starting[starting >= prefills.num_started]
        blocks = float(self._blocks(starting).sum())
        if blocks + len(view.decodes.rows) > state.num_free_blocks:
            return 0  # whose KV gives way is seen to by `victims`
        num_displaced = max(0, len(starting) - view.num_free_slots)
        most = min(len(added_s) - num_displaced, room // state.tokens_per_decode)
        used_s = added_s[: max(0, most)].cumsum()
        return int(used_s.searchsorted(spare_s, side="right"))

    def _more(self, others: IntArray, spare_s: float, room: int, starting: IntArray) -> IntArray:
        """Of `others`, in order, those that also fit what is left over: prompts may be short.

        They end in this step, and start with slots and memory to spare: nobody is displaced for
        them, and those that arrive next find room.

        Args:
            others: Places of further lost prefills, by arrival.
            spare_s: Time left over, seconds.
            room: Tokens left over.
            starting: Places of the prefills that go before these.
        """
        view, state, prefills = self.view, self.view.state, self.view.prefills
        if room <= 0 or spare_s <= 0 or not len(others):
            return others[:0]
        # Those that have begun hold slots and KV: the sooner they end, the better.
        is_waiting = others >= prefills.num_started
        others = np.concatenate([others[~is_waiting], others[is_waiting]])[:_MAX_MORE]
        starts = others >= prefills.num_started
        num_starting = int(np.count_nonzero(starting >= prefills.num_started))
        slots = view.num_free_slots - num_starting - int(_SPARE_SLOTS * state.max_num_running)
        blocks = state.num_free_blocks - int(_SPARE_BLOCKS * state.num_blocks)
        new = prefills.new[others]
        fits = prefills.service_s[others].cumsum() <= spare_s
        fits &= new.cumsum() <= room
        fits &= ~starts | (starts.cumsum() <= slots)
        fits &= ~starts | ((starts * self._blocks(others)).cumsum() <= blocks)
        more: IntArray = others[: len(fits) if fits.all() else int(fits.argmin())]
        self._receive(float(prefills.service_s[more].sum()))
        return more

    def _from_slack(
        self, index: int, spare_s: float, room: int, served: IntArray, served_tokens: int
    ) -> int:
        """Tokens of a lost request that what others leave over pays for."""
        if spare_s <= 0:
            return 0
        view, prefills = self.view, self.view.prefills
        need, has = prefills.size_of(index)
        limit_s = view.decodes.decode_s + spare_s
        tokens = self._tokens_in(limit_s, need, room - served_tokens, has)
        # vLLM serves running requests before waiting ones: a long one must not take the chunk of
        # those admitted beside it.
        if tokens < need and index < prefills.num_started and len(served):
            return 0 if (served >= prefills.num_started).any() else tokens
        return tokens

    def _tokens_in(self, limit_s: float, need: int, room: int, has: float) -> int:
        """Of `need` tokens those that a step of `limit_s` has time for; all or none of a whole."""
        ends = None if self.view.state.chunks_prefills else np.array([float(need)])
        tokens = min(need, self.view.tokens_in(limit_s, room, has, ends))
        return tokens if ends is None or tokens == need else 0

    def _lost_prefill(
        self,
        index: int,
        limit_s: float,
        spare_s: float,
        room: int,
        served: IntArray,
        served_tokens: int,
    ) -> tuple[int, bool] | None:
        """The chunk of one lost request: from what is left over, else alone and on credit.

        Returns:
            Its tokens, and whether nobody else computes a prompt beside it.
        """
        credit, prefills = self.credit, self.view.prefills
        tokens = self._from_slack(index, spare_s, room, served, served_tokens)
        if tokens:
            has = prefills.size_of(index)[1]
            marginal_s = self.view.state.cost.prefill_marginal_s(float(tokens), has)
            self._receive(float(marginal_s))
            return tokens, False
        self._next = index, limit_s, room
        if credit.credit_s <= 0 or self._is_upper_there(index):
            return None
        tokens, seconds = self._on_credit(index, limit_s, room)
        if not tokens or (credit.credit_s < seconds and not credit.is_full):
            return None
        credit.credit_s -= seconds
        return tokens, True

    def _is_upper_there(self, index: int) -> bool:
        """Whether a prefill of a higher class would have to wait for this one."""
        if not self.view.state.has_classes:
            return False
        prefills, priority = self.view.prefills, self.view.state.table.priority
        return bool(
            (priority[prefills.rows[prefills.feasible]] < priority[prefills.rows[index]]).any()
        )

    def _on_credit(self, index: int, limit_s: float, room: int) -> tuple[int, float]:
        """Tokens of a lost request in a step of its own, and what they cost, seconds."""
        need, has = self.view.prefills.size_of(index)
        tokens = self._tokens_in(limit_s, need, room, has)
        if not tokens and self.credit.is_full:
            tokens = min(need, self.view.tile) if self.view.state.chunks_prefills else need
        if self._is_restored(index):  # its place in memory is worth what computing it would be
            return tokens, float(self.view.state.cost.prefill_marginal_s(tokens + has, 0.0))
        return tokens, float(self.view.state.cost.prefill_marginal_s(float(tokens), has))

    def _is_restored(self, index: int) -> bool:
        """Whether this request waits to come back with KV that need not be computed."""
        prefills, table = self.view.prefills, self.view.state.table
        return index >= prefills.num_started and bool(table.num_preemptions[prefills.rows[index]])

    def price_s(self) -> float:
        """Credit for which the next prefill on credit is to be had, seconds; call after `serve`.

        0 where more than that one decides.
        """
        if not self.are_there:
            return math.inf
        if self._next is None:
            return 0.0
        tokens, seconds = self._on_credit(*self._next)
        return min(seconds, self.credit.full_s) if tokens else self.credit.full_s

    def _has_room(self, index: int, lost_run: IntArray, beside: IntArray | None = None) -> bool:
        """Whether slot and memory can be had for a lost request, from decodes that sit out.

        Args:
            index: Its place.
            lost_run: Places of the lost decodes that run.
            beside: Places of other prefills of the step, which come first.
        """
        view, state, prefills = self.view, self.view.state, self.view.prefills
        if index < prefills.num_started:
            return True
        held = view.decodes.lost.copy()
        held[lost_run] = False
        slots = view.num_free_slots + int(np.count_nonzero(held))
        free = state.num_free_blocks + int(view.decodes.ctx[held].sum()) // state.block_size
        if beside is not None:
            starting = beside[beside >= prefills.num_started]
            slots -= len(starting)
            free -= int(self._blocks(starting).sum())
        return slots > 0 and free > float(self._blocks(np.array([index]))[0])

    def _blocks(self, places: IntArray) -> FloatArray:
        """KV blocks that each waiting request needs, restored or cached ones too; one to spare."""
        blocks: FloatArray = self.view.prefills.size[places] / self.view.state.block_size + 1.0
        return blocks

    def _safe(self, lost_run: IntArray) -> IntArray:
        """Of the lost decodes that run, those that no other request displaces.

        Without swapping all: they would lose their KV. With it, where memory is what is short,
        running on what is left over of the time must not keep it from those on time: the first
        by arrival stay, up to the share of the memory that the share of the time is.
        """
        state, decodes = self.view.state, self.view.decodes
        if state.reload_s_per_token == math.inf or not len(lost_run):
            return lost_run
        order: IntArray = lost_run[
            state.table.arrival_s[decodes.rows[lost_run]].argsort(kind="stable")
        ]
        room = self.credit.share * state.num_blocks * state.block_size
        count = int(decodes.ctx[order].cumsum().searchsorted(room, side="right"))
        return order[: max(1, count)]

    def victims(self, admit: IntArray, lost_run: IntArray, served: IntArray) -> IntArray:
        """Lost requests that leave for the slots and blocks this step needs, the youngest first.

        Those that sit out and, with swapping, decodes that run on what is left over.

        Args:
            admit: Rows that start in the step.
            lost_run: Places of the lost decodes that run.
            served: Places of the prefills in the step.
        """
        view, state, table = self.view, self.view.state, self.view.state.table
        decodes = view.decodes
        if not len(admit) and state.num_free_blocks > len(decodes.rows):
            return admit  # a decode takes one block at most
        is_held = decodes.lost.copy()
        is_held[self._safe(lost_run)] = False
        is_pending = view.held_prefills
        is_pending[served[served < view.prefills.num_started]] = False
        (pending,) = is_pending.nonzero()
        held: IntArray = np.concatenate([decodes.rows[is_held], view.prefills.rows[pending]])
        if not len(held):
            return held
        tokens = table.num_prompt[decodes.rows] + table.num_output[decodes.rows]
        size = np.concatenate([tokens[is_held], table.num_computed[view.prefills.rows[pending]]])
        blocks = int((tokens[~is_held] % state.block_size == 0).sum())
        blocks += int(np.ceil(table.prefill_target[admit] / state.block_size).sum()) + 1
        num_slots = len(admit) - view.num_free_slots
        short = blocks - state.num_free_blocks
        chosen: list[int] = []
        for place in np.argsort(-table.arrival_s[held], kind="stable").tolist():
            if num_slots <= 0 and short <= 0:
                break
            chosen.append(int(held[place]))
            num_slots -= 1
            short -= -(-int(size[place]) // state.block_size)
        return np.array(chosen, dtype=np.int64)
