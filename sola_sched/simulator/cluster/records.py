"""What happened to the requests of a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics


@dataclass(slots=True)
class ClusterRecord:
    """One request as its client saw it; times in seconds on the virtual clock.

    Attributes:
        req_id: Its name.
        arrival_s: Its arrival at the gateway.
        num_prompt_tokens: Length of its prompt.
        slo: Its targets.
        slo_class: Name it is reported under, or None.
        first_token_s, last_token_s: Delivery of its first and last token; NaN without any.
        num_output_tokens: Tokens delivered, on all instances together.
        instances: Where it was sent, in order; more than one if it was retried.
        completed: The whole output was delivered.
        error: Why not; empty while it runs.
    """

    req_id: str
    arrival_s: float
    num_prompt_tokens: int
    slo: SloTarget
    slo_class: str | None = None
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    num_output_tokens: int = 0
    instances: list[int] = field(default_factory=list)
    completed: bool = False
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; NaN without any."""
        return metrics.ttft_s(self.arrival_s, self.first_token_s)

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; NaN for fewer than two."""
        return metrics.tpot_s(self.latency_s, self.ttft_s, self.num_output_tokens)

    @property
    def latency_s(self) -> float:
        """Arrival to last token; NaN without any."""
        return self.last_token_s - self.arrival_s

    @property
    def attains(self) -> bool:
        """True if it completed and met all targets."""
        return metrics.meets_slo(self.ttft_s, self.tpot_s, self.latency_s, self.slo, self.completed)


@dataclass(frozen=True)
class ClusterRun:
    """A finished run.

    Attributes:
        records: One for each request, in the order given.
        num_retries: Attempts beyond the first.
        num_ignored_reports: Reports that could not be true, or were overtaken.
        report_ages_s: Age of the chosen instance's report at each decision [decisions].
        duration_s: From time 0 to the last event.
        instance_s: Seconds of all instances together, from the decision for one to its end.
    """

    records: Sequence[ClusterRecord]
    num_retries: int
    num_ignored_reports: int
    report_ages_s: Sequence[float]
    duration_s: float
    instance_s: float = 0.0

    @property
    def attainment(self) -> float:
        """Share of the requests that attained."""
        return metrics.attainment_ratio([record.attains for record in self.records])

    def percentiles(self, q: float) -> tuple[float, float]:
        """TTFT and TPOT percentiles of the completed requests, seconds; NaN for none."""
        done = [record for record in self.records if record.completed]
        return tuple(  # type: ignore[return-value]
            metrics.describe(values, [q])[f"p{q:g}"]
            for values in ((r.ttft_s for r in done), (r.tpot_s for r in done))
        )

    def shares(self, num_instances: int) -> list[float]:
        """Share of the requests that ended on each instance."""
        last = [record.instances[-1] for record in self.records if record.instances]
        counts = np.bincount(np.array(last, dtype=np.int64), minlength=num_instances)
        return (counts / max(1, len(last))).tolist()
