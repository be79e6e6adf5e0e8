"""How requests ended, counted since start: in all and for each SLO class."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sola_sched.config.slo import DEFAULT_CLASS
from sola_sched.core.table import RequestValues


@dataclass(slots=True)
class ClassOutcomes:
    """Ends of the requests of one class; each request is in exactly one of the four.

    Attributes:
        attained: Completed with all targets met.
        missed: Completed with a target missed, failed in the engine, or ended by their client
            when the first or the last token was late already.
        rejected: Refused because of overload.
        aborted: Ended by their client before that. They count neither way: nobody knows whether
            the targets would have been met.
    """

    attained: int = 0
    missed: int = 0
    rejected: int = 0
    aborted: int = 0

    @property
    def num_counted(self) -> int:
        """Requests that the attainment is a share of."""
        return self.attained + self.missed + self.rejected


@dataclass(slots=True)
class MonitorStats:
    """Counters since start; latencies in seconds.

    Attributes:
        num_finished: Requests that ended by themselves.
        num_attained, num_ttft_met, num_tpot_met: Those of them that met all or one target.
        num_e2e: Those of them with a target for the time to the last token.
        num_e2e_met: Those of these that met it.
        num_aborted: Ended by their client, whenever that was.
        num_failed: Ended by an error of the engine.
        num_rejected: Refused because of overload.
        by_class: Outcomes by the name of the SLO class.
    """

    num_finished: int = 0
    num_attained: int = 0
    num_ttft_met: int = 0
    num_tpot_met: int = 0
    num_e2e: int = 0
    num_e2e_met: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_rejected: int = 0
    num_predicted: int = 0
    num_late_predictions: int = 0
    num_unseen: int = 0  # ended while the state was lost
    num_steps: int = 0
    max_wait_s: float = 0.0
    by_class: dict[str, ClassOutcomes] = field(
        default_factory=lambda: {DEFAULT_CLASS: ClassOutcomes()}
    )

    def of_class(self, name: str) -> ClassOutcomes:
        """The outcomes of this class, new ones at its first request."""
        outcomes = self.by_class.get(name)
        if outcomes is None:
            outcomes = self.by_class[name] = ClassOutcomes()
        return outcomes

    @property
    def num_counted(self) -> int:
        """Requests that the attainment is a share of: all but those that their client ended."""
        return sum(outcomes.num_counted for outcomes in self.by_class.values())

    @property
    def num_ended(self) -> int:
        """Requests that have ended, in whatever way."""
        served = self.num_finished + self.num_failed + self.num_aborted
        return served + self.num_rejected + self.num_unseen

    def count_end(
        self,
        request: RequestValues,
        outcomes: ClassOutcomes,
        now_s: float,
        *,
        by_itself: bool,
        rejected: bool,
        failed: bool,
    ) -> str:
        """Count the end of a request, here and in the `outcomes` of its class.

        Args:
            request: Its times and targets.
            outcomes: Of its class.
            now_s: On the table's clock.
            by_itself, rejected, failed: As in `StateMonitor.finished`.

        Returns:
            How it ended, as in `fates.ENDS`.
        """
        num_output, arrival_s = request.num_output, request.arrival_s
        # An answer without tokens, as of a pooling model, comes at the end.
        first_s = request.first_token_s if num_output else now_s
        ttft_met = first_s - arrival_s <= request.ttft_s
        if rejected:
            self.num_rejected += 1
            outcomes.rejected += 1
            return "rejected"
        if failed:
            self.num_failed += 1
            outcomes.missed += 1
            return "failed"
        if not by_itself:
            self.num_aborted += 1
            if ttft_met and now_s <= request.e2e_due_s:
                outcomes.aborted += 1
                return "aborted"
            outcomes.missed += 1
            return "missed"
        last_s = request.last_token_s if num_output else first_s
        tpot_s = (last_s - first_s) / max(1, num_output - 1)
        tpot_met = num_output < 2 or tpot_s <= request.tpot_s
        e2e_met = last_s - arrival_s <= request.e2e_s
        attained = ttft_met and tpot_met and e2e_met
        if math.isfinite(request.e2e_s):
            self.num_e2e += 1
            self.num_e2e_met += e2e_met
        self.num_finished += 1
        self.num_ttft_met += ttft_met
        self.num_tpot_met += tpot_met
        self.num_attained += attained
        self.max_wait_s = max(self.max_wait_s, first_s - arrival_s)
        outcomes.attained += attained
        outcomes.missed += not attained
        return "attained" if attained else "missed"
