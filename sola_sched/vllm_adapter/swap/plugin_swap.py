"""Turns KV swapping on with ``--scheduler-cls`` alone.

vLLM has no hook by which a scheduler could bring a KV connector: connectors are chosen by
``--kv-transfer-config``, before the scheduler's class is resolved. `EngineArgs` is where both are
known; it is extended to name our connector where the scheduler is ours and nothing speaks
against it. vLLM's CPU backend would reserve a core for it, which it does not need. Other engines
are left as they are.
"""

from __future__ import annotations

import logging
import os
from functools import wraps
from typing import Any

from sola_sched.config.doubts import doubts
from sola_sched.config.sola_config import SolaConfig
from sola_sched.config.swap import CONNECTOR, NUM_ENGINES
from sola_sched.front_end.options import read_options
from sola_sched.front_end.scheduler_class import is_ours
from sola_sched.vllm_adapter import first_start
from sola_sched.vllm_adapter.names import lacking
from sola_sched.vllm_adapter.support import refuse_others

_MARK = "_sola_sched_swaps"
_RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
_LOGGER = "vllm.sola_sched"
#: The value of that variable which this process has set itself.
_own_reserve: str | None = None


def register_swap() -> None:
    """Register the connector and extend `EngineArgs`, once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "sola_sched.kv_swap.connector", CONNECTOR)
    original = EngineArgs.create_model_config
    if getattr(original, _MARK, False):
        return

    @wraps(original)
    def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_steered = is_ours(self.scheduler_cls)
        # Before anything that takes long.
        if is_steered:
            config = read_options(self.additional_config)
            for doubt in doubts(config):
                logging.getLogger(_LOGGER).warning("sola_sched: %s", doubt)
            if config.policy == "attain":
                first_start.start()
        model_config = original(self, *args, **kwargs)
        if is_steered:
            refuse_others(model_config)
            _choose_connector(self, model_config)
        _reserve_cores(self)
        return model_config

    setattr(extended, _MARK, True)
    EngineArgs.create_model_config = extended


def missing_hooks() -> list[str]:
    """What the installed vLLM lacks for swapping; empty from 0.32 on."""
    return lacking(swapping=True)


def _choose_connector(args: Any, model_config: Any) -> None:
    """Set the engine's connector, or say why preempted requests are computed again."""
    if _connector_of(args) == CONNECTOR:  # the operator has named it
        _share_host(args)
        return
    reason = _reason_against(args, model_config)
    if reason is None:
        from vllm.config import KVTransferConfig

        # The role of a producer: loads are ordered behind the steps in flight, so vLLM need not
        # hold freed blocks back for them, and multimodal inputs are checked as without us.
        args.kv_transfer_config = KVTransferConfig(
            kv_connector=CONNECTOR, kv_role="kv_producer", kv_load_failure_policy="recompute"
        )
        _share_host(args)
    elif reason:
        from vllm.logger import init_logger

        init_logger(_LOGGER).info_once(
            "sola_sched: KV is not swapped, preempted requests are computed again: %s", reason
        )


def _share_host(args: Any) -> None:
    """Tell the connector how many engines share its host, where it will not hear it from vLLM."""
    name, transfer = "kv_connector_extra_config", args.kv_transfer_config
    num_engines = {NUM_ENGINES: _num_engines(args)}
    if isinstance(transfer, dict):
        transfer[name] = (transfer.get(name) or {}) | num_engines
    else:
        setattr(transfer, name, (getattr(transfer, name, None) or {}) | num_engines)


def _num_engines(args: Any) -> int:
    """Engines of this server on one host; vLLM has those of a model without experts forget it."""
    is_alone = getattr(args, "data_parallel_rank", None) is not None
    if is_alone or getattr(args, "data_parallel_external_lb", False):
        return 1
    num_local: int | None = getattr(args, "data_parallel_size_local", None)
    num_all: int = getattr(args, "data_parallel_size", 1)
    return max(1, num_local or num_all)


def _reserve_cores(args: Any) -> None:
    """Have vLLM's CPU backend reserve as many cores as without our connector.

    With any connector it reserves one more for each worker. Ours needs none: that core would be
    taken from the model or, where no other is left, the threads of the model would spin against
    the engine. A value that the operator has set stands.
    """
    global _own_reserve
    if _own_reserve is not None and os.environ.get(_RESERVED) == _own_reserve:
        del os.environ[_RESERVED]  # of an engine before in this process
    _own_reserve = None
    from vllm.platforms import CpuArchEnum, current_platform

    is_bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") == "auto"
    if not current_platform.is_cpu() or not is_bound or _connector_of(args) != CONNECTOR:
        return
    from vllm.logger import init_logger

    logger = init_logger(_LOGGER)
    if _RESERVED in os.environ:
        logger.info_once(
            "sola_sched: %s is %s; KV swapping needs no core of its own",
            _RESERVED,
            os.environ[_RESERVED],
        )
        return
    num_workers = args.tensor_parallel_size * args.pipeline_parallel_size
    num_local = max(1, num_workers // getattr(args, "nnodes", 1))
    one_each = (CpuArchEnum.X86, CpuArchEnum.ARM, CpuArchEnum.RISCV)
    num_reserved = num_local if current_platform.get_cpu_architecture() in one_each else 1
    _own_reserve = os.environ[_RESERVED] = str(num_reserved)
    logger.info_once(
        "sola_sched: KV swapping needs no core of its own, so %d reserved as without it (%s); the "
        "minimum that vLLM warns of counts one more for each worker",
        num_reserved,
        _RESERVED,
    )


def _connector_of(args: Any) -> str | None:
    """Name of the connector that the engine is to have."""
    transfer = args.kv_transfer_config
    name = transfer.get("kv_connector") if isinstance(transfer, dict) else None
    return name or getattr(transfer, "kv_connector", None)


def _reason_against(args: Any, model_config: Any) -> str | None:
    """Why not; None if nothing speaks against it, empty if there is nothing to say."""
    config = SolaConfig.from_additional(args.additional_config)
    swap = config.swap
    if args.kv_transfer_config is not None:
        name = _connector_of(args)
        return "" if name == CONNECTOR else f"--kv-transfer-config selects {name}"
    if not config.steer:
        return "'steer' is false"
    if swap.mode == "off":
        return ""
    if model_config.runner_type == "pooling":
        return ""
    from vllm.platforms import current_platform

    if swap.mode == "auto" and not current_platform.is_cpu():
        return (
            "'swap.mode' is 'auto', which waits until swapping has been tested on "
            f"{current_platform.device_name}; set it to 'raw' or 'int8' to swap"
        )
    if getattr(args, "kv_offloading_size", None):
        return "--kv-offloading-size selects vLLM's own connector"
    missing = missing_hooks()
    if missing:
        return f"this vLLM has no {', '.join(missing)}; it takes vLLM 0.32 or later"
    for name, what in (
        ("is_encoder_decoder", "an encoder-decoder model"),
        ("is_attention_free", "a model without attention"),
        ("is_hybrid", "a model with Mamba layers"),
    ):
        if getattr(model_config, name, False):
            return f"{what} cannot be swapped"
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" in allocator and not getattr(
        model_config, "enable_cumem_allocator", False
    ):
        return "vLLM takes no KV connector with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if getattr(args, "use_replayssm", False):
        return "vLLM takes no KV connector with --use-replayssm"
    if getattr(getattr(args, "aux_output_config", None), "enabled", False):
        from sola_sched.kv_swap.support import KEEPS_OUTPUTS

        return KEEPS_OUTPUTS
    return None
