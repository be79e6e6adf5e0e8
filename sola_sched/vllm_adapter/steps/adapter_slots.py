"""LoRA adapters have slots (`--max-loras`): who has one, who is kept one, and who waits for one.

vLLM counts the adapters of the requests that it sees in a step. Held ones must count too: a later
step could need more adapters than there are slots for. And a plan that counted on requests whose
adapter waits for a slot would keep time, slots and memory for requests that vLLM then passes over,
and displace others for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from sola_sched.core.state import IntArray, StepPlan, StepState
from sola_sched.vllm_adapter.versions import IS_LOADED, WAITS_FOR_GRAMMAR, WAITS_FOR_INPUT, Seams

if TYPE_CHECKING:
    from vllm.v1.request import Request


class AdapterSlots:
    """Counts them, anew at each call.

    Args:
        scheduler: vLLM's.
        seams: Of the same scheduler.
    """

    def __init__(self, scheduler: Any, seams: Seams) -> None:
        self._scheduler = scheduler
        self._seams = seams

    def count(self) -> tuple[set[int], dict[Request, None]]:
        """The adapters that have a slot or are kept one, and who of those drained first has none.

        The latter, in order, must not start: vLLM by itself goes by those who run in the step, and
        would start them beside held ones. It takes a walk over all of these requests.

        Of those that vLLM drains first, who can start in the step goes before whose KV is being
        loaded. A session that waits for its client keeps no slot, since nobody knows for how long;
        nor does one that waits for its grammar and has no KV. When the grammar is there it is
        planned for (`Seams.merge_skipped`); it must not start before, should that be between the
        plan and vLLM's own look.
        """
        scheduler = self._scheduler
        adapters: set[int] = set()
        late: dict[Request, None] = {}
        if not getattr(scheduler, "lora_config", None):
            return adapters, late
        running = (request.lora_request for request in scheduler.running)
        adapters.update(lora.lora_int_id for lora in running if lora)
        loading: list[Request] = []
        compiling: list[Request] = []
        for request in self._seams.drained_first():
            status = request.status.name
            if not request.lora_request or status == WAITS_FOR_INPUT:
                continue
            if status == WAITS_FOR_GRAMMAR and not request.num_computed_tokens:
                compiling.append(request)
            elif self._is_being_loaded(request):
                loading.append(request)
            elif not self._gets_slot(request, adapters):
                late[request] = None
        for request in loading:
            self._gets_slot(request, adapters)
        for request in compiling:
            if request.lora_request.lora_int_id not in adapters:
                late[request] = None
        return adapters, late

    def within(self, requests: Iterable[Request], active: set[int] | None = None) -> list[Request]:
        """Those of `requests` whose adapters fit beside those that have a slot or are kept one.

        Args:
            requests: In order.
            active: The latter; those of `requests` are added. None: as they are now.
        """
        if not getattr(self._scheduler, "lora_config", None):
            return list(requests)
        adapters = self.count()[0] if active is None else active
        return [
            request
            for request in requests
            if not request.lora_request or self._gets_slot(request, adapters)
        ]

    def leave_out(self, state: StepState, active: set[int]) -> IntArray:
        """Take those who wait for a slot out of those that wait in `state`; their rows.

        Args:
            state: Of the step.
            active: Adapters that have a slot or are kept one.
        """
        scheduler, waiting, req_id = self._scheduler, state.waiting, state.table.req_id
        if not len(waiting):
            return waiting
        is_full = len(active) >= scheduler.lora_config.max_loras
        asking = (scheduler.requests[req_id[row]] for row in waiting.tolist())
        lacks = np.array(
            [
                is_full
                and bool(request.lora_request)
                and request.lora_request.lora_int_id not in active
                for request in asking
            ]
        )
        state.waiting = waiting[~lacks]
        rows: IntArray = waiting[lacks]
        return rows

    def _gets_slot(self, request: Request, adapters: set[int]) -> bool:
        """Whether its adapter is among `adapters`, or fits beside them; then it is added."""
        adapter = request.lora_request.lora_int_id
        if adapter not in adapters and len(adapters) >= self._scheduler.lora_config.max_loras:
            return False
        adapters.add(adapter)
        return True

    def _is_being_loaded(self, request: Request) -> bool:
        loaded = self._scheduler.finished_recving_kv_req_ids
        return request.status.name == IS_LOADED and request.request_id not in loaded


def with_late_rejected(state: StepState, plan: StepPlan, rows: IntArray) -> StepPlan:
    """The plan that also rejects those of `rows` whose first token is overdue."""
    table = state.table
    is_late = (table.due_s[rows] <= state.now_s) & (table.num_output[rows] == 0)
    return dataclasses.replace(plan, reject=np.concatenate([plan.reject, rows[is_late]]))
