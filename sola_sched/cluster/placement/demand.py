"""What a request asks of an instance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sola_sched.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Demand:
    """A request to place.

    Attributes:
        prompt_tokens: l_in, >= 1.
        output_tokens: l_pred, the predicted output, > 0.
        ttft_s: Seconds left until its first token is due; inf without a target. May be <= 0 when
            it is late already: no instance is feasible then.
        tpot_s: T_dec, its target per output token, > 0; inf without one.
    """

    prompt_tokens: int
    output_tokens: float
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.prompt_tokens >= 1:
            raise ConfigError(f"'prompt_tokens' must be >= 1 (got {self.prompt_tokens!r}).")
        if not 0.0 < self.output_tokens < math.inf:
            raise ConfigError(
                f"'output_tokens' must be finite and > 0 (got {self.output_tokens!r}); "
                "without a prediction take the mean of past outputs."
            )
        if math.isnan(self.ttft_s) or not self.tpot_s > 0.0:
            raise ConfigError(
                f"'ttft_s' must be a number and 'tpot_s' > 0 (got {self.ttft_s!r}, "
                f"{self.tpot_s!r}); use inf for no target."
            )
