"""Swapping as the scheduler sees it: what a preempted request takes along, and what it must not.

A mix-in around the same vLLM methods as the scheduler's own, so that the scheduler reads without
it. It works without the connector, and then does nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from sola_sched.monitor import StateMonitor
from sola_sched.state import WAITING, StepPlan, StepState
from sola_sched.swap_config import CONNECTOR

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from sola_sched.kv_swap.connector import SolaKVSwapConnector
    from sola_sched.kv_swap.jobs import Report
    from sola_sched.kv_swap.manager import SwapManager

    _Host: type[Any] = AsyncScheduler
else:
    _Host = object

#: Copies of running requests under way at once: more would only fill the link.
_MAX_AHEAD = 4


class SwapMixin(_Host):
    """Takes requests to the host when they are preempted, or before.

    Attributes:
        sola_swap: The connector's scheduler half, None where nothing is swapped.
        sola_copies: Its host copies.
    """

    sola_swap: SolaKVSwapConnector | None = None
    sola_copies: SwapManager
    sola_monitor: StateMonitor

    def _start_swapping(self) -> None:
        """Take hold of the connector; call once, after vLLM's constructor."""
        connector: Any = getattr(self, "connector", None)
        if type(connector).__name__ != CONNECTOR or connector.manager is None:
            return
        from sola_sched.kv_swap.policy import Link

        self.sola_swap, self.sola_copies = connector, connector.manager
        self._link = Link()
        #: Whether a waiting request's copy is to be loaded, as the plan of this step assumes.
        self._will_load: dict[str, bool] = {}
        #: Requests on the accelerator whose KV went through INT8.
        self._inexact: set[str] = set()
        connector.accept = self._is_worth_loading
        connector.on_report = self._observe_copies
        self.sola_copies.evictable = self._evictable
        if connector.is_int8:
            self._keep_inexact_blocks_out_of_the_prefix_cache()

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
        self._link.observe(report, num_loaded)

    def _evictable(self) -> list[str]:
        """Copies of running requests, the one that is preempted last first."""
        return [request.request_id for request in self.running]

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        if self.sola_swap is not None:
            req_id, num_tokens = request.request_id, request.num_computed_tokens
            self._inexact.discard(req_id)
            if drop_stale_output:  # a reset: what was computed is no longer wanted
                self.sola_copies.drop(req_id)
            elif self._is_worth_loading(req_id, 0, num_tokens):
                self.sola_swap.save(request, num_tokens, frees_blocks=True)
            else:
                self.sola_copies.counts.num_not_worth += num_tokens
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        failed = request.request_id in self.failed_recving_kv_req_ids
        if self.sola_swap is not None and self.sola_swap.is_int8 and not failed:
            self._inexact.add(request.request_id)
        super()._update_waiting_for_remote_kv(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.sola_swap is not None:
            self._inexact.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        if self.sola_swap is not None:  # the weights may have changed
            self.sola_copies.drop_all()
        return super().reset_prefix_cache(*args, **kwargs)

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
                table.num_computed[row] = max(num_tokens, table.num_computed[row])
            elif before.get(req_id, False):  # what was expected then is not to be had
                caches = self._seams.caches_prefixes
                found = self._seams.num_cached_tokens(request) if caches else 0
                table.num_computed[row] = found
            self._will_load[req_id] = will_load

    def _with_swaps(self, state: StepState, plan: StepPlan) -> StepPlan:
        """The plan with victims chosen in time; copies ahead are ordered. Call after planning."""
        if self.sola_swap is None:
            return plan
        num_loaded = len(self.finished_recving_kv_req_ids)
        if num_loaded and plan.token_budget is not None:
            # They resume beside those that the plan counts.
            more = num_loaded * state.tokens_per_decode
            plan = replace(plan, token_budget=plan.token_budget + more)
        if not self.sola_swap.options.ahead:
            return plan
        from sola_sched.kv_swap.policy import give_way, make_room, outward

        num_leaving = self.sola_copies.num_pinned
        plan = make_room(state, plan, num_leaving)
        if not num_leaving and state.cost.is_ready:
            plan = give_way(state, plan)
        if self.sola_copies.num_saving_ahead < _MAX_AHEAD:
            unit = self.sola_copies.geometry.alignment
            for row in outward(state, plan).tolist():
                request = self.requests[state.table.req_id[row]]
                done = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
                done -= done % unit
                if done <= self.sola_copies.covered_tokens(request.request_id):
                    continue
                if not self._is_worth_loading(request.request_id, 0, done):
                    continue
                self.sola_swap.save(request, done, frees_blocks=False)
                break
        return plan

    # Figures --------------------------------------------------------------------------------

    def _swap_stats(self) -> dict[str, Any]:
        if self.sola_swap is None:
            return {}
        manager, cost = self.sola_copies, self.sola_monitor.cost
        counts, per_token = manager.counts, self._link.s_per_token
        is_known = per_token is not None and cost.is_ready
        return {
            "swap": {
                "mode": "int8" if self.sola_swap.is_int8 else "raw",
                "num_host_slots": manager.num_slots,
                "num_free_host_slots": manager.num_free_slots,
                "load_tokens_per_s": 1.0 / per_token if per_token else 0.0,
                "crossover_tokens": self._link.crossover_tokens(cost, len(self.running))
                if is_known
                else None,
                **{name: getattr(counts, name) for name in counts.__slots__},
            }
        }
