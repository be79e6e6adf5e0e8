"""Step times of a plan, by the coefficients in its `STEP`: the compiled form of `CostModel`'s."""

from __future__ import annotations

import math

from sola_sched.core.compiled import compiled
from sola_sched.cost.model import MAX_TOKENS


@compiled
def decode_s(at, num_decodes, ctx):
    """Time of a step of so many decodes with so many KV tokens in all, seconds."""
    return at.gamma_decode * (at.a1 * num_decodes + at.b1 * ctx + at.c1)


@compiled
def chunk_s(at, new, has):
    """What a chunk adds to a step that runs anyway, seconds."""
    return at.gamma_mixed * (new * (at.a0 * has + at.b0 * new + at.c0))


@compiled
def prompts_constant_s(at):
    """What a step of prompts alone takes beside its chunks, seconds."""
    return at.gamma_prefill * at.d0


@compiled
def chunk_overhead_s(at):
    """What a decode step costs more because it has a chunk at all, however short, seconds."""
    return max(0.0, at.gamma_mixed * at.mixed - at.gamma_decode * at.c1)


@compiled
def most_tokens(at, limit_s, has):
    """The longest chunk beside the decodes that are alive for which `limit_s` is enough, tokens.

    See `CostModel.max_prefill_tokens`.
    """
    room_s = limit_s / at.gamma_prefill - at.d0
    if at.num_alive > 0:
        decodes_s = at.a1 * at.num_alive + at.b1 * at.ctx_alive
        if at.gamma_decode * (decodes_s + at.c1) > limit_s:
            return 0.0
        room_s = min(room_s, limit_s / at.gamma_mixed - decodes_s - at.mixed)
    if not room_s > 0.0:
        return 0.0
    linear = at.a0 * has + at.c0
    divisor = linear + math.sqrt(linear * linear + 4.0 * at.b0 * room_s)
    if divisor * MAX_TOKENS <= 2.0 * room_s or math.isinf(room_s):
        return float(MAX_TOKENS)
    return 2.0 * room_s / divisor


@compiled
def usual_token_s(at, step_s):
    """Time between two tokens of a decode, with the prefills that come in between, seconds."""
    return step_s / max(0.1, 1.0 - at.prefill_share) / at.per_step
