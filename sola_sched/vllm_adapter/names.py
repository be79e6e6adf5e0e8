"""Every name of vLLM that a step depends on: the one list, checked when an engine starts.

A test reads our source and holds it against this list; `.ci/interface.py` looks up the same names,
and those of the tools, in another release. Names that are asked for with a default
are not here: they may be missing.
"""

from __future__ import annotations

import dis
import importlib
from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """Names of one class of vLLM.

    Attributes:
        owner: Dotted name of the class.
        steering: What every step needs.
        swapping: What KV swapping needs beyond; without it preempted requests are computed again.
        at: Where the scheduler has its instance; None where there is none before the first
            request, so the class is looked at.
    """

    owner: str
    steering: tuple[str, ...] = ()
    swapping: tuple[str, ...] = ()
    at: str | None = None


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SCHEDULER = Part(
    "vllm.v1.core.sched.scheduler.Scheduler",
    _names(
        """
        running waiting requests policy vllm_config kv_cache_manager block_size num_spec_tokens
        max_num_running_reqs max_num_scheduled_tokens max_model_len lora_config scheduler_config
        schedule update_from_output add_request finish_requests has_requests shutdown
        _pause_state set_pause_state
        _preempt_request _free_request _enqueue_waiting_request _is_blocked_waiting_status
        _handle_stopped_request _update_request_as_session
        finished_recving_kv_req_ids prefill_capacity_bound get_request_counts
        prev_step_scheduled_req_ids kv_cache_config
        """
    ),
    _names(
        """
        failed_recving_kv_req_ids kv_holding_waiting deferred_waiting
        prefix_replay_tokens reset_prefix_cache _inflight_prefills
        _inflight_prefill_reserved_blocks _get_local_prefix_cache_hit
        _update_waiting_for_remote_kv _free_blocks
        """
    ),
    at="",
)
#: Of the scheduler: one of these groups. Up to 0.30, skipped requests have a queue of their own.
EITHER = (("skipped_waiting",), ("kv_holding_waiting", "deferred_waiting"))
CONNECTOR_BASE = Part(
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1",
    swapping=_names(
        """
        _kv_cache_config _kv_cache_manager bind_connector_metadata bind_gpu_block_pool
        build_connector_meta build_connector_worker_meta clear_connector_metadata
        get_loaded_kv_cache_group_ids get_num_new_matched_tokens get_transfer_results
        has_pending_block_frees has_pending_push_work register_kv_caches requires_kv_delivery
        reset_cache save_kv_layer shutdown start_load_kv update_connector_output
        update_state_after_alloc wait_for_layer_load wait_for_save
        """
    ),
)
PARTS = (
    SCHEDULER,
    CONNECTOR_BASE,
    Part(
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        _names("block_pool coordinator enable_caching"),
        _names("allocate_slots free get_blocks"),
        at="kv_cache_manager",
    ),
    Part(
        "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator",
        _names("find_longest_cache_hit"),
        _names("cache_blocks"),
        at="kv_cache_manager.coordinator",
    ),
    Part(
        "vllm.v1.core.block_pool.BlockPool",
        _names("get_num_free_blocks num_gpu_blocks"),
        _names("free_blocks touch"),
        at="kv_cache_manager.block_pool",
    ),
    Part("vllm.v1.core.kv_cache_utils.KVCacheBlock", swapping=_names("is_null")),
    Part("vllm.v1.core.kv_cache_manager.KVCacheBlocks", swapping=_names("blocks get_block_ids")),
    Part(
        "vllm.v1.core.sched.request_queue.RequestQueue",
        _names(
            "add_request peek_request pop_request prepend_request prepend_requests"
            " remove_request remove_requests"
        ),
    ),
    Part("vllm.v1.core.sched.request_queue.SchedulingPolicy", _names("FCFS PRIORITY")),
    Part(
        "vllm.v1.core.sched.output.SchedulerOutput",
        _names("num_scheduled_tokens total_num_scheduled_tokens"),
    ),
    Part("vllm.v1.core.sched.interface.PauseState", _names("PAUSED_ALL UNPAUSED")),
    Part(
        "vllm.v1.request.Request",
        _names(
            """
            request_id status arrival_time priority client_index max_tokens prompt_token_ids
            num_prompt_tokens num_output_tokens num_computed_tokens num_tokens num_preemptions
            num_output_placeholders block_hashes lora_request sampling_params stop_reason
            trace_headers resumable drop_stale_output is_finished take_events get_finished_reason
            is_prefill_chunk mm_features
            """
        ),
        _names(
            """
            all_token_ids num_in_flight_tokens num_stale_output_tokens
            shared_prefix_boundary skip_reading_prefix_cache
            """
        ),
    ),
    Part(
        "vllm.v1.request.RequestStatus",
        _names("""
            FINISHED_ERROR FINISHED_IGNORED FINISHED_LENGTH_CAPPED FINISHED_REPETITION
            FINISHED_STOPPED RUNNING WAITING
            """),
        _names("PREEMPTED WAITING_FOR_REMOTE_KVS"),
    ),
    Part("vllm.lora.request.LoRARequest", _names("lora_int_id lora_name")),
    Part("vllm.multimodal.inputs.MultiModalFeatureSpec", _names("mm_position")),
    Part("vllm.multimodal.inputs.PlaceholderRange", _names("length offset")),
    Part("vllm.sampling_params.SamplingParams", _names("extra_args seed thinking_token_budget")),
    Part("vllm.v1.engine.EngineCoreOutput", _names("request_id new_token_ids")),
    Part("vllm.v1.engine.EngineCoreOutputs", _names("outputs")),
    Part(
        "vllm.v1.kv_cache_interface.KVCacheConfig",
        _names("kv_cache_groups"),
        _names("num_blocks"),
        at="kv_cache_config",
    ),
    Part(
        "vllm.v1.kv_cache_interface.KVCacheGroupSpec",
        _names("kv_cache_spec"),
        _names("layer_names"),
    ),
    Part("vllm.v1.kv_cache_interface.AttentionSpec", swapping=_names("block_size dtype")),
    Part(
        "vllm.v1.outputs.KVConnectorOutput",
        swapping=_names("kv_connector_worker_meta finished_recving failed_recving"),
    ),
    Part(
        "vllm.config.VllmConfig",
        _names(
            """
            additional_config cache_config kv_transfer_config model_config parallel_config
            scheduler_config reasoning_config use_v2_model_runner
            """
        ),
        at="vllm_config",
    ),
    Part(
        "vllm.config.ModelConfig",
        _names("""
            runner_type is_multimodal_model is_encoder_decoder is_hybrid max_model_len
            served_model_name is_diffusion model
            """),
        at="vllm_config.model_config",
    ),
    Part("vllm.config.CacheConfig", _names("mamba_cache_mode"), at="vllm_config.cache_config"),
    Part(
        "vllm.config.SchedulerConfig",
        _names(
            """
            async_scheduling enable_chunked_prefill long_prefill_token_threshold
            max_num_batched_tokens max_num_seqs prefill_schedule_interval disable_chunked_mm_input
            policy
            """
        ),
        _names("scheduler_cls"),
        at="vllm_config.scheduler_config",
    ),
    Part(
        "vllm.config.ParallelConfig",
        _names("pipeline_parallel_size data_parallel_size world_size"),
        _names("data_parallel_size_local local_world_size"),
        at="vllm_config.parallel_config",
    ),
    Part(
        "vllm.config.KVTransferConfig",
        _names("kv_connector"),
        _names("kv_connector_extra_config kv_load_failure_policy"),
        at="vllm_config.kv_transfer_config",
    ),
    Part("vllm.config.LoRAConfig", _names("max_loras"), at="lora_config"),
)


