"""Step time of a forward pass from the composition of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sola_sched.cost.fit import StepShape
from sola_sched.cost.model import CostModel
from sola_sched.simulator.steps.curves import META_KEY, StepCurves, batch_of
from sola_sched.vllm_adapter.steps.step_shape import shape_of


class StepCounts(NamedTuple):
    """What a step computes. One token, also the last of a prompt, counts as a decode.

    Attributes:
        num_decodes: Requests with one token.
        decode_ctx: Tokens that these have computed, in all.
        num_prefills: Requests with more tokens.
        prefill_tokens: Tokens of these.
        pairs: Sum of n * (c + n / 2) over them, for n tokens after c computed ones.
    """

    num_decodes: int = 0
    decode_ctx: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    pairs: float = 0.0

    @classmethod
    def of(cls, output: Any, requests: Mapping[str, Any]) -> StepCounts:
        """Count the step `output`, right after the `schedule()` call that made it.

        Args:
            output: vLLM's `SchedulerOutput`.
            requests: Live requests by id; their `num_computed_tokens` include this step.
        """
        num_decodes = num_ctx = num_prefills = num_prefill_tokens = 0
        num_pairs = 0.0
        for req_id, n in output.num_scheduled_tokens.items():
            has = requests[req_id].num_computed_tokens - n
            if n == 1:
                num_decodes += 1
                num_ctx += has
            else:
                num_prefills += 1
                num_prefill_tokens += n
                num_pairs += n * (has + 0.5 * n)
        return cls(num_decodes, num_ctx, num_prefills, num_prefill_tokens, num_pairs)


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Roofline step time; an instance is a `step_time` function for `VirtualEngine`.

    With n tokens scheduled for a request that has c tokens computed, and N tokens in all,

        t = base_s + max(weights_s, per_token_s * N)
          + per_decode_s * num_decodes + per_ctx_s * sum(c over decodes)
          + per_prefill_token_s * sum(n over prefills)
          + per_prefill_attn_s * sum(n * (c + n / 2) over prefills)

    The maximum is the matrix products: a step reads the weights once, and computes with them in
    that time until it has too many tokens. Without those two terms the model is linear. Kernels
    have no such kink: with `overlap_power` p > 0 the maximum is (weights_s^p + (per_token_s N)^p)
    ^(1/p), which exceeds it where both sides take about as long.

    A request with n = 1 counts as a decode, the last token of a prompt included: it costs the
    same. A step without tokens takes no time.

    Attributes:
        base_s: Cost of any step (launches, host work), seconds.
        per_decode_s: Seconds per decoding request.
        per_ctx_s: Seconds per context token read by a decode.
        per_prefill_token_s: Seconds per prompt token, beside `per_token_s`.
        per_prefill_attn_s: Seconds per pair of a prompt token and a token it attends to.
        weights_s: Seconds to read the weights once.
        per_token_s: Seconds of matrix products per token, prompt or output.
        overlap_power: >= 1, or 0 for the maximum.
    """

    base_s: float
    per_decode_s: float = 0.0
    per_ctx_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_prefill_attn_s: float = 0.0
    weights_s: float = 0.0
    per_token_s: float = 0.0
    overlap_power: float = 0.0

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        """Seconds of the step `output`; arguments as for `StepCounts.of`."""
        return self.seconds(StepCounts.of(output, requests))

    def seconds(self, counts: StepCounts) -> float:
        """Seconds of a step with this work; 0 without tokens."""
        num_tokens = counts.num_decodes + counts.prefill_tokens
        if not num_tokens:
            return 0.0
        return (
            self.base_s
            + self._products_s(num_tokens)
            + self.per_decode_s * counts.num_decodes
            + self.per_ctx_s * counts.decode_ctx
            + self.per_prefill_token_s * counts.prefill_tokens
            + self.per_prefill_attn_s * counts.pairs
        )

    def _products_s(self, num_tokens: int) -> float:
        sides, power = (self.weights_s, self.per_token_s * num_tokens), self.overlap_power
        longest: float = max(sides)
        if not power or not longest:
            return longest
        return longest * (1.0 + (min(sides) / longest) ** power) ** (1.0 / power)


@dataclass(frozen=True, slots=True)
class MeasuredStepTime:
    """Step time by a cost model that was fitted on a live engine, without online correction.

    Attributes:
        cost: As written by `python -m sola_sched.profile`.
        curves: The finer form that `python benchmarks/run.py fidelity` writes beside it, used
            in its place; None if the file has none.
    """

    cost: CostModel
    curves: StepCurves | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if META_KEY in self.cost.meta:
            object.__setattr__(self, "curves", StepCurves.from_json(self.cost.meta[META_KEY]))

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        """Seconds of the step `output`; arguments as for `StepTimeModel`."""
        if self.curves is not None:
            return self.curves.step_s(batch_of(output, requests))
        return self.cost.step_s(shape_of(output, requests))

    def seconds(self, counts: StepCounts) -> float:
        """Seconds of a step with this work by the cost model, a prompt being in one chunk."""
        tokens = int(counts.prefill_tokens)
        squares = min(2.0 * counts.pairs, float(tokens * tokens))
        context = counts.pairs - 0.5 * squares
        shape = StepShape(counts.num_decodes, counts.decode_ctx, tokens, squares, context)
        return self.cost.step_s(shape)


@dataclass(frozen=True)
class DecodeOnly:
    """Step times of an instance whose prompts come with their KV: each is one more decode."""

    step_time: Any

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        """Seconds of the step `output`; arguments as for `StepCounts.of`."""
        return self.seconds(StepCounts.of(output, requests))

    def seconds(self, counts: StepCounts) -> float:
        """Seconds of a step with this work."""
        num_decodes = counts.num_decodes + counts.num_prefills
        ctx = counts.decode_ctx + int(counts.prefill_tokens)
        seconds: float = self.step_time.seconds(StepCounts(num_decodes, ctx))
        return seconds


LLAMA_3_8B_A100 = StepTimeModel(
    base_s=1.0e-2,
    per_decode_s=3.8e-5,
    per_ctx_s=8.2e-8,
    per_prefill_token_s=9.36e-5,
    per_prefill_attn_s=3.06e-9,
)
"""Linear roofline of Llama-3-8B in bf16 on one A100-80GB, computed, not measured.

Kept for the tables that were made with it; the profile `llama-3-8b-a100` has the maximum of
reading and computing instead of their sum, host time, and the memory that CUDA reports.

Effective peaks: 312 TFLOP/s at 55 % = 171.6 TFLOP/s; 2.0 TB/s at 80 % = 1.6 TB/s.

- base: 8.03e9 weights of 2 bytes = 16 GB read once a step; 16e9 / 1.6e12 = 10 ms.
- prefill token: 2 * 8.03e9 FLOP / 171.6e12 = 93.6 us.
- decode: the same 93.6 us of arithmetic, hidden behind the 10 ms of weight reading up to 107
  decodes; 38 us is the least-squares slope of max(0, 93.6 us * b - 10 ms) over b in [0, 256].
- context: 32 layers * 8 KV heads * 128 * 2 (K, V) * 2 bytes = 128 KiB a token;
  131072 / 1.6e12 = 82 ns.
- prefill attention: 4 * 32 layers * 4096 = 524288 FLOP per pair / 171.6e12 = 3.06 ns.
"""

LLAMA_3_8B_A100_NUM_BLOCKS = 25_000
"""16-token blocks (2 MiB each) in 0.9 * 80 GB less 16 GB of weights and 3 GB of activations."""
