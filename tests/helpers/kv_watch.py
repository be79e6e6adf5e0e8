"""Compares a request's KV before a preemption with what the host gives back; import vLLM first.

For models whose tokens cannot tell, and for caches in the plain order of tokens.
"""

from __future__ import annotations

from typing import Any

import torch


class KVWatch:
    """Watches an engine core of this process, scheduled synchronously.

    Attributes:
        num_compared: Tokens that came back from the host.
        largest: Largest difference of a restored number, over the range of its channel.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._saved: dict[str, list[torch.Tensor]] = {}
        self.num_compared = 0
        self.largest = 0.0
        scheduler = core.scheduler
        preempt, execute = scheduler._preempt_request, core.model_executor.execute_model

        def preempted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._saved[request.request_id] = self._kv(request)
            return preempt(request, *args, **kwargs)

        def executed(output: Any, *args: Any, **kwargs: Any) -> Any:
            for name in set(output.num_scheduled_tokens) & set(self._saved):
                self._compare(scheduler.requests[name], output.num_scheduled_tokens[name])
            return execute(output, *args, **kwargs)

        scheduler._preempt_request, core.model_executor.execute_model = preempted, executed

    def _kv(self, request: Any) -> list[torch.Tensor]:
        """The computed tokens of each layer, `[tokens, ...]`."""
        scheduler = self._core.scheduler
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        runner = self._core.model_executor.driver_worker.worker.model_runner
        return [
            cache[blocks].movedim(2, 1).flatten(0, 1)[: request.num_computed_tokens].clone()
            for cache in runner.kv_caches
        ]

    def _compare(self, request: Any, num_scheduled: int) -> None:
        before = self._saved.pop(request.request_id)
        num_restored = min(request.num_computed_tokens - num_scheduled, len(before[0]))
        self.num_compared += num_restored
        for old, new in zip(before, self._kv(request), strict=True):
            old, new = old[:num_restored], new[:num_restored]
            if num_restored:
                spread = (old.amax(0) - old.amin(0)).clamp_min(1e-6)
                self.largest = max(self.largest, float(((new - old).abs() / spread).max()))
