"""Instances and requests for tests of placement, and a slow, literal check of the constraints."""

from __future__ import annotations

from collections.abc import Sequence

from sola_sched.cluster.performance import DecodeTime, KvUse, PerformanceModel, PrefillTime
from sola_sched.cluster.placement import Demand, Tightness


def make_model(
    *,
    capacity: float = 10_000.0,
    per_token_s: float = 1e-4,
    prefill_base_s: float = 0.01,
    per_ctx_s: float = 1e-6,
    per_request_s: float = 1e-4,
    decode_base_s: float = 0.01,
    empty_tokens: float = 0.0,
    name: str = "test",
) -> PerformanceModel:
    """A model in which KV memory counts in tokens."""
    return PerformanceModel(
        name=name,
        kv=KvUse(1.0, empty_tokens),
        prefill=PrefillTime(per_token_s, prefill_base_s),
        decode=DecodeTime(per_ctx_s, per_request_s, decode_base_s),
        kv_capacity_bytes=capacity,
    )


def is_allowed(
    model: PerformanceModel, demands: Sequence[Demand], tightness: Tightness, slots: int = 256
) -> bool:
    """Constraints (b), (c), (e) and slots for new requests on one instance, one step at a time.

    Prompts are served in order, so each request's own TTFT holds for those up to it.
    """
    if not demands:
        return True
    if len(demands) > slots:
        return False
    tpot_s = min(demand.tpot_s for demand in demands)
    context = sum(d.prompt_tokens + tightness.gamma * d.output_tokens for d in demands)
    if context > tightness.theta * model.decode.context_limit(len(demands), tpot_s) + 1e-6:
        return False
    tokens = 0
    for demand in demands:
        tokens += demand.prompt_tokens
        if model.prefill_s(tokens) > demand.ttft_s + 1e-9:
            return False
    steps = round(max(demand.output_tokens for demand in demands))
    for step in range(steps + 1):
        used = sum(
            float(model.kv.bytes_of(demand.prompt_tokens + step))
            for demand in demands
            if demand.output_tokens >= step
        )
        if used > model.kv_capacity_bytes + 1e-6:
            return False
    return True
