"""Prefills that a plan has chosen and vLLM puts off: nobody is held for them meanwhile.

vLLM gives a prefill no tokens whose image finds no room in the encoder cache, for instance, or
whose encoder output is on its way. A plan knows nothing of that. If it held the very prefill that
has the room, both would wait for as long as plans are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sola_sched.core.state import PREFILL, IntArray, RequestTable, StepPlan, StepState
from sola_sched.vllm_adapter.versions import Rooms, Seams

#: Plans until it is tried again whether vLLM gives such a prefill tokens.
RETRY_PLANS = 8


class _Entry(NamedTuple):
    """One that is put off: until which plan, whether it waits, and what room there was."""

    until: int
    is_waiting: bool
    rooms: Rooms

    def has_ended(self, num_plans: int, rooms: Rooms) -> bool:
        # One that runs has a slot, and vLLM frees memory for it by itself.
        grown = [now > then for now, then in zip(rooms, self.rooms, strict=True)]
        return num_plans >= self.until or any(grown if self.is_waiting else grown[:1])


class PutOff:
    """Remembers which prefills with images got no tokens although their step had some left.

    Args:
        seams: Of vLLM's scheduler.
        requests: Its requests by name.
    """

    def __init__(self, seams: Seams, requests: Mapping[str, Any]) -> None:
        self._seams, self._requests = seams, requests
        self._num_plans = 0
        self._entries: dict[str, _Entry] = {}

    def with_held(self, state: StepState, plan: StepPlan) -> StepPlan:
        """The plan in which running prefills are not held for the sake of one that is put off.

        They come last of those that run, and before all that wait, since vLLM serves `running`
        first. So they must be of no lower rank than the one put off and those that the plan starts,
        unless they have an image and it is room for one that is short.
        """
        self._num_plans += 1
        if not self._entries:
            return plan
        rooms = self._seams.rooms()
        for name, entry in list(self._entries.items()):
            if entry.has_ended(self._num_plans, rooms):
                del self._entries[name]
        if plan.run is None:
            return plan
        waiting = state.waiting if plan.admit is None else plan.admit
        chosen = np.concatenate([plan.run, waiting])
        put_off = self._rows_among(chosen, state)
        if not len(put_off):
            return plan
        running = state.running
        is_held = (state.table.phase[running] == PREFILL) & ~np.isin(running, plan.run)
        held = running[is_held & ~np.isin(running, plan.preempt)]
        best = state.rank_of(np.concatenate([put_off, waiting])).min()
        may_run = state.rank_of(held) <= best
        if not may_run.all() and self._lacks_room(put_off, state, rooms):
            may_run |= [bool(self._request(row, state).mm_features) for row in held.tolist()]
        held = held[may_run]
        num_tokens = state.max_num_tokens if plan.token_budget is None else plan.token_budget
        num_blocks = -(-num_tokens // state.block_size) + len(plan.run) + len(held)
        if not len(held) or num_blocks > state.num_free_blocks:
            return plan
        return dataclasses.replace(plan, run=np.concatenate([plan.run, held]))

    def _rows_among(self, rows: IntArray, state: StepState) -> IntArray:
        row_of = state.table.row_of
        put_off = np.array([row_of[n] for n in self._entries if n in row_of], dtype=np.int64)
        among: IntArray = put_off[np.isin(put_off, rows)]
        return among

    def _lacks_room(self, rows: IntArray, state: StepState, rooms: Rooms) -> bool:
        """Whether the next image of one of `rows` does not fit into the encoder cache."""
        requests = (self._request(row, state) for row in rows.tolist())
        lengths = (self._seams.next_image_length(request) for request in requests)
        return any(length > rooms.num_embeddings for length in lengths)

    def _request(self, row: int, state: StepState) -> Any:
        return self._requests[state.table.req_id[row] or ""]

    def scheduled(
        self,
        table: RequestTable,
        plan: StepPlan,
        output: Any,
        *,
        num_left: int,
        offered: Sequence[Any],
    ) -> None:
        """vLLM has scheduled a step in which requests were held.

        Args:
            table: As it was before the step.
            plan: What was carried out.
            output: vLLM's.
            num_left: Tokens that the step had left.
            offered: Waiting requests that vLLM was shown, in order.
        """
        if num_left <= 0 or plan.run is None or getattr(output, "preempted_req_ids", None):
            return
        there = output.num_scheduled_tokens
        until = self._num_plans + RETRY_PLANS
        for row in plan.run[table.phase[plan.run] == PREFILL].tolist():
            name = table.req_id[row]
            if name and name not in there and self._has_images(name):
                self._entries[name] = _Entry(until, False, self._seams.rooms())
        # vLLM ends its scan at the first that it cannot start.
        first = next((request for request in offered if request.request_id not in there), None)
        if first is not None and self._has_images(first.request_id):
            rooms = self._seams.rooms()
            is_short = self._seams.num_blocks_of(first) > rooms.num_blocks or rooms.num_slots <= 0
            if not is_short:
                self._entries[first.request_id] = _Entry(until, True, rooms)

    def _has_images(self, name: str) -> bool:
        request = self._requests.get(name)
        return request is not None and bool(request.mm_features)
