"""The p1 to p8 of static batches, for the estimate of a deployment and for the runtime mapper.

Source: Y. Xiong et al., *High-Throughput LLM inference on Heterogeneous Clusters*, section 3.1.2.
With b requests, the longest prompt I and the longest output O of the batch:

    T_prefill = p1 b I + p2 b + p3 I + p4                                           (Eq. 3)
    T_decode  = sum over k = 1..O of [p5 b (I + k) + p6 b + p7 (I + k) + p8]        (Eq. 4)

Departure: all p are >= 0 (the paper's `curve_fit` has no bounds), so that a longer batch never
takes less time. Where all prefills measured had the same number of prompts, p2 and p3 cannot be
told from p4 and p1; they are 0 then, since prefill time follows the tokens (Aladdin Eq. 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sola_sched.cluster.performance.fitting import FitError, fit_relative
from sola_sched.cluster.performance.model import PerformanceModel
from sola_sched.cluster.performance.samples import DecodeSamples, FloatArray, PrefillSamples


@dataclass(frozen=True, slots=True)
class StaticBatchTime:
    """Times of static batches on one instance.

    Attributes:
        prefill: p1 to p4, seconds per the unit of their terms, >= 0.
        decode: p5 to p8 likewise.
    """

    prefill: tuple[float, float, float, float]
    decode: tuple[float, float, float, float]

    def batch_prefill_s(self, num_requests: Any, longest_input: Any) -> Any:
        """Eq. 3, seconds; elementwise."""
        p1, p2, p3, p4 = self.prefill
        b, length = num_requests, longest_input
        return p1 * b * length + p2 * b + p3 * length + p4

    def batch_decode_s(self, num_requests: Any, longest_input: Any, longest_output: Any) -> Any:
        """Eq. 4, seconds; elementwise. The sum over k is O I + O (O + 1) / 2."""
        p5, p6, p7, p8 = self.decode
        b, steps = num_requests, longest_output
        ctx = steps * longest_input + steps * (steps + 1.0) / 2.0
        return p5 * b * ctx + p6 * b * steps + p7 * ctx + p8 * steps

    def batch_s(self, num_requests: Any, longest_input: Any, longest_output: Any) -> Any:
        """Time of a batch from start to end, seconds; elementwise."""
        prefill_s = self.batch_prefill_s(num_requests, longest_input)
        return prefill_s + self.batch_decode_s(num_requests, longest_input, longest_output)

    def prefill_s(self, new_tokens: Any) -> Any:
        """Seconds of steps with one prompt each, elementwise; makes this a `StepModel`."""
        return self.batch_prefill_s(1.0, new_tokens)

    def decode_s(self, num_decodes: Any, ctx_tokens: Any) -> Any:
        """Seconds of a decode step of requests with equal contexts, elementwise; likewise."""
        p5, p6, p7, p8 = self.decode
        longest = ctx_tokens / np.maximum(num_decodes, 1.0)
        return p5 * ctx_tokens + p6 * num_decodes + p7 * longest + p8

    @classmethod
    def of_model(cls, model: PerformanceModel) -> StaticBatchTime:
        """The p that say the same as Aladdin's Eq. 2 and 3: p2 = p3 = p7 = 0."""
        prefill, decode = model.prefill, model.decode
        return cls(
            (prefill.per_token_s, 0.0, 0.0, prefill.base_s),
            (decode.per_ctx_s, decode.per_request_s, 0.0, decode.base_s),
        )

    @classmethod
    def fit(
        cls, prefill: PrefillSamples, decode: DecodeSamples
    ) -> tuple[StaticBatchTime, dict[str, FitError]]:
        """Fit both equations by least squares of the relative error.

        Returns:
            The fit, and its errors under ``p1 to p4`` and ``p5 to p8``.

        Raises:
            ProfileError: There are too few samples.
        """
        p1_to_p4, prefill_error = _fit(prefill, "p1 to p4")
        p5_to_p8, decode_error = _fit(decode, "p5 to p8")
        errors = {"p1 to p4": prefill_error, "p5 to p8": decode_error}
        return cls(p1_to_p4, p5_to_p8), errors


def _fit(
    samples: PrefillSamples | DecodeSamples, what: str
) -> tuple[tuple[float, float, float, float], FitError]:
    b, length = samples.num_requests, samples.longest
    columns: FloatArray = np.stack([b * length, b, length, np.ones_like(b)], axis=1)
    used = [0, 1, 2, 3] if np.unique(b).size > 1 else [0, 3]
    found, error = fit_relative(columns[:, used], samples.seconds, what)
    values = np.zeros(4)
    values[used] = found
    first, second, third, fourth = values.tolist()
    return (first, second, third, fourth), error
