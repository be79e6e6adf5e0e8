"""A KV connector between engines, as for prefill and decode apart, and its workers in virtual time.

A request with ``do_remote_prefill`` awaits the KV of its prompt, and the blocks of one with
``do_remote_decode`` are held after its end until the other engine has them.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from sola_sched.simulator import StepTrace, VirtualEngine

#: Steps that a transfer takes.
DELAY_STEPS = 5


class RemoteKV(KVConnectorBase_V1, SupportsHMA):
    """Scheduler half.

    Attributes:
        loading, sending: Steps until the transfer of a request ends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loading: dict[str, int] = {}
        self.sending: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loading[request.request_id] = DELAY_STEPS
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self.sending[request.request_id] = DELAY_STEPS
        return True, {"do_remote_prefill": True}

    def has_pending_push_work(self) -> bool:
        return bool(self.sending)

    def poll(self) -> KVConnectorOutput | None:
        """One step further: what the workers would tell."""
        ended = []
        for transfers in (self.loading, self.sending):
            for req_id in transfers:
                transfers[req_id] -= 1
            ended.append({req_id for req_id, left in transfers.items() if left <= 0})
            for req_id in ended[-1]:
                del transfers[req_id]
        loaded, sent = ended
        if not loaded and not sent:
            return None
        return KVConnectorOutput(finished_recving=loaded or None, finished_sending=sent or None)

    # The worker half does nothing.
    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class RemoteEngine(VirtualEngine):
    """A virtual engine whose scheduler has a `RemoteKV`."""

    def _sample(self, trace: StepTrace) -> Any:
        trace.copies = self.scheduler.connector.poll()
        return super()._sample(trace)
