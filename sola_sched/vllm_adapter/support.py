"""How far an engine is steered: wholly, with limits, or not at all. See `docs/support.md`.

A pure function of the configuration, so that log, documentation and tests say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sola_sched.config.sola_config import SolaConfig
from sola_sched.config.swap import CONNECTOR
from sola_sched.errors import ConfigError

POOLING = "a pooling model generates no tokens"
ENCODER_ONLY = "an instance that runs the encoder only generates no tokens"
PIPELINE = "with pipeline parallelism a step holds a part of the requests only"
WHOLE_PROMPTS = "chunked prefill is off, so a step holds whole prompts"
ENCODER = "the time that encoders take is in no plan; vLLM's encoder budget is kept"
ALIGNED = "chunks of prompts end at block boundaries, where Mamba layers keep their state"
THROTTLED = "prefills start at the steps that data parallel ranks have agreed on"
CONNECTOR_LOADS = "the time in which {} loads KV is in no plan"
#: What vLLM calls that: up to 0.28, and from 0.29 on.
_ENCODES_ONLY = ("is_encoder_only", "is_mm_encoder_only")
NO_TARGETS = "requests without targets of their own run in vLLM's order"


@dataclass(frozen=True, slots=True)
class Support:
    """What becomes of an engine.

    Attributes:
        own_order: Why every step runs in vLLM's own order; empty if steps are planned.
        limits: What plans leave to vLLM or do not know.
        is_shadow: Steps run in vLLM's own order all the same: plans are counted only.
    """

    own_order: str = ""
    limits: tuple[str, ...] = ()
    is_shadow: bool = False

    @property
    def steers(self) -> bool:
        return not self.own_order and not self.is_shadow

    def __str__(self) -> str:
        if self.own_order:
            return f"not steered, vLLM's own order: {self.own_order}"
        if self.is_shadow:
            return "not steered, vLLM's own order: 'steer' is false; plans are counted only"
        return f"steered, with limits: {'; '.join(self.limits)}" if self.limits else "steered"


def refuse_others(model_config: Any) -> None:
    """Refuse models for which vLLM takes a scheduler of another kind.

    Raises:
        ConfigError: It denoises canvases: steps, chunks and tokens mean something else there.
    """
    if model_config.is_diffusion:
        raise ConfigError(
            "'--scheduler-cls' must be left out for diffusion models, which vLLM serves with a "
            f"scheduler of its own (got {model_config.model!r} with sola_sched); remove it."
        )


def support_of(vllm_config: Any, config: SolaConfig) -> Support:
    """What becomes of the engine of `vllm_config`, with our options `config`."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if model.runner_type == "pooling":
        return Support(POOLING)
    if any(getattr(vllm_config, name, False) for name in _ENCODES_ONLY):
        return Support(ENCODER_ONLY)
    if parallel.pipeline_parallel_size > 1:
        return Support(PIPELINE)
    limits = []
    if not scheduler.enable_chunked_prefill:
        limits.append(WHOLE_PROMPTS)
    if model.is_multimodal_model or model.is_encoder_decoder:
        limits.append(ENCODER)
    if model.is_hybrid and vllm_config.cache_config.mamba_cache_mode == "align":
        limits.append(ALIGNED)
    if parallel.data_parallel_size > 1 and scheduler.prefill_schedule_interval > 1:
        limits.append(THROTTLED)
    if transfer is not None and transfer.kv_connector not in (None, CONNECTOR):
        limits.append(CONNECTOR_LOADS.format(transfer.kv_connector))
    targets = (config.default_slo, *config.classes.values())
    if config.traits.goes_by_targets and all(target.is_unlimited for target in targets):
        limits.append(NO_TARGETS)
    return Support(limits=tuple(limits), is_shadow=not config.steer)
