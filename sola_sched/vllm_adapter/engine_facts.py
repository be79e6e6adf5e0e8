"""What step times depend on, as an engine has it and as a profile remembers it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any

#: Keys of a profile's ``meta`` that an engine should share, and where vLLM has them.
_WHERE = {
    "model": "model_config.model",
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "enforce_eager": "model_config.enforce_eager",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
}
COMPARED = (*_WHERE, "device")


def facts_of(vllm_config: Any) -> dict[str, Any]:
    """What an engine is, by the keys of `COMPARED`; plain JSON data.

    What this vLLM does not have is left out, and so not compared.
    """
    from vllm.platforms import current_platform

    facts: dict[str, Any] = {"device": str(current_platform.get_device_name())}
    for key, where in _WHERE.items():
        with suppress(AttributeError):
            value = attrgetter(where)(vllm_config)
            facts[key] = value if isinstance(value, bool | int) else str(value)
    return facts


def differences(meta: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """In what a profile's ``meta`` and an engine's facts differ, in words; empty if in nothing.

    Args:
        meta: Of a profile; what it does not know is not compared.
        facts: From `facts_of`.
    """
    return [
        f"{key} {meta[key]!s} (here {facts[key]!s})"
        for key in COMPARED
        if key in meta and key in facts and _plain(key, meta[key]) != _plain(key, facts[key])
    ]


def _plain(key: str, value: Any) -> str:
    """A value without what does not matter: where a model lies, and how names are written."""
    text = str(value).strip().lower()
    if key == "dtype":
        return text.removeprefix("torch.")
    if key != "model":
        return text
    path = PurePosixPath(text)
    # A model of the hub's cache: models--OWNER--NAME/snapshots/REVISION.
    cached = [part for part in path.parts if part.startswith("models--")]
    return cached[-1].split("--")[-1] if cached else path.name
