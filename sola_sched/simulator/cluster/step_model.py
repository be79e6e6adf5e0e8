"""A profile's step time by the sums of a batch: what routers and the fast engine ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sola_sched.cost.fit import StepShape
from sola_sched.simulator.steps.tables import StepTables
from sola_sched.simulator.steps.time import MeasuredStepTime, StepCounts, StepTimeModel

#: KV of a decode at which `decode_line` takes its slope, tokens.
TYPICAL_CTX = 4096


@dataclass(frozen=True)
class BatchTime:
    """Step times without a scheduler's output; a `StepModel` of routers.

    Of a measured profile it uses the cost model; the finer curves, where it has some, are left out.

    Attributes:
        step_time: The profile's.
        factor: On every time; > 1 for an instance that is slower than its profile.
    """

    step_time: StepTimeModel | StepTables | MeasuredStepTime
    factor: float = 1.0

    def prefill_s(self, new_tokens: Any) -> Any:
        """See `StepModel.prefill_s`."""
        if isinstance(self.step_time, MeasuredStepTime):
            return self.factor * self.step_time.cost.prefill_s(new_tokens)
        if isinstance(new_tokens, np.ndarray):
            return np.array([self.prefill_s(float(tokens)) for tokens in new_tokens])
        # Without tokens it is the constant of a step.
        tokens = max(new_tokens, 1e-9)
        return self.step_s(0, 0.0, tokens, tokens * tokens, 0.0)

    def decode_s(self, num_decodes: Any, ctx_tokens: Any) -> Any:
        """See `StepModel.decode_s`."""
        if isinstance(self.step_time, MeasuredStepTime):
            return self.factor * self.step_time.cost.decode_s(num_decodes, ctx_tokens)
        return self.factor * self.step_time.seconds(StepCounts(num_decodes, ctx_tokens))

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        """A decode step's seconds without context, and the seconds of each token of context."""
        constant_s = float(self.decode_s(num_decodes, 0))
        typical = TYPICAL_CTX * num_decodes
        return constant_s, (float(self.decode_s(num_decodes, typical)) - constant_s) / typical

    def step_s(
        self,
        num_decodes: int,
        ctx_tokens: float,
        prefill_tokens: float,
        prefill_sq: float,
        prefill_ctx: float,
        num_prefills: int = 1,
    ) -> float:
        """Seconds of a step.

        Args:
            num_decodes: Decodes in it.
            ctx_tokens: Their KV.
            prefill_tokens: Prompt tokens, the sum over chunks.
            prefill_sq: Sum of the squares of the chunks.
            prefill_ctx: Sum of chunk x tokens that its request has computed before.
            num_prefills: Chunks, where there are prompt tokens.
        """
        ctx, tokens = int(ctx_tokens), prefill_tokens
        if isinstance(self.step_time, MeasuredStepTime):
            shape = StepShape(num_decodes, ctx, int(tokens), prefill_sq, prefill_ctx)
            return self.factor * self.step_time.cost.step_s(shape)
        pairs = prefill_ctx + 0.5 * prefill_sq
        chunks = num_prefills if tokens > 0 else 0
        counts = StepCounts(num_decodes, ctx, chunks, tokens, pairs)  # type: ignore[arg-type]
        return self.factor * self.step_time.seconds(counts)
