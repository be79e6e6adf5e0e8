"""Builders of what a router sees; each sets only what a test is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sola_sched.cluster.view import InstanceView, RoutedRequest
from sola_sched.config.slo import SloTarget
from sola_sched.prediction.length import LengthPrediction


@dataclass(frozen=True)
class LinearSteps:
    """Step times with one number each, so that a test can say what must come out."""

    step_s: float = 0.01
    per_prompt_token_s: float = 1e-4
    per_decode_s: float = 0.0
    per_ctx_token_s: float = 0.0

    def prefill_s(self, new_tokens: Any) -> Any:
        return self.step_s + self.per_prompt_token_s * new_tokens

    def decode_s(self, num_decodes: Any, ctx_tokens: Any) -> Any:
        return self.step_s + self.per_decode_s * num_decodes + self.per_ctx_token_s * ctx_tokens


def make_view(
    *,
    waiting: Sequence[float] = (),
    running: Sequence[float] = (),
    left: float = 100.0,
    **changes: Any,
) -> InstanceView:
    """An instance with waiting prompts and running decodes of these lengths."""
    ctx = np.array(running, dtype=np.float64)
    rows = {
        "running_ctx": ctx,
        "running_prefill": np.zeros(len(ctx)),
        "running_outputs": np.ones(len(ctx)),
        "running_left": np.full(len(ctx), left),
        "running_bank_s": np.zeros(len(ctx)),
        "running_lost": np.zeros(len(ctx)),
        "waiting_tokens": np.array(waiting, dtype=np.float64),
        "waiting_outputs": np.full(len(waiting), 100.0),
    }
    settings: dict[str, Any] = {
        "model": LinearSteps(),
        "kv_capacity_tokens": 100_000,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": 8192,
        "kv_used_tokens": int(ctx.sum()),
    }
    return InstanceView(**(settings | rows | changes))


def make_routed(
    req_id: str = "r",
    *,
    prompt_tokens: int = 100,
    output_tokens: float = 100.0,
    ttft_s: float = 1.0,
    tpot_s: float = 0.1,
    arrival_s: float = 0.0,
    avoid: Sequence[int] = (),
) -> RoutedRequest:
    """A request as a router gets it."""
    return RoutedRequest(
        req_id=req_id,
        prompt_tokens=prompt_tokens,
        length=LengthPrediction.exactly(output_tokens),
        slo=SloTarget(ttft_s=ttft_s, tpot_s=tpot_s),
        arrival_s=arrival_s,
        avoid=frozenset(avoid),
    )
