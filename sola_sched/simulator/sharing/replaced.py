"""Serving with placements that follow the load: the adaptive replacement of SeaLLM, section 4.3."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sola_sched.cluster.sharing.controller import Controller
from sola_sched.cluster.sharing.placement import Group, Placement
from sola_sched.cluster.sharing.queue import SharedRequest
from sola_sched.cluster.sharing.unserved import Score, score
from sola_sched.simulator.sharing.cluster import Arrival, Evaluator, Setting, SharedCluster

#: Given the arrivals of an interval, where to put the services.
Place = Callable[[Sequence[Arrival]], Placement]


@dataclass(frozen=True)
class Interval:
    """One interval of a run.

    Attributes:
        begin_s, end_s: When.
        estimated, real: Attainment that was expected of it, and achieved by what ended in it.
        num_changed: Groups that were started at its end; 0 if the placement stayed.
    """

    begin_s: float
    end_s: float
    estimated: float
    real: float
    num_changed: int


class ReplacingCluster:
    """A cluster that changes its placement at the end of intervals.

    Groups that change stop after their step under way; their requests go to the new groups, which
    serve once their weights are loaded, and compute their KV again. The paper pulls weights from
    remote storage into host memory beside serving, so that only the load from there counts.

    Args:
        setting: The cluster.
        placement: To begin with.
        estimated: What is expected of it.
        place: The search.
        interval_s: I_0, the first interval.
        load_bytes_per_s: Onto each GPU, from its host.
        is_adaptive: Change the interval by Eq. 8; else it stays.
    """

    def __init__(
        self,
        setting: Setting,
        placement: Placement,
        estimated: Score,
        place: Place,
        *,
        interval_s: float,
        load_bytes_per_s: float = 25e9,
        is_adaptive: bool = True,
    ) -> None:
        self._setting, self._search = setting, place
        self._placement = placement
        self._controller: Controller[Sequence[Arrival]] = Controller(
            estimated, interval_s=interval_s, num_gpus=setting.cluster.num_gpus,
            is_adaptive=is_adaptive,
        )  # fmt: skip
        self._bytes_per_s = load_bytes_per_s
        self._cluster = SharedCluster(setting, placement)
        self.intervals: list[Interval] = []

    def run(self, requests: Sequence[SharedRequest]) -> list[SharedRequest]:
        """Serve the requests, sorted by arrival, until each has ended; they are returned."""
        begin_s, position = 0.0, 0
        while position < len(requests):
            end_s = begin_s + self._controller.interval_s
            first = position
            while position < len(requests) and requests[position].arrival_s < end_s:
                request = requests[position]
                self._cluster.add(request, request.arrival_s)
                position += 1
            self._cluster.run_until(end_s)
            if position < len(requests):
                self._end_interval(requests, begin_s, end_s, requests[first:position])
            begin_s = end_s
        self._cluster.run([])
        return list(requests)

    def _end_interval(
        self,
        requests: Sequence[SharedRequest],
        begin_s: float,
        end_s: float,
        came: Sequence[SharedRequest],
    ) -> None:
        ended = [request for request in requests if begin_s < request.last_s <= end_s]
        real = sum(request.is_met for request in ended) / max(1, len(ended))
        estimated, num_changed = self._controller.estimated.attainment, 0
        if came:
            past = [(r.arrival_s - begin_s, r.service, r.prompt, r.output) for r in came]
            decision = self._controller.end_interval(
                self._placement, real if ended else None, past, self
            )
            if decision.is_new:
                num_changed = self._replace(decision.placement, end_s)
        self.intervals.append(Interval(begin_s, end_s, estimated, real, num_changed))

    def _replace(self, new: Placement, now_s: float) -> int:
        kept = Counter(self._placement.groups) & Counter(new.groups)
        self._cluster = self._cluster.replaced(new, now_s, self.load_s)
        self._placement = new
        return len(new.groups) - sum(kept.values())

    def place(self, past: Sequence[Arrival]) -> Placement:
        """See `Placer`."""
        return self._search(past)

    def score(self, placement: Placement, past: Sequence[Arrival]) -> Score:
        """See `Placer`."""
        return score(Evaluator(self._setting, past)(placement))

    def load_s(self, group: Group) -> float:
        """See `Placer`; the weights of all its services, one after the other."""
        return self._setting.load_s(group, self._bytes_per_s)


def expected(setting: Setting, placement: Placement, past: Sequence[Arrival]) -> Score:
    """What a placement is worth for past requests; (1, inf) if there were none."""
    return score(Evaluator(setting, past)(placement)) if past else Score(1.0, math.inf)
