"""How well a placement serves each service, and which is served worst (SeaLLM, Eq. 1, 5, 6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sola_sched.cluster.sharing.placement import Placement

#: alpha of Eq. 6, as in section 6.1: it breaks ties between services that miss as many.
ALPHA = 1e-4


@dataclass(frozen=True)
class ServiceOutcome:
    """What a placement does to one service's requests.

    Attributes:
        num_requests: In all.
        num_missed: Those that missed a target, or were not served.
        latency: Sum over the served ones of latency / mean execution time (Eq. 1 for one service).
    """

    num_requests: int
    num_missed: int
    latency: float

    def __post_init__(self) -> None:
        if not 0 <= self.num_missed <= self.num_requests or not self.latency >= 0.0:
            raise ValueError(
                "an outcome must have 0 <= num_missed <= num_requests and latency >= 0 (got "
                f"{self.num_missed} of {self.num_requests}, {self.latency!r})."
            )


#: What a placement does to each service, by name; those without a place included.
Evaluate = Callable[[Placement], Mapping[str, ServiceOutcome]]


def unserved_index(outcome: ServiceOutcome, alpha: float = ALPHA) -> float:
    """Eq. 6: UI_s = sum over r of [L_r > SLO_s] + alpha L_N^s."""
    return outcome.num_missed + alpha * outcome.latency


@dataclass(frozen=True, order=True)
class Score:
    """A placement's worth, the smaller the better: lines 21 to 25 of Algorithm 1.

    Attributes:
        missed: Share of all requests that missed a target.
        latency: Mean normalized latency; inf if nothing was served.
    """

    missed: float
    latency: float

    @property
    def attainment(self) -> float:
        """Share of the requests that met their targets."""
        return 1.0 - self.missed


def score(outcomes: Mapping[str, ServiceOutcome], enough: float = 1.0) -> Score:
    """Over all services.

    Where the paper asks for a share Delta of each service (Eq. 5) and leaves Delta open, its
    Algorithm 1 compares the share of all requests, as here.

    Args:
        outcomes: By service.
        enough: Attainment above which placements differ by latency alone; 1 is Algorithm 1.
    """
    total = sum(outcome.num_requests for outcome in outcomes.values())
    missed = sum(outcome.num_missed for outcome in outcomes.values())
    latency = sum(outcome.latency for outcome in outcomes.values())
    share = max(0.0, missed / max(1, total) - (1.0 - enough))
    return Score(share, latency / total if total and latency else math.inf)
