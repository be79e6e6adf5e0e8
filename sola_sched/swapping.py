"""Swapping as the scheduler sees it: what a preempted request takes along, and what it must not.

A mix-in around the same vLLM methods as the scheduler's own, so that the scheduler reads without
it. It works without the connector, and then does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from sola_sched.swap_config import CONNECTOR

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from sola_sched.kv_swap.connector import SolaKVSwapConnector
    from sola_sched.kv_swap.manager import SwapManager

    _Host: type[Any] = AsyncScheduler
else:
    _Host = object


class SwapMixin(_Host):
    """Saves requests to the host when they are preempted.

    Attributes:
        sola_swap: The connector's scheduler half, None where nothing is swapped.
        sola_copies: Its host copies.
    """

    sola_swap: SolaKVSwapConnector | None = None
    sola_copies: SwapManager

    def _start_swapping(self) -> None:
        """Take hold of the connector; call once, after vLLM's constructor."""
        connector: Any = getattr(self, "connector", None)
        if type(connector).__name__ != CONNECTOR or connector.manager is None:
            return
        self.sola_swap, self.sola_copies = connector, connector.manager
        #: Requests on the accelerator whose KV went through INT8.
        self._inexact: set[str] = set()
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

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        if self.sola_swap is not None:
            self._inexact.discard(request.request_id)
            if drop_stale_output:  # a reset: what was computed is no longer wanted
                self.sola_copies.drop(request.request_id)
            else:
                self.sola_swap.save(request, request.num_computed_tokens, frees_blocks=True)
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

    def _swap_stats(self) -> dict[str, Any]:
        if self.sola_swap is None:
            return {}
        manager = self.sola_copies
        counts = manager.counts
        return {
            "swap": {
                "mode": "int8" if self.sola_swap.is_int8 else "raw",
                "num_host_slots": manager.num_slots,
                "num_free_host_slots": manager.num_free_slots,
                **{name: getattr(counts, name) for name in counts.__slots__},
            }
        }
