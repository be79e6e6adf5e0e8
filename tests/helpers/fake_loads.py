"""An asynchronous KV connector that moves nothing, and a scheduler around it in virtual time."""

from __future__ import annotations

import zlib
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

import sola_sched

#: Steps that a load takes.
NUM_STEPS = 3


class FakeLoads(KVConnectorBase_V1):
    """Loads the prompts of requests named ``load...``, all of them or, for some, three quarters.

    Attributes:
        under_way: Steps until each load ends, by request.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.under_way: dict[str, int] = {}
        self._known: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        name = request.request_id
        if not name.startswith("load") or name in self._known:
            return 0, False
        is_whole = zlib.crc32(name.encode()) % 2
        num_tokens = request.num_tokens if is_whole else request.num_tokens * 3 // 4
        return max(0, num_tokens - num_computed_tokens), num_tokens > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        if num_external and request.request_id not in self._known:
            self._known.add(request.request_id)
            self.under_way[request.request_id] = NUM_STEPS

    def ended(self) -> set[str]:
        """Loads that end with this step."""
        for name in self.under_way:
            self.under_way[name] -= 1
        ended = {name for name, left in self.under_way.items() if left <= 0}
        for name in ended:
            del self.under_way[name]
        return ended

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class Loading:
    """Of a scheduler: it has the connector."""

    def __init__(self, *, vllm_config: Any, **kwargs: Any) -> None:
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="FakeLoads", kv_connector_module_path=__name__, kv_role="kv_consumer"
        )
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True
        super().__init__(vllm_config=vllm_config, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        model_runner_output.kv_connector_output = KVConnectorOutput(
            finished_recving=self.connector.ended() or None
        )
        return super().update_from_output(scheduler_output, model_runner_output)


class LoadingScheduler(Loading, sola_sched.Scheduler):
    """Notes which loaded requests did not resume in the first step after their load.

    Attributes:
        num_resumed: Those that did.
        late: The others, where a slot was free.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_resumed, self.late = 0, []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        loaded = set(self.finished_recving_kv_req_ids)
        free_slots = self._seams.num_slots - len(self.running)
        output = super().schedule(*args, **kwargs)
        late = loaded - set(output.num_scheduled_tokens)
        self.num_resumed += len(loaded) - len(late)
        if len(loaded) <= free_slots:
            self.late += sorted(late)
        return output
