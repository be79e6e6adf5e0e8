"""Requests and their prefill and decode jobs, as arrays, for the upper bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sola_sched.config.slo import SloTarget
from sola_sched.simulator.bound.floors import StepFloor

FloatArray = NDArray[np.float64]

# Room for rounding of times, relative and in seconds.
_TIME_ROUND_OFF = 1e-9


@dataclass(frozen=True, slots=True)
class BoundRequest:
    """What the bound knows of a request.

    Attributes:
        arrival_s: Seconds, on any clock.
        num_prompt_tokens: Tokens to compute before the first output token, >= 1.
        num_output_tokens: Tokens generated, >= 1.
        slo: Its targets.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo: SloTarget


class Trace:
    """The requests as arrays, sorted by arrival; times from the first arrival on."""

    def __init__(self, requests: list[BoundRequest], limits: dict[str, int]) -> None:
        for request in requests:
            if request.num_prompt_tokens < 1 or request.num_output_tokens < 1:
                raise ValueError(
                    f"a request must have >= 1 prompt and output token (got {request!r})."
                )
        requests = sorted(requests, key=lambda r: r.arrival_s)
        first_s = requests[0].arrival_s if requests else 0.0
        self.num_requests = len(requests)
        self.limits = limits
        self.arrival_s = np.array([r.arrival_s - first_s for r in requests], dtype=np.float64)
        self.span_s = float(self.arrival_s[-1]) if requests else 0.0
        self.prompt = np.array([r.num_prompt_tokens for r in requests], dtype=np.float64)
        self.decodes = np.array([r.num_output_tokens - 1 for r in requests], dtype=np.float64)
        room = 1.0 + _TIME_ROUND_OFF
        self.e2e_s = np.array([r.slo.e2e_s for r in requests], dtype=np.float64) * room
        self.ttft_s = np.array([r.slo.ttft_s for r in requests], dtype=np.float64) * room
        self.ttft_s = np.minimum(self.ttft_s, self.e2e_s)
        self.tpot_s = np.array([r.slo.tpot_s for r in requests], dtype=np.float64) * room
        # Chunks that the prompt needs at least.
        chunk = limits.get("max_num_batched_tokens", math.inf)
        self.chunks = np.maximum(1.0, np.ceil(self.prompt / chunk))
        # Sum over the decode steps of the tokens computed before, p + k - 1 for k = 1 to o - 1.
        self.decode_ctx = self.decodes * self.prompt + self.decodes * (self.decodes - 1.0) / 2.0

    @property
    def size(self) -> int:
        return len(self.arrival_s)

    @property
    def ttft_due_s(self) -> FloatArray:
        return self.arrival_s + self.ttft_s + _TIME_ROUND_OFF

    @property
    def last_due_s(self) -> FloatArray:
        with np.errstate(invalid="ignore"):
            decode_s = np.where(self.decodes > 0, self.tpot_s * self.decodes, 0.0)
        return np.minimum(self.ttft_due_s + decode_s, self.arrival_s + self.e2e_s + _TIME_ROUND_OFF)

    def drop_impossible(self, floors: Sequence[StepFloor]) -> dict[str, int]:
        """Keep the requests that an empty engine attains; returns how many others, by reason."""
        late_first, slow, late_last = (np.zeros(self.size, dtype=bool) for _ in range(3))
        for floor in floors:
            prefill_s, decode_s = shortest_prefill_s(self, floor), shortest_decode_s(self, floor)
            late_first |= prefill_s > self.ttft_s + _TIME_ROUND_OFF
            late_last |= prefill_s + decode_s > self.e2e_s + _TIME_ROUND_OFF
            with np.errstate(invalid="ignore"):
                slow |= (self.decodes > 0) & (
                    decode_s > self.tpot_s * self.decodes + _TIME_ROUND_OFF
                )
        too_big = self.prompt + self.decodes > self.limits["num_kv_tokens"]
        reasons = {
            "ttft": int(late_first.sum()),
            "tpot": int((slow & ~late_first).sum()),
            "e2e": int((late_last & ~late_first & ~slow).sum()),
            "kv": int((too_big & ~late_first & ~slow & ~late_last).sum()),
        }
        keep = ~(late_first | slow | late_last | too_big)
        for name in (
            "arrival_s", "prompt", "decodes", "ttft_s", "tpot_s", "e2e_s", "chunks", "decode_ctx",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name)[keep])
        return {name: count for name, count in reasons.items() if count}


def prefill_marginal_s(trace: Trace, floor: StepFloor) -> FloatArray:
    """Time of each prompt beyond `base_s` if no piece of it has one token."""
    p = trace.prompt
    result: FloatArray = floor.per_prefill_token_s * p + 0.5 * floor.per_prefill_attn_s * p * p
    return result


def _single_saving(floor: StepFloor) -> tuple[float, float]:
    """What a piece of one token after c others saves against being part of a chunk: u + v c."""
    u = floor.per_prefill_token_s + 0.5 * floor.per_prefill_attn_s - floor.per_decode_s
    return u, floor.per_prefill_attn_s - floor.per_ctx_s


