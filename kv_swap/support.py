"""Which engines can swap KV; everything else is refused by name."""

from __future__ import annotations

from typing import Any

from sola_sched.config.swap import SwapConfig

_LATENT = "MLAAttentionSpec"
#: Kinds of KV cache, by the name of vLLM's class: blocks that hold consecutive tokens.
SUPPORTED = (
    "FullAttentionSpec",
    _LATENT,
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
)
#: vLLM keeps them by whole blocks, and ends where a request resumes within one.
KEEPS_OUTPUTS = "vLLM keeps auxiliary outputs (--enable-return-routed-experts) by whole blocks"
_FLOATS = ("torch.float16", "torch.bfloat16", "torch.float32")


def layer_specs(group: Any) -> list[Any]:
    """The layers' kinds of cache in one KV cache group."""
    spec = group.kv_cache_spec
    nested = getattr(spec, "kv_cache_specs", None)
    return list(nested.values()) if nested else [spec]


def is_latent(group: Any) -> bool:
    """Whether a KV cache group holds MLA's latent vectors, not keys and values."""
    return type(layer_specs(group)[0]).__name__ == _LATENT


def reason_against(vllm_config: Any, kv_cache_config: Any, options: SwapConfig) -> str | None:
    """Why this engine does not swap, or None if it does."""
    if options.mode == "off":
        return "'swap.mode' is 'off'"
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    if scheduler_cls is None:
        return "the scheduler is vLLM's own; add --scheduler-cls sola_sched.Scheduler"
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        return KEEPS_OUTPUTS
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}, which spreads blocks over workers"
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        return f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, which is not tested"
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    for group in kv_cache_config.kv_cache_groups:
        if getattr(group, "host_resident", False):
            return "a part of the KV cache lives on the host already"
        for spec in layer_specs(group):
            kind = type(spec).__name__
            if kind not in SUPPORTED:
                return f"layers with {kind} cannot be swapped"
            if getattr(spec, "tokens_per_state", 1) != 1:
                return "layers that keep one state for several tokens cannot be swapped"
    return None


def without_int8(kv_cache_config: Any) -> str | None:
    """Why KV cannot be quantized and is swapped as raw bytes instead, or None if it can."""
    for group in kv_cache_config.kv_cache_groups:
        for spec in layer_specs(group):
            if str(spec.dtype) not in _FLOATS:
                return f"the cache holds {spec.dtype}; INT8 needs one of {', '.join(_FLOATS)}"
            if getattr(spec, "page_size_padded", None) is not None:
                return "the cache's pages are padded"
    return None
