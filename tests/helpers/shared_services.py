"""Services on shared GPUs as simple queues: what a placement's search is tested with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sola_sched.cluster.sharing.placement import Cluster, Placement
from sola_sched.cluster.sharing.search import Problem
from sola_sched.cluster.sharing.services import Service, by_name
from sola_sched.cluster.sharing.unserved import ServiceOutcome

#: Memory that each model takes of a GPU's 1.0.
_SIZES = {"small": 0.3, "big": 1.5}


def make_service(name: str, model: str = "small", rate: float = 1.0) -> Service:
    return Service(name, model, rate, [(10, 10)])


def fits(degree: int, services: Sequence[Service]) -> bool:
    return sum(_SIZES[service.model] for service in services) <= degree


class Queueing:
    """Groups as queues: a service misses what its groups have no time for, the worse when shared.

    A GPU serves 10 requests a second, a degree of d GPUs d^0.9 as many.
    """

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = by_name(services)

    def __call__(self, placement: Placement) -> Mapping[str, ServiceOutcome]:
        missed = dict.fromkeys(self._services, 0.0)
        latency = dict(missed)
        for name, service in self._services.items():
            homes = placement.groups_of(name)
            if not homes:
                missed[name] = service.rate
            for home in homes:
                group = placement.groups[home]
                loads = {
                    other: self._services[other].rate / len(placement.groups_of(other))
                    for other in group.services
                }
                capacity = 10.0 * group.degree**0.9 / (1.0 + 0.1 * (len(loads) - 1))
                load = sum(loads.values()) / capacity
                missed[name] += loads[name] * max(0.0, 1.0 - 1.0 / load)
                latency[name] += loads[name] / max(0.05, 1.0 - load) / group.degree
        return {
            name: ServiceOutcome(
                round(1000 * s.rate), min(round(1000 * missed[name]), round(1000 * s.rate)),
                1000 * latency[name],
            )
            for name, s in self._services.items()
        }  # fmt: skip


def make_problem(services: Sequence[Service], num_gpus: int, most_sharing: int = 2) -> Problem:
    return Problem(services, Cluster.of(num_gpus, 8), fits, Queueing(services), most_sharing)
