"""A profile's step time by the sums of a batch: what routers and the fast engine ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sola_sched.cost.fit import StepShape
from sola_sched.simulator.steps.time import MeasuredStepTime, StepTimeModel

_CTX = 4096.0


@dataclass(frozen=True)
class BatchTime:
    """Step times without a scheduler's output; a `StepModel` of routers.

    Of a measured profile it uses the cost model; the finer curves, where it has some, are left out.

    Attributes:
        step_time: The profile's.
        factor: On every time; > 1 for an instance that is slower than its profile.
    """

    step_time: StepTimeModel | MeasuredStepTime
    factor: float = 1.0

    def prefill_s(self, new_tokens: Any) -> Any:
        """See `StepModel.prefill_s`."""
        model = self.step_time
        if isinstance(model, MeasuredStepTime):
            return self.factor * model.cost.prefill_s(new_tokens)
        return self.factor * (
            model.base_s
            + np.maximum(model.weights_s, model.per_token_s * new_tokens)
            + model.per_prefill_token_s * new_tokens
            + 0.5 * model.per_prefill_attn_s * np.square(new_tokens)
        )

    def decode_s(self, num_decodes: Any, ctx_tokens: Any) -> Any:
        """See `StepModel.decode_s`."""
        model = self.step_time
        if isinstance(model, MeasuredStepTime):
            return self.factor * model.cost.decode_s(num_decodes, ctx_tokens)
        return self.factor * (
            model.base_s
            + np.maximum(model.weights_s, model.per_token_s * num_decodes)
            + model.per_decode_s * num_decodes
            + model.per_ctx_s * ctx_tokens
        )

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        """A decode step's seconds without context, and the seconds of each token of context."""
        constant_s = float(self.decode_s(num_decodes, 0.0))
        return constant_s, (float(self.decode_s(num_decodes, _CTX)) - constant_s) / _CTX

    def step_s(
        self,
        num_decodes: int,
        ctx_tokens: float,
        prefill_tokens: int,
        prefill_sq: float,
        prefill_ctx: float,
    ) -> float:
        """Seconds of a step.

        Args:
            num_decodes: Decodes in it.
            ctx_tokens: Their KV.
            prefill_tokens: Prompt tokens, the sum over chunks.
            prefill_sq: Sum of the squares of the chunks.
            prefill_ctx: Sum of chunk x tokens that its request has computed before.
        """
        model = self.step_time
        if isinstance(model, MeasuredStepTime):
            shape = StepShape(
                num_decodes=num_decodes,
                decode_ctx_tokens=int(ctx_tokens),
                prefill_tokens=prefill_tokens,
                prefill_sq_tokens=prefill_sq,
                prefill_ctx_tokens=prefill_ctx,
            )
            return self.factor * model.cost.step_s(shape)
        return self.factor * (
            model.base_s
            + max(model.weights_s, model.per_token_s * (num_decodes + prefill_tokens))
            + model.per_decode_s * num_decodes
            + model.per_ctx_s * ctx_tokens
            + model.per_prefill_token_s * prefill_tokens
            + model.per_prefill_attn_s * (prefill_ctx + 0.5 * prefill_sq)
        )
