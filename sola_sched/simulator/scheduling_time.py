"""What the scheduler itself takes of an engine's time: measured, or by a fixed model."""

from __future__ import annotations

from dataclasses import dataclass

#: Has the engine charge the processor time that the calls really take: not repeatable.
MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class SchedulingTime:
    """Time of `schedule()` and `update_from_output()` together, one and the same on every machine.

    Attributes:
        per_step_s: Of every step, seconds.
        per_request_s: Of each request in it, seconds.
    """

    per_step_s: float
    per_request_s: float

    def step_s(self, num_requests: int) -> float:
        """Seconds of both calls for a step of so many requests."""
        return self.per_step_s + self.per_request_s * num_requests


#: From `benchmarks/results/overhead.jsonl`: chat and code, 1 to 256 running.
STOCK = SchedulingTime(30e-6, 14e-6)
SOLA = SchedulingTime(80e-6, 16.5e-6)
