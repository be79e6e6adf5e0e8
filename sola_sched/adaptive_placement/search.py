"""Placements for the services as they are observed: the `Placer` of the controller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sola_sched.adaptive_placement.observe import Observed
from sola_sched.cluster.sharing.placement import Cluster, Group, Placement
from sola_sched.cluster.sharing.search import Problem, search
from sola_sched.cluster.sharing.turns import LeastSlack
from sola_sched.cluster.sharing.unserved import Score, score
from sola_sched.plan.inputs.descriptions import LENGTH_STD, make_arrivals, make_service
from sola_sched.plan.outputs.deploy import FIRST_PORT, LOOPBACK
from sola_sched.simulator.sharing.cluster import Arrival, Evaluator, Setting
from sola_sched.simulator.sharing.hardware import Hardware

#: Fewer requests than this say little of lengths.
_FEWEST = 20
#: A service without requests in an interval is taken to get half a one.
_HALF = 0.5


@dataclass(frozen=True)
class Options:
    """What is placed on.

    Attributes:
        gpu: A kind that `plan` knows.
        cluster: How many.
        most_sharing: Services of a group at most.
        num_workers: Processes of the search.
        seed: Of the requests that are made up for it.
        first_port: Of the services' gateways; each has one from there on.
        host: Address that these listen on.
    """

    gpu: str
    cluster: Cluster
    most_sharing: int = 2
    num_workers: int = 1
    seed: int = 0
    first_port: int = FIRST_PORT
    host: str = LOOPBACK


class Search:
    """See `controller.Placer`.

    Args:
        described: The services' keys as for `plan`, by name.
        observed: Of the last interval; a service that is not in it is as described.
        interval_s: How long that was, for services of which it is not observed.
        options: What is placed on.
        start_s: Seconds that an engine takes to start.

    Raises:
        ConfigError: A description is wrong.
        InfeasibleError: A service fits nowhere.
    """

    def __init__(
        self,
        described: Mapping[str, Mapping[str, Any]],
        observed: Mapping[str, Observed],
        interval_s: float,
        options: Options,
        start_s: float,
    ) -> None:
        services = [
            make_service(_as_observed(given, observed.get(name), interval_s), options.seed)
            for name, given in described.items()
        ]
        self.setting = Setting.of(services, Hardware(options.gpu), options.cluster, LeastSlack)
        # What no engine takes is the same wherever they are.
        self.past = [one for one in make_arrivals(services, options.seed) if one[2]]
        self._options, self._start_s = options, start_s

    def place(self, past: Sequence[Arrival]) -> Placement:
        """See `Placer`."""
        setting, options = self.setting, self._options
        problem = Problem(
            list(setting.services.values()), options.cluster, setting.hardware.fits,
            Evaluator(setting, past), options.most_sharing,
        )  # fmt: skip
        found = search(problem, options.num_workers).placement
        return Placement(tuple(group for group in found.groups if group.services))

    def score(self, placement: Placement, past: Sequence[Arrival]) -> Score:
        """See `Placer`; services that there are no more count as idle."""
        known = self.setting.services
        groups = (
            Group(group.degree, tuple(name for name in group.services if name in known))
            for group in placement.groups
        )
        return score(
            Evaluator(self.setting, past)(Placement(tuple(g for g in groups if g.services)))
        )

    def load_s(self, group: Group) -> float:
        """See `Placer`; engines of a group start beside each other."""
        return self._start_s


def _as_observed(
    given: Mapping[str, Any], seen: Observed | None, interval_s: float
) -> dict[str, Any]:
    """Rate and lengths as they were; `plan` takes medians of lognormals."""
    if seen is None:
        return dict(given)
    span_s = interval_s if seen.span_s is None else max(1.0, seen.span_s)
    found = dict(given) | {"rate": max(seen.num_requests, _HALF) / span_s}
    if seen.num_requests >= _FEWEST:
        of_mean = math.exp(-0.5 * LENGTH_STD**2)
        found["prompt"] = max(1.0, seen.mean_prompt * of_mean)
        found["output"] = max(1.0, seen.mean_output * of_mean)
    return found
