"""vLLM objects for a scheduler without a device: configuration, KV layout, requests."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from sola_sched.simulator.request import EOS_TOKEN_ID, VirtualRequest

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    },
}
"""Presets: a model's `config.json`, as far as a scheduler depends on it."""


def make_vllm_config(
    model: str | Mapping[str, Any],
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    async_scheduling: bool,
    enable_prefix_caching: bool,
    enable_chunked_prefill: bool,
    scheduling_policy: str,
    additional_config: Mapping[str, Any] | None,
) -> VllmConfig:
    """A `VllmConfig` as the engine core would hand it to its scheduler.

    The expensive part is built once per model and length and shared; what a scheduler reads or
    writes (scheduler and cache options, additional config) belongs to the caller alone.

    Raises:
        ValueError: The model is an unknown preset, or the KV cache cannot hold one request.
    """
    needed = -(-max_model_len // block_size) + 1
    if num_blocks < needed:
        raise ValueError(
            f"'num_blocks' must be >= {needed} for max_model_len {max_model_len} in blocks of "
            f"{block_size} (got {num_blocks}); raise it or lower max_model_len."
        )
    config = copy.copy(_base_config(_model_json(model), max_model_len))
    scheduler = config.scheduler_config = copy.copy(config.scheduler_config)
    scheduler.max_num_seqs = max_num_seqs
    scheduler.max_num_batched_tokens = max_num_batched_tokens
    scheduler.async_scheduling = async_scheduling
    scheduler.policy = scheduling_policy
    scheduler.enable_chunked_prefill = enable_chunked_prefill
    scheduler.verify_max_model_len(max_model_len)
    cache = config.cache_config = copy.copy(config.cache_config)
    cache.block_size = block_size
    cache.num_gpu_blocks = cache.num_gpu_blocks_override = num_blocks
    cache.enable_prefix_caching = enable_prefix_caching
    config.additional_config = dict(additional_config or {})
    return config


def make_kv_cache_config(config: VllmConfig) -> KVCacheConfig:
    """One full-attention group with all layers; no memory is allocated for it."""
    model = config.model_config
    num_layers = model.get_num_layers(config.parallel_config)
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    group = KVCacheGroupSpec([f"layer.{i}" for i in range(num_layers)], spec)
    assert config.cache_config.num_gpu_blocks is not None
    return KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[group],
    )


def make_scheduler(scheduler_cls: type[Any], config: VllmConfig) -> Any:
    """Construct a scheduler the way the engine core does."""
    return scheduler_cls(
        vllm_config=config,
        kv_cache_config=make_kv_cache_config(config),
        structured_output_manager=_structured_output_manager(),
        block_size=config.cache_config.block_size,
        hash_block_size=config.cache_config.block_size,
        include_finished_set=False,
        log_stats=False,
    )


def stock_scheduler_cls(*, async_scheduling: bool) -> type[Any]:
    """The class vLLM itself would choose."""
    return AsyncScheduler if async_scheduling else Scheduler


def make_block_hasher(config: VllmConfig) -> Callable[[Request], list[Any]] | None:
    """The block hasher of the engine core; None without prefix caching."""
    if not config.cache_config.enable_prefix_caching:
        return None
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    return get_request_block_hasher(config.cache_config.block_size, hash_fn)


def make_request(
    virtual: VirtualRequest,
    config: VllmConfig,
    block_hasher: Callable[[Request], list[Any]] | None,
) -> Request:
    """The `Request` the engine core would receive.

    Raises:
        ValueError: Prompt and output do not fit into the model's context.
    """
    max_model_len = config.model_config.max_model_len
    room = max_model_len - virtual.num_prompt_tokens
    if virtual.output_len > room:
        raise ValueError(
            f"prompt and output of request {virtual.req_id!r} must fit into max_model_len "
            f"{max_model_len} (got {virtual.num_prompt_tokens} + {virtual.output_len})."
        )
    # As in the front end: the limit never exceeds the context that is left.
    max_tokens = min(virtual.max_tokens or virtual.output_len, room)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=not virtual.ends_with_eos,
        extra_args=dict(virtual.extra_args) if virtual.extra_args else None,
    )
    if virtual.ends_with_eos:
        params.update_from_generation_config({}, EOS_TOKEN_ID)
    return Request(
        request_id=virtual.req_id,
        prompt_token_ids=virtual.make_prompt(config.model_config.get_vocab_size()),
        sampling_params=params,
        pooling_params=None,
        arrival_time=virtual.arrival_s,
        priority=virtual.priority,
        block_hasher=block_hasher,
    )


def _model_json(model: str | Mapping[str, Any]) -> str:
    if isinstance(model, str):
        if model not in MODELS:
            raise ValueError(
                f"'model' must be a config or one of {', '.join(sorted(MODELS))} (got {model!r})."
            )
        model = MODELS[model]
    return json.dumps(dict(model), sort_keys=True)


@lru_cache(maxsize=8)
def _base_config(model_json: str, max_model_len: int) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(model_json)
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            load_format="dummy",
            max_model_len=max_model_len,
            max_num_batched_tokens=max_model_len,
            max_num_seqs=1,
        ).create_engine_config()
        # Read once here: the folder is gone afterwards.
        config.model_config.get_vocab_size()
    return config


@lru_cache(maxsize=1)
def _structured_output_manager() -> StructuredOutputManager:
    # One for all schedulers: none of the virtual requests asks for a grammar.
    model_json = _model_json("llama-3-8b")
    return StructuredOutputManager(_base_config(model_json, 8192))
