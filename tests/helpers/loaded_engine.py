"""A virtual engine with more requests than it sustains, so that they are held, put off and lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from remote_kv import RemoteEngine
from virtual_model import TINY_MODEL
from vllm.config import KVTransferConfig

import sola_sched
from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest

STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)
BLOCK_SIZE, NUM_BLOCKS = 16, 2001
#: Past what the engine sustains, so that requests are held, put off and lost.
SOLA = {"sola_sched": {"ttft_s": 0.3, "tpot_s": 0.02}}
NO_TARGETS = {"sola_sched": {"ttft_s": None, "tpot_s": None}}
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def with_policy(policy: str, **targets: Any) -> dict[str, Any]:
    """`SOLA` under another policy, and with these options changed."""
    return {"sola_sched": {**SOLA["sola_sched"], **targets, "policy": policy}}


def make_engine(
    scheduler_cls: type[Any],
    engine_cls: type[VirtualEngine] = VirtualEngine,
    sola: dict[str, Any] = SOLA,
    **options: Any,
) -> VirtualEngine:
    defaults: dict[str, Any] = {
        "model": TINY_MODEL,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "step_time": STEP_TIME,
        "additional_config": sola if issubclass(scheduler_cls, sola_sched.Scheduler) else {},
    }
    return engine_cls(scheduler_cls, **(defaults | options))


def make_workload(count: int = 120, rate_per_s: float = 25.0) -> list[VirtualRequest]:
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        VirtualRequest(
            f"r{i}",
            arrival_s=float(arrivals[i]),
            prompt_len=int(rng.integers(100, 800)),
            output_len=int(rng.integers(2, 80)),
        )
        for i in range(count)
    ]


def changed(
    scheduler_cls: type[Any], change: Callable[[dict[str, Any]], None], built: Any = None
) -> type[Any]:
    """The class with other arguments for its constructor, and something done after it."""

    class Changed(scheduler_cls):
        def __init__(self, **arguments: Any) -> None:
            config = arguments["vllm_config"] = copy.copy(arguments["vllm_config"])
            for part in ("parallel_config", "cache_config", "scheduler_config"):
                setattr(config, part, copy.copy(getattr(config, part)))
            change(arguments)
            super().__init__(**arguments)
            if built is not None:
                built(self)

    return Changed


def with_remote_kv(scheduler_cls: type[Any], **options: Any) -> VirtualEngine:
    """An engine of `make_engine` that gets and gives KV; see `remote_kv`."""

    def change(arguments: dict[str, Any]) -> None:
        arguments["vllm_config"].kv_transfer_config = KVTransferConfig(
            kv_connector="RemoteKV", kv_connector_module_path="remote_kv", kv_role="kv_both"
        )

    return make_engine(changed(scheduler_cls, change), RemoteEngine, **options)
