"""What the cluster asks of an engine, be it a real scheduler or the fast model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sola_sched.cluster.view import InstanceView
from sola_sched.config.slo import SloTarget
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.request import VirtualRequest


@dataclass(frozen=True)
class ClusterRequest:
    """A request at the gateway.

    Attributes:
        request: What is asked; `arrival_s` is its arrival at the gateway.
        slo: Its targets, those that attainment is counted by and routers see.
        slo_class: Name it is reported under, or None.
        length: A prediction of its output that comes with it; None has the gateway predict.
    """

    request: VirtualRequest
    slo: SloTarget
    slo_class: str | None = None
    length: LengthPrediction | None = None


class Progress(NamedTuple):
    """Tokens of one request that an engine has delivered; times are 0 where there is none."""

    num_tokens: int
    first_s: float
    last_s: float


class Ended(NamedTuple):
    """A request that has ended on an engine; `is_whole` is False if the engine refused it."""

    req_id: str
    progress: Progress
    is_whole: bool


class ClusterEngine(Protocol):
    """One engine, driven by the cluster's event loop.

    Attributes:
        next_s: When it has to be advanced next, inf while it is idle. Whatever is called may
            change it.
    """

    next_s: float

    def add(
        self, request: VirtualRequest, slo: SloTarget, length: LengthPrediction, now_s: float
    ) -> None:
        """A request has reached the engine."""

    def advance(self, now_s: float) -> Sequence[Ended]:
        """Do what was due at `next_s`; `now_s` is later than that only after a stall."""

    def progress(self, req_id: str, now_s: float) -> Progress:
        """What the engine has delivered of a request that has not ended."""

    def remove(self, req_id: str, now_s: float) -> None:
        """The client is gone."""

    def view(self, now_s: float) -> InstanceView:
        """The report that the engine would make now."""

    def slow_down(self, factor: float) -> None:
        """From the next step on, steps take `factor` times what the profile says."""