def max_single_saving_s(trace: Trace, floor: StepFloor) -> FloatArray:
    """Most that one such piece of each prompt saves, >= 0."""
    u, v = _single_saving(floor)
    return np.maximum(0.0, np.maximum(u, u + v * (trace.prompt - 1.0)))


def shortest_prefill_s(trace: Trace, floor: StepFloor) -> FloatArray:
    """Time of each prefill on an empty engine, at least.

    With k pieces of one token there are at least max(chunks, k) steps; what that costs and saves
    is linear in k on both sides of k = chunks, so the minimum is at one of three values.
    """
    saving_s = max_single_saving_s(trace, floor)
    few = np.minimum(trace.chunks, trace.prompt)
    extra = [
        floor.base_s * np.maximum(trace.chunks, k) - saving_s * k
        for k in (0.0 * few, few, trace.prompt)
    ]
    marginal_s = prefill_marginal_s(trace, floor)
    return np.maximum(floor.base_s, marginal_s + np.minimum.reduce(extra))


def shortest_decode_s(trace: Trace, floor: StepFloor) -> FloatArray:
    """Time of the decode steps of each on an empty engine, at least."""
    step_s = floor.base_s + floor.per_decode_s
    result: FloatArray = step_s * trace.decodes + floor.per_ctx_s * trace.decode_ctx
    return result


def _top_sum(u: float, v: float, size: FloatArray, count: FloatArray) -> FloatArray:
    """Largest sum of at most `count` of the values u + v c for c = 0 to size - 1."""
    first = u + (v * (size - 1.0) if v > 0 else 0.0 * size)  # the largest value
    fall = abs(v)
    num_positive = np.where(first > 0, size, 0.0)
    if fall > 0:
        num_positive = np.minimum(num_positive, np.floor(np.maximum(first, 0.0) / fall) + 1.0)
    k = np.minimum(num_positive, count)
    result: FloatArray = np.maximum(0.0, k * first - fall * k * (k - 1.0) / 2.0)
    return result


class Jobs:
    """Prefill and decode jobs of all requests for one floor and one way to bound the steps.

    Attributes:
        start_s, end_s: Windows [2 * num_requests], prefill jobs first; the end may be inf.
        need_s: Time each needs in them.
        num_steps: Steps each needs; they are charged `step_s` each where `kind` is ``pace``.
        saving_s: What one piece of one token saves of each, where `need_s` does not say so yet.
    """

    def __init__(self, trace: Trace, floor: StepFloor, kind: str) -> None:
        earliest_s = trace.arrival_s + shortest_prefill_s(trace, floor)
        self.kind = kind
        self.start_s = np.concatenate([trace.arrival_s, earliest_s])
        start_by_s = trace.last_due_s - shortest_decode_s(trace, floor)
        self.end_s = np.concatenate([np.minimum(trace.ttft_due_s, start_by_s), trace.last_due_s])
        prefill_s = prefill_marginal_s(trace, floor)
        decode_s = floor.per_decode_s * trace.decodes + floor.per_ctx_s * trace.decode_ctx
        u, v = _single_saving(floor)
        step_s = floor.base_s + floor.per_decode_s
        with np.errstate(divide="ignore"):
            most = np.minimum(trace.prompt, np.floor(trace.ttft_s / step_s))
        if kind == "slots":
            # A piece of one token takes a slot itself; a prompt in such pieces has no chunk.
            share_s = floor.base_s / trace.limits["max_num_seqs"]
            prefill_s = prefill_s - _top_sum(u - share_s, v, trace.prompt, most)
            prefill_s += share_s * np.where(most < trace.prompt, 1.0, 0.0)
            decode_s += share_s * trace.decodes
        elif kind == "kv":
            share_s = floor.base_s / trace.limits["num_kv_tokens"]
            prefill_s = prefill_s - _top_sum(u, v, trace.prompt, most) + share_s * trace.prompt
            decode_s += share_s * (trace.decode_ctx + trace.decodes)
        elif kind == "tokens":
            share_s = floor.base_s / trace.limits["max_num_batched_tokens"]
            prefill_s = prefill_s - _top_sum(u, v, trace.prompt, most) + share_s * trace.prompt
            decode_s += share_s * trace.decodes
        else:
            assert kind == "pace", kind  # pieces of one token are charged to the steps
        self.need_s = np.concatenate([np.maximum(prefill_s, 0.0), decode_s])
        self.num_steps = np.concatenate([trace.chunks, trace.decodes])
        self.step_s = floor.base_s if kind == "pace" else 0.0
        self.saving_s = np.concatenate([max_single_saving_s(trace, floor), 0.0 * decode_s])

    def longest(self, inside: NDArray[np.bool_], x: FloatArray) -> tuple[int, FloatArray]:
        """The request whose steps weigh most among jobs `inside`, and what they cost it."""
        step_s = self.step_s - float(self.saving_s[inside].sum())
        if step_s <= 0.0:
            return 0, np.zeros(1)
        j = int(np.argmax(np.where(inside, self.num_steps * x, 0.0)))
        return j % (len(x) // 2), np.array([step_s * self.num_steps[j]])
