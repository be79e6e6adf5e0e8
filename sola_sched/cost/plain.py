"""Step times of given coefficients, without compiled code: for a process that only compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sola_sched.cost.file import Coefficients


@dataclass(frozen=True, slots=True)
class PlainStepTimes:
    """The same as `CostModel.from_coefficients` says, before any step is observed.

    Attributes:
        coefficients: Of Eq. 3 and 4.
    """

    coefficients: Coefficients

    def prefill_s(self, new_tokens: Any) -> Any:
        """Seconds of steps with one prompt chunk each, elementwise; the constant included."""
        own = self.coefficients
        return (own.b0 * new_tokens + own.c0) * new_tokens + own.d0

    def decode_s(self, num_decodes: Any, ctx_tokens: Any) -> Any:
        """Seconds of a decode step of so many requests with that much KV in all, elementwise."""
        own = self.coefficients
        return own.a1 * num_decodes + own.b1 * ctx_tokens + own.c1
