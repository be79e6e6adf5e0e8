"""Swapping as the scheduler sees it: what a preempted request takes along, and what it must not.

A mix-in around the same vLLM methods as the scheduler's own, so that the scheduler reads without
it. It works without the connector, and then does nothing.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from sola_sched.config.swap import CONNECTOR
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import WAITING, StepPlan, StepState
from sola_sched.vllm_adapter.guard import Guard
from sola_sched.vllm_adapter.names import lacking

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from sola_sched.kv_swap.connector import SolaKVSwapConnector
    from sola_sched.kv_swap.jobs import Report
    from sola_sched.kv_swap.manager import SwapManager

    _Host: type[Any] = AsyncScheduler
else:
    _Host = object

logger = init_logger("vllm.sola_sched")

#: Copies of running requests under way at once: more would only fill the link.
_MAX_AHEAD = 4
#: Requests that hold KV without a slot, at most.
_MAX_RESIDENTS = 8
#: How requests wait that may hold KV and need no more input.
_RESUMES = (
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.PREEMPTED,
    RequestStatus.WAITING,
)


class SwapMixin(_Host):
    """Takes requests to the host when they are preempted, or before.

    Attributes:
        sola_swap: The connector's scheduler half, None where nothing is swapped.
    """

    sola_swap: SolaKVSwapConnector | None = None
    sola_guard: Guard
    sola_monitor: StateMonitor

    def _start_swapping(self) -> None:
        """Take hold of the connector; call once, after vLLM's constructor."""
        connector: Any = getattr(self, "connector", None)
        if type(connector).__name__ != CONNECTOR or connector.manager is None:
            return
        missing = lacking(self, swapping=True)
        if missing:
            connector.manager = None
            logger.warning(
                "sola_sched: KV is not swapped, preempted requests are computed again: this vLLM "
                "has no %s",
                ", ".join(missing),
            )
            return
        from sola_sched.kv_swap.policy import Link

        self.sola_swap = connector
        self._link = Link()
        #: Whether a waiting request's copy is to be loaded, as the plan of this step assumes.
        self._will_load: dict[str, bool] = {}
        #: Requests whose KV was loaded, or is being loaded, before they had a slot.
        self._residents: set[str] = set()
        #: Requests on the accelerator whose KV went through INT8.
        self._inexact: set[str] = set()
        connector.accept = self._accepts
        connector.on_report = self._observe_copies
        connector.on_failure = self._lost_copies
        self.sola_copies.evictable = self._evictable
        if connector.is_int8:
            self._keep_inexact_blocks_out_of_the_prefix_cache()

    @property
    def sola_copies(self) -> SwapManager:
        """The host copies; others after a failure. Only where something is swapped."""
        assert self.sola_swap is not None
        assert self.sola_swap.manager is not None
        return self.sola_swap.manager

    def _keep_inexact_blocks_out_of_the_prefix_cache(self) -> None:
        """Publish no block of a request that was restored from INT8.

        That holds for the restored blocks and for all later ones: they were computed from those.
        Everything that is published passes through this one method of vLLM's.
        """
        coordinator = self.kv_cache_manager.coordinator
        publish = coordinator.cache_blocks

        def publish_if_exact(request: Request, num_computed_tokens: int) -> None:
            if request.request_id not in self._inexact:
                publish(request, num_computed_tokens)

        coordinator.cache_blocks = publish_if_exact

    # Keep, swap or compute again ------------------------------------------------------------

    def _accepts(self, req_id: str, num_before: int, num_tokens: int) -> bool:
        """vLLM's question whether to load a copy; where we cannot tell, it is used."""
        try:
            return self._is_worth_loading(req_id, num_before, num_tokens)
        except Exception as error:
            self.sola_guard.failed("weighing a copy", error)
            return True

    def _is_worth_loading(self, req_id: str, num_before: int, num_tokens: int) -> bool:
        if self.sola_swap is None or self.sola_swap.options.always:
            return True
        decided = self._will_load.get(req_id)
        if decided is not None:
            return decided
        return self._link.is_worth_loading(
            self.sola_monitor.cost, num_tokens, num_before, len(self.running)
        )

    def _observe_copies(self, report: Report, num_loaded: int) -> None:
        try:
            self._link.observe(report, num_loaded)
        except Exception as error:
            self.sola_guard.failed("learning from a copy", error)

    def _evictable(self) -> list[str]:
        """Copies of running requests, the one that is preempted last first."""
        return [request.request_id for request in self.running]

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        if self.sola_swap is not None:
            self._inexact.discard(request.request_id)
            try:
                self._save_leaving(request, drop_stale_output)
            except Exception as error:  # what was copied of it is not trusted
                self.sola_guard.failed("saving a preempted request", error)
                self.sola_swap.drop(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _save_leaving(self, request: Request, is_reset: bool) -> None:
        """Copy a request that is about to lose its blocks, where the copy is of use."""
        assert self.sola_swap is not None
        req_id, num_tokens = request.request_id, request.num_computed_tokens
        if is_reset:  # what was computed is no longer wanted
            self.sola_swap.drop(req_id)
        elif self._is_worth_loading(req_id, 0, num_tokens):
            self.sola_swap.save(request, num_tokens, frees_blocks=True)
        else:
            self.sola_copies.counts.num_not_worth += num_tokens

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        is_int8 = self.sola_swap is not None and self.sola_swap.is_int8
        if is_int8 and request.request_id not in self.failed_recving_kv_req_ids:
            self._inexact.add(request.request_id)
        super()._update_waiting_for_remote_kv(request)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        before = list(session.all_token_ids) if self.sola_swap is not None else []
        super()._update_request_as_session(session, update)
        if self.sola_swap is None:
            return
        try:
            self._cut_copy(self.sola_swap, session, before)
        except Exception as error:
            self.sola_guard.failed("cutting the copy of a session", error)
            self.sola_swap.drop(session.request_id)

    def _cut_copy(self, swap: SolaKVSwapConnector, session: Request, before: list[int]) -> None:
        """Of the last answer of a session, not all tokens are kept."""
        pairs = zip(before, session.all_token_ids, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        swap.cut(session.request_id, kept)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.sola_swap is not None:
            self._inexact.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        being_written: dict[str, list[Any]] = {}
        try:
            if self.sola_swap is not None:  # the weights may have changed
                self._settle_unsent_loads(self.sola_swap)
                self._take_back_loads(self.sola_swap, reset_running_requests, being_written)
                self._forget_expected()
                self.sola_swap.reset_cache()
        except Exception as error:
            self.sola_guard.failed("taking back what is being loaded", error)
        try:
            return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
        finally:
            if self.sola_swap is not None:
                for req_id, blocks in being_written.items():
                    self.sola_swap.give_up_load(req_id, blocks)

    def _take_back_loads(
        self,
        swap: SolaKVSwapConnector,
        takes_running: bool,
        being_written: dict[str, list[Any]],
    ) -> None:
        """Free all blocks that wait for a load to end, or for the loaded request to run.

        vLLM resets its prefix cache only when every block is free, and takes blocks from running
        requests alone.

        Args:
            swap: The connector.
            takes_running: Otherwise only those of requests that have ended are freed.
            being_written: Gets, for each request, the blocks that a load goes on writing, before
                they are freed. Nobody may have them before its end.
        """
        for request in [*self.requests.values()]:
            req_id = request.request_id
            is_loading = swap.awaits_load(req_id)
            if request.is_finished():
                is_held = is_loading
            else:
                is_held = takes_running and request.status in _RESUMES and _holds_kv(request)
            if not is_held:
                continue
            if is_loading:
                groups = self.kv_cache_manager.get_blocks(req_id).blocks
                being_written[req_id] = [b for group in groups for b in group if not b.is_null]
            if request.is_finished():
                self._free_blocks(request)
            else:
                self._take_back(request)
        swap.lend_given_up(being_written)

    def _take_back(self, request: Request) -> None:
        """A request that waits with KV waits without; its host copy is kept."""
        req_id = request.request_id
        self._residents.discard(req_id)
        self._inexact.discard(req_id)
        self.finished_recving_kv_req_ids.discard(req_id)
        self.failed_recving_kv_req_ids.discard(req_id)
        self.kv_holding_waiting.remove_requests([request])
        self.deferred_waiting.discard(request)
        self._inflight_prefills.discard(request)
        self.kv_cache_manager.free(request)
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            has_run = bool(request.num_preemptions)
            request.status = RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING
        request.num_computed_tokens = 0
        self.waiting.prepend_request(request)

    # When a booking has failed ---------------------------------------------------------------

    def _lost_copies(self, doing: str, error: Exception) -> bool:
        """All copies are forgotten, since a booking failed; whether new ones may be made."""
        self._book("forgetting copies", self._forget_expected)
        return self.sola_guard.swapping_failed(doing, error)

    def _forget_expected(self) -> None:
        """What the planner expects of copies is not to be had."""
        table = self.sola_monitor.table
        rows = [table.row_of[name] for name in self._will_load if name in table.row_of]
        table.num_computed[[row for row in rows if table.phase[row] == WAITING]] = 0
        self._will_load.clear()

    def _settle_loads(self) -> None:
        """Call before each step: vLLM may wait for loads that were never sent."""
        if self.sola_swap is not None:
            try:
                self._settle_unsent_loads(self.sola_swap)
            except Exception as error:
                self.sola_guard.failed("ending loads that were not sent", error)

    def _settle_unsent_loads(self, swap: SolaKVSwapConnector) -> None:
        """As if they had failed: whoever waits for one is computed again."""
        for req_id in swap.take_unsent():
            request = self.requests.get(req_id)
            if request is None:
                continue
            if request.is_finished():  # its blocks wait for the end of the load
                self._free_blocks(request)
            elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(req_id)
                self.finished_recving_kv_req_ids.add(req_id)

    # Ahead of need --------------------------------------------------------------------------

    def _expect_loads(self, state: StepState) -> None:
        """Tell the planner what swapped requests need not compute. Call before planning."""
        if self.sola_swap is None:
            return
        state.reload_s_per_token = self._link.s_per_token
        table = self.sola_monitor.table
        before, self._will_load = self._will_load, {}
        for req_id in self.sola_copies.req_ids():
            request = self.requests[req_id]
            row = table.row_of[req_id]
            if table.phase[row] != WAITING:
                continue
            num_tokens = min(self.sola_copies.covered_tokens(req_id), request.num_tokens - 1)
            will_load = self._is_worth_loading(req_id, 0, num_tokens)
            if will_load:
                # One token is left to compute: vLLM admits nobody in a step without tokens for it.
                found = min(num_tokens, int(table.prefill_target[row]) - 1)
                table.num_computed[row] = max(found, table.num_computed[row])
            elif before.get(req_id, False):  # what was expected then is not to be had
                caches = self._seams.caches_prefixes
                found = self._seams.num_cached_tokens(request) if caches else 0
                table.num_computed[row] = found
            self._will_load[req_id] = will_load

    def _with_swaps(self, state: StepState, plan: StepPlan) -> StepPlan:
        """The plan with victims chosen in time; copies ahead are ordered. Call after planning."""
        if self.sola_swap is None:
            return plan
        if not self.sola_swap.options.ahead:
            return plan
        from sola_sched.kv_swap.policy import give_way, has_plenty, is_short, make_room

        if has_plenty(state):  # the usual case, and cheap to see
            self._drop_residents(False)
            self._load_ahead(state, plan)
            return plan if not len(state.waiting) else give_way(state, plan)
        self._drop_residents(is_short(state, plan))
        self._load_ahead(state, plan)
        num_leaving = self.sola_swap.num_pinned
        plan = make_room(state, plan, num_leaving)
        if not num_leaving:
            plan = give_way(state, plan)
        self._save_ahead(state, plan)
        return plan

    def _save_ahead(self, state: StepState, plan: StepPlan) -> None:
        """Copy full blocks of a request that would leave next, while it runs."""
        if self.sola_swap is None or self.sola_copies.num_saving_ahead >= _MAX_AHEAD:
            return
        from sola_sched.kv_swap.policy import outward

        unit = self.sola_copies.geometry.alignment
        for row in outward(state, plan).tolist():
            request = self.requests[state.table.req_id[row]]
            done = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            done -= done % unit
            if done <= self.sola_copies.covered_tokens(request.request_id):
                continue
            if self._is_worth_loading(request.request_id, 0, done):
                self.sola_swap.save(request, done, frees_blocks=False)
                return

    def _load_ahead(self, state: StepState, plan: StepPlan) -> None:
        """Load requests that wait for a slot, while there is room that nobody will take.

        With a free slot the plan decides: admission orders the load.
        """
        num_residents = len(self._residents)
        has_slot = len(self.running) < state.max_num_running
        if has_slot or num_residents >= _MAX_RESIDENTS or not self.sola_copies.num_copies:
            return
        from sola_sched.kv_swap.policy import inward, room_for_loads

        table, room = state.table, room_for_loads(state, plan)
        waiting = [
            table.row_of[req_id]
            for req_id in self.sola_copies.req_ids()
            if table.phase[table.row_of[req_id]] == WAITING
        ]
        for row in inward(state, np.array(waiting, dtype=np.int64)).tolist():
            request = self.requests[table.req_id[row]]
            room -= -(-request.num_tokens // self.block_size) + 1
            if room < 0 or len(self._residents) >= _MAX_RESIDENTS:
                break
            if self._seams.within_max_loras([request]) and self._start_load(request):
                self._residents.add(request.request_id)

    def _start_load(self, request: Request) -> bool:
        """What vLLM's loop over waiting requests does for an asynchronous load, without a slot."""
        is_stale = request.num_stale_output_tokens and not request.drop_stale_output
        if request.status != RequestStatus.PREEMPTED or request.num_computed_tokens or is_stale:
            return False
        if request.skip_reading_prefix_cache or self.prefix_replay_tokens:
            return False
        connector, manager = self.sola_swap, self.kv_cache_manager
        assert connector is not None
        blocks, num_local, boundary, _ = self._get_local_prefix_cache_hit(request)
        if num_local % self.block_size:
            return False
        num_loaded, _ = connector.get_num_new_matched_tokens(request, num_local)
        if not num_loaded:
            return False
        allocated = manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=num_local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=num_loaded,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
            reserved_blocks=self._inflight_prefill_reserved_blocks() + len(self.running),
            skip_zeroing_group_ids=connector.get_loaded_kv_cache_group_ids(request),
        )
        if allocated is None:
            return False
        request.shared_prefix_boundary = boundary
        connector.update_state_after_alloc(
            request, manager.get_blocks(request.request_id), num_loaded
        )
        self.waiting.remove_request(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = num_local + num_loaded
        self._inflight_prefills.add(request)
        self._enqueue_waiting_request(request)
        self.sola_copies.counts.num_loaded_ahead += num_loaded
        return True

    def _drop_residents(self, is_short: bool) -> None:
        """Take the blocks of requests loaded ahead, while memory is short: their copy is kept."""
        for req_id in list(self._residents):
            request = self.requests.get(req_id)
            if request is None or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._residents.discard(req_id)  # it runs, or has ended
            elif is_short and req_id in self.finished_recving_kv_req_ids:
                self._take_back(request)

    # Figures --------------------------------------------------------------------------------

    def _swapped_bytes(self) -> tuple[int, int]:
        """Bytes copied to the host and back since start."""
        if self.sola_swap is None:
            return 0, 0
        return self.sola_copies.counts.saved_bytes, self.sola_copies.counts.loaded_bytes

    def _swap_stats(self) -> dict[str, Any]:
        if self.sola_swap is None:
            return {}
        manager, cost = self.sola_copies, self.sola_monitor.cost
        counts, per_token = manager.counts, self._link.s_per_token
        is_known = per_token is not None and cost.is_ready
        return {
            "swap": {
                "mode": "int8" if self.sola_swap.is_int8 else "raw",
                "has_ended": self.sola_swap.has_ended,
                "num_host_slots": manager.num_slots,
                "num_free_host_slots": manager.num_free_slots,
                "load_tokens_per_s": 1.0 / per_token if per_token else 0.0,
                "crossover_tokens": self._link.crossover_tokens(cost, len(self.running))
                if is_known
                else None,
                **{name: getattr(counts, name) for name in counts.__slots__},
            }
        }


def _holds_kv(request: Request) -> bool:
    """Whether one that waits has blocks; a load that failed has taken its computed tokens."""
    is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return is_loading or request.num_computed_tokens > 0