def lacking(scheduler: Any = None, *, swapping: bool = False) -> list[str]:
    """Names that the installed vLLM lacks, as ``Class.name``; empty if all are there.

    Args:
        scheduler: One that vLLM's constructor has built; without one, classes are looked at.
        swapping: Look for the names that swapping needs beyond, instead of those for steering.
    """
    missing = []
    for part in PARTS:
        names = part.swapping if swapping else part.steering
        if not names:
            continue
        if scheduler is None or part.at is None:
            there = _members_of_class(part.owner)
        else:
            try:
                instance = attrgetter(part.at)(scheduler) if part.at else scheduler
            except AttributeError:
                continue  # the name on the way to it is missing itself
            there = _members_of(scheduler) if not part.at else _found_at(instance, names)
        owner = part.owner.rpartition(".")[2]
        missing += [f"{owner}.{name}" for name in names if name not in there]
        if part is SCHEDULER and not swapping and not any(there.issuperset(g) for g in EITHER):
            missing.append("Scheduler." + " or ".join(" and ".join(group) for group in EITHER))
    return missing


def _found_at(instance: Any, names: tuple[str, ...]) -> set[str]:
    """Those of the names that an instance has; all where there is none, as without adapters.

    Asked for one by one: once somebody has looked at the `__dict__` of an instance, Python before
    3.13 finds its attributes more slowly ever after. For the KV cache manager and its parts, which
    vLLM calls for every request, that was 5 % of a step.
    """
    return {name for name in names if instance is None or hasattr(instance, name)}


def _members_of(scheduler: Any) -> set[str]:
    """Attributes of a scheduler; what only our own classes define does not count."""
    classes = type(scheduler).__mro__
    ours = [i for i, c in enumerate(classes) if c.__module__.startswith("sola_sched.")]
    theirs = classes[max(ours, default=-1) + 1 :]
    return {*vars(scheduler), *(name for cls in theirs for name in vars(cls))}


def _members_of_class(owner: str) -> set[str]:
    """Members of a class, and what its constructors assign to `self`."""
    module, _, name = owner.rpartition(".")
    try:
        classes = getattr(importlib.import_module(module), name).__mro__
    except (ImportError, AttributeError):
        return set()
    assigned = {
        step.argval
        for cls in classes
        for method in (vars(cls).get("__init__"), vars(cls).get("__post_init__"))
        if hasattr(method, "__code__")
        for step in dis.get_instructions(method)
        if step.opname == "STORE_ATTR"
    }
    for cls in classes:
        assigned |= {*vars(cls), *vars(cls).get("__annotations__", {})}
    return assigned
