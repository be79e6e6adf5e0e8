"""What types of vLLM our names have where no annotation tells: read by `vllm_types`."""

from __future__ import annotations

#: What a parameter or variable without a useful annotation is, by its name.
BY_NAME = {
    "request": "vllm.v1.request.Request",
    "r": "vllm.v1.request.Request",
    "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "live_scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm_config": "vllm.config.VllmConfig",
    "model_config": "vllm.config.ModelConfig",
    "params": "vllm.sampling_params.SamplingParams",
    "engine": "vllm.v1.engine.llm_engine.LLMEngine",
    "server": "vllm.v1.engine.async_llm.AsyncLLM",
    "processor": "vllm.v1.engine.input_processor.InputProcessor",
    "kv_cache_config": "vllm.v1.kv_cache_interface.KVCacheConfig",
    "group": "vllm.v1.kv_cache_interface.KVCacheGroupSpec",
    "spec": "vllm.v1.kv_cache_interface.AttentionSpec",
    "blocks": "vllm.v1.core.kv_cache_manager.KVCacheBlocks",
    "gpu_block_pool": "vllm.v1.core.block_pool.BlockPool",
    "connector_output": "vllm.v1.outputs.KVConnectorOutput",
    "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
    "output": "vllm.v1.core.sched.output.SchedulerOutput",
}
#: The same in one module, where a name means something else.
BY_NAME_IN: dict[str, dict[str, str | None]] = {
    "sola_sched.vllm_adapter.requests.booking": {"group": "vllm.v1.engine.EngineCoreOutputs"},
    "sola_sched.vllm_adapter.requests.rejecting": {"group": "vllm.v1.engine.EngineCoreOutputs"},
    "sola_sched.simulator.baselines.rules": {"group": "vllm.v1.engine.EngineCoreOutputs"},
    "sola_sched.simulator.engine": {
        "batch": "vllm.v1.engine.EngineCoreOutputs",
        "output": "vllm.v1.engine.EngineCoreOutput",
    },
    "sola_sched.vllm_adapter.swap.plugin_swap": {
        "args": "vllm.engine.arg_utils.EngineArgs",
        "self": "vllm.engine.arg_utils.EngineArgs",
    },
    "sola_sched.front_end.refusals": {
        "engine_args": "vllm.engine.arg_utils.EngineArgs",
        "config": "vllm.config.VllmConfig",
        "output": "vllm.outputs.RequestOutput",
        "answer": "vllm.outputs.CompletionOutput",
        "self": "vllm.v1.engine.async_llm.AsyncLLM",
    },
    "sola_sched.bench.backends.engine_replay": {
        "output": "vllm.outputs.RequestOutput",
        "completion": "vllm.outputs.CompletionOutput",
        "request": None,
    },
    "sola_sched.bench.backends.engine": {"scheduler": None, "request": None},
    "sola_sched.profile.measure": {"config": "vllm.config.VllmConfig"},
}
#: Attributes of ours that are declared as Any.
ATTRIBUTES = {
    ("SolaKVSwapConnector", "_block_pool"): "vllm.v1.core.block_pool.BlockPool",
    ("LLMEngine", "engine_core"): "vllm.v1.engine.core_client.InprocClient",
    ("EngineCore", "scheduler"): "vllm.v1.core.sched.scheduler.Scheduler",
    ("Scheduler", "skipped_waiting"): "vllm.v1.core.sched.request_queue.RequestQueue",
    ("VirtualEngine", "_scheduler"): "vllm.v1.core.sched.scheduler.Scheduler",
    ("VirtualEngine", "scheduler"): "vllm.v1.core.sched.scheduler.Scheduler",
}
#: Members of our own subclasses, where an annotation has vLLM's class or another type.
OURS = {
    ("KVConnectorMetadata", "jobs"),
    ("KVConnectorWorkerMetadata", "report"),
    ("KVTransferConfig", "get"),
    ("SupportsHash", "get"),
}
