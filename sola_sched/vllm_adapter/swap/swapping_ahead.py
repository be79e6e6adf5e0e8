"""Copies ahead of need: out while a request still runs, back before it has a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.request import Request, RequestStatus

from sola_sched.core.state import WAITING, StepPlan, StepState
from sola_sched.vllm_adapter.steps.adapter_slots import AdapterSlots
from sola_sched.vllm_adapter.versions import Seams

if TYPE_CHECKING:
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin
    from sola_sched.vllm_adapter.swap.swapping import Swapping

#: Copies of running requests under way at once: more would only fill the link.
_MAX_AHEAD = 4
#: Requests that hold KV without a slot, at most.
_MAX_RESIDENTS = 8


class SwappingAhead:
    """Orders copies after each plan, as far as there is room.

    Args:
        scheduler: Whose requests they are.
        seams: Of the same scheduler.
        swapping: Has the copies, and knows what they are worth.

    Attributes:
        residents: Requests whose KV was loaded, or is being loaded, before they had a slot.
    """

    def __init__(self, scheduler: SolaSchedulerMixin, seams: Seams, swapping: Swapping) -> None:
        self._scheduler, self._swapping = scheduler, swapping
        self._adapters = AdapterSlots(scheduler, seams)
        self.residents: set[str] = set()

    def order(self, state: StepState, plan: StepPlan, *, is_followed: bool = True) -> StepPlan:
        """The plan with victims chosen in time; copies ahead are ordered if it is followed.

        If it is not, whoever was loaded ahead waits without KV again: vLLM would start it before
        all others.
        """
        from sola_sched.kv_swap.policy import give_way, has_plenty, is_short, make_room

        is_scarce = not has_plenty(state)  # seldom, and cheap to see
        self._drop_residents(state, not is_followed or (is_scarce and is_short(state, plan)))
        if is_followed:
            self._load_ahead(state, plan)
        if is_scarce:
            plan = make_room(state, plan)
        if is_scarce or len(state.waiting):
            plan = give_way(state, plan)
        if is_scarce and is_followed:
            self._save_ahead(state, plan)
        return plan

    def _save_ahead(self, state: StepState, plan: StepPlan) -> None:
        """Copy full blocks of a request that would leave next, while it runs."""
        copies = self._swapping.copies
        if copies.num_saving_ahead >= _MAX_AHEAD:
            return
        from sola_sched.kv_swap.policy import outward

        unit = copies.geometry.alignment
        for row in outward(state, plan).tolist():
            request = self._scheduler.requests[state.table.req_id[row]]
            done = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            done -= done % unit
            is_done = done <= copies.covered_tokens(request.request_id)
            if is_done or request.skip_reading_prefix_cache:  # vLLM would load nothing
                continue
            if self._swapping.is_worth_loading(request.request_id, 0, done):
                self._swapping.connector.save(request, done, frees_blocks=False)
                return

    def _load_ahead(self, state: StepState, plan: StepPlan) -> None:
        """Load requests that wait for a slot, while there is room that nobody will take.

        With a free slot the plan decides: admission orders the load. Nobody is loaded ahead past a
        waiting request of a higher priority: vLLM gives the next slot to who holds KV.
        """
        scheduler, copies = self._scheduler, self._swapping.copies
        has_slot = len(scheduler.running) < state.max_num_running
        if has_slot or len(self.residents) >= _MAX_RESIDENTS or not copies.num_copies:
            return
        from sola_sched.kv_swap.policy import inward, room_for_loads

        table, room = state.table, room_for_loads(state, plan)
        waiting = [
            table.row_of[req_id]
            for req_id in copies.req_ids()
            if table.phase[table.row_of[req_id]] == WAITING
        ]
        if state.has_classes and waiting:
            highest = table.priority[state.waiting].min()
            waiting = [row for row in waiting if table.priority[row] == highest]
        for row in inward(state, np.array(waiting, dtype=np.int64)).tolist():
            request = scheduler.requests[table.req_id[row]]
            room -= -(-request.num_tokens // scheduler.block_size) + 1
            if room < 0 or len(self.residents) >= _MAX_RESIDENTS:
                break
            if self._adapters.within([request]) and self._start_load(request):
                self.residents.add(request.request_id)

    def _start_load(self, request: Request) -> bool:
        """What vLLM's loop over waiting requests does for an asynchronous load, without a slot."""
        scheduler = self._scheduler
        is_stale = request.num_stale_output_tokens and not request.drop_stale_output
        if request.status != RequestStatus.PREEMPTED or request.num_computed_tokens or is_stale:
            return False
        if request.skip_reading_prefix_cache or scheduler.prefix_replay_tokens:
            return False
        connector, manager = self._swapping.connector, scheduler.kv_cache_manager
        blocks, num_local, boundary, _ = scheduler._get_local_prefix_cache_hit(request)
        if num_local % scheduler.block_size:
            return False
        num_loaded, _ = connector.get_num_new_matched_tokens(request, num_local)
        if not num_loaded:
            return False
        reserved = scheduler._inflight_prefill_reserved_blocks() + len(scheduler.running)
        allocated = manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=num_local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=num_loaded,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
            reserved_blocks=reserved,
            skip_zeroing_group_ids=connector.get_loaded_kv_cache_group_ids(request),
        )
        if allocated is None:
            return False
        request.shared_prefix_boundary = boundary
        connector.update_state_after_alloc(
            request, manager.get_blocks(request.request_id), num_loaded
        )
        scheduler.waiting.remove_request(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = num_local + num_loaded
        scheduler._inflight_prefills.add(request)
        scheduler._enqueue_waiting_request(request)
        self._swapping.copies.counts.num_loaded_ahead += num_loaded
        return True

    def _drop_residents(self, state: StepState, is_short: bool) -> None:
        """Take the blocks of requests loaded ahead: their copy is kept.

        Of all while memory is short, else of those of a lower priority than somebody who waits.
        """
        scheduler, priority = self._scheduler, state.table.priority
        highest = None
        if state.has_classes and len(state.waiting):
            highest = priority[state.waiting].min()
        for req_id in list(self.residents):
            request = scheduler.requests.get(req_id)
            if request is None or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.residents.discard(req_id)  # it runs, or has ended
            elif req_id in scheduler.finished_recving_kv_req_ids:
                is_lower = highest is not None and priority[state.table.row_of[req_id]] > highest
                if is_short or is_lower:
                    self._swapping.take_back(request)
