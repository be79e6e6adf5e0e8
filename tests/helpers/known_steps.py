"""Steps whose times follow known curves, as an engine would record them."""

from __future__ import annotations

import numpy as np

from fidelity.recording import Cycle
from sola_sched.config.slo import SloTarget
from sola_sched.cost.fit import StepShape
from sola_sched.simulator.steps.curves import Batch

#: Noise of 2 % a step leaves far less than that in a fit to some hundred of them.
FIT_TOLERANCE = 0.02
SLO = SloTarget(ttft_s=1.0, tpot_s=0.1)


def make_batch(num_decodes: int = 0, *chunks: tuple[int, int], context: int = 100) -> Batch:
    """Decodes of some context, and chunks as (tokens computed before, tokens)."""
    return Batch(
        StepShape(
            num_decodes,
            num_decodes * context,
            sum(n for _, n in chunks),
            float(sum(n * n for _, n in chunks)),
            float(sum(has * n for has, n in chunks)),
        ),
        num_prefills=len(chunks),
        num_new=sum(has == 0 for has, _ in chunks),
    )


def known_s(batch: Batch) -> float:
    """An engine whose tokens get cheaper beyond 64, and whose requests get dearer beyond 8."""
    tokens, requests = batch.num_tokens, batch.num_requests
    return (
        4e-3
        + 1e-4 * min(tokens, 64)
        + 5e-5 * max(0, tokens - 64)
        + 1e-4 * requests
        + 2e-4 * max(0, requests - 8)
        + 1e-7 * batch.shape.decode_ctx_tokens
        + 2e-8 * batch.shape.prefill_sq_tokens
    )


def random_batches(count: int, seed: int) -> list[Batch]:
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        chunks = [
            (int(rng.integers(0, 500)), int(rng.integers(2, 400)))
            for _ in range(rng.integers(0, 3))
        ]
        num_decodes = int(rng.integers(0 if chunks else 1, 60))
        batches.append(make_batch(num_decodes, *chunks, context=int(rng.integers(10, 900))))
    return batches


def make_cycle(batch: Batch, model_s: float, *, schedule_s: float = 1e-4) -> Cycle:
    return Cycle(batch, 2e-5, schedule_s, model_s, 5e-5, 3e-5)
