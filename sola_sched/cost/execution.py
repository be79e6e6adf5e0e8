"""Execution time of a request, T_gen, from the step-time model and a predicted length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.cost.model import CostModel

FloatArray = NDArray[np.float64]

_SOME_CTX = 1000.0


@dataclass(frozen=True, slots=True)
class ExecutionTime:
    """T_gen(s, n) = T_pre(s) + n (alpha s + beta), in engine time.

    Source: ALISE (Zhao and Wang, ICCAD 2024), Eq. 3 to 5, with T_0, alpha and beta fitted to a
    profile of single requests. Here they come from the step-time model, which follows the live
    engine, and differ in three points:

    - T_pre keeps the quadratic term of attention and what a prefix cache saves, instead of s T_0.
    - A decode reads its output's KV too: s is the mean context over the tokens to come.
    - Requests decode in batches. A step's constant cost, mostly the weights, is shared by the
      batch, so beta holds its share. The times of several requests then add up to what the engine
      takes for all of them, which is what an estimated wait sums.

    Attributes:
        cost: The step-time model.
        alpha_s: Seconds per token and token of its context.
        beta_s: Seconds per token without context.
    """

    cost: CostModel
    alpha_s: float
    beta_s: float

    @classmethod
    def of(cls, cost: CostModel, batch: float) -> ExecutionTime:
        """Coefficients for decodes in batches of `batch` requests, >= 1."""
        empty_s = cost.decode_s(batch, 0.0)
        ctx_s = cost.decode_s(batch, _SOME_CTX) - empty_s
        return cls(cost, ctx_s / _SOME_CTX, empty_s / batch)

    def prefill_s(self, num_tokens: FloatArray, num_computed: FloatArray) -> FloatArray:
        """T_pre: seconds for `num_tokens` of each prompt after `num_computed`, [n]."""
        result: FloatArray = np.asarray(self.cost.prefill_marginal_s(num_tokens, num_computed))
        return result

    def decode_s(self, ctx_tokens: NDArray[Any], num_tokens: FloatArray) -> FloatArray:
        """T_dec: seconds for `num_tokens` more after a context of `ctx_tokens`, [n]."""
        return num_tokens * (self.alpha_s * (ctx_tokens + 0.5 * num_tokens) + self.beta_s)
