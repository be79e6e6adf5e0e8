"""Traces and step times that the tests of the bound share."""

from __future__ import annotations

import numpy as np

from sola_sched.config.slo import SloTarget
from sola_sched.simulator import (
    StepTimeModel,
)
from sola_sched.simulator.bound.upper import BoundRequest

SECONDS = StepTimeModel(
    base_s=1.0,
    per_decode_s=0.25,
    per_ctx_s=0.0625,
    per_prefill_token_s=0.5,
    per_prefill_attn_s=0.03125,
)
# Up to three tokens a step hide behind the reading of the weights.
ROOFLINE = StepTimeModel(
    base_s=0.25,
    per_ctx_s=0.0625,
    per_prefill_attn_s=0.03125,
    weights_s=1.5,
    per_token_s=0.5,
)
MODELS = {"linear": SECONDS, "roofline": ROOFLINE}
WIDE = {"max_num_seqs": 256, "num_kv_tokens": 400_000}
SLO = SloTarget(ttft_s=0.8, tpot_s=0.12)


def make_trace(num_requests: int, rate_per_s: float, *, seed: int = 0, slo=SLO):
    """Poisson arrivals; lognormal lengths with means of about 1,150 and 210 tokens."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate_per_s, num_requests))
    prompts = np.clip(rng.lognormal(6.6, 1.0, num_requests), 1, 7000)
    outputs = np.clip(rng.lognormal(5.0, 0.8, num_requests), 1, 1000)
    return [
        BoundRequest(float(a), int(p), int(o), slo)
        for a, p, o in zip(arrivals, prompts, outputs, strict=True)
    ]
