"""The systems of SeaLLM's section 6.1 on one simulator: a turn rule and a placement each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharing.workload import Traffic, gpu_seconds
from sola_sched.cluster.sharing.allocation import least_degree, partition
from sola_sched.cluster.sharing.placement import Cluster, Group, Placement, check
from sola_sched.cluster.sharing.queue import SharedRequest
from sola_sched.cluster.sharing.search import Problem, search
from sola_sched.cluster.sharing.turns import (
    DoublingBudget,
    FirstCome,
    LeastSlack,
    RoundRobin,
    SkipJoin,
    TurnRule,
)
from sola_sched.cluster.sharing.unserved import score
from sola_sched.errors import InfeasibleError
from sola_sched.simulator.sharing.cluster import Evaluator, Setting, SharedCluster
from sola_sched.simulator.sharing.hardware import Hardware

#: Tokens of a step, of every engine.
CHUNK = 2048


@dataclass(frozen=True)
class System:
    """One line of the tables.

    Attributes:
        name: Shown.
        rule: Between services of a group.
        most_sharing: Services of a group; 0 gives each the same number of GPUs.
    """

    name: str
    rule: Callable[[], TurnRule]
    most_sharing: int = 2


SYSTEMS = (
    System("vLLM, even", FirstCome, 0),
    System("vLLM, placed", FirstCome, 1),
    System("AlpaServe", FirstCome),
    System("MuxServe", RoundRobin),
    System("MLFQ", SkipJoin),
    System("SeaLLM", DoublingBudget),
    System("slack", LeastSlack),
)
"""Baselines first. All but the first are placed by Algorithm 1 with their own rule inside."""


def place(
    system: System, traffic: Traffic, num_gpus: int, *, how: str = "searched", enough: float = 1.0
) -> tuple[Setting, Placement]:
    """Where the system puts the services, by what it saw of them before.

    Args:
        system: Which.
        traffic: Of the services.
        num_gpus: GPUs.
        how: ``searched`` by Algorithm 1; by mean loads alone, with replicas (``load``) or without
            (``once``).
        enough: See `score`.

    Raises:
        InfeasibleError: It finds no place for one of them.
    """
    cluster = Cluster.of(num_gpus)
    setting = Setting.of(traffic.services, Hardware(), cluster, system.rule, CHUNK)
    evaluate = Evaluator(setting, traffic.past)
    if not system.most_sharing:
        return setting, even(setting, evaluate)
    if how != "searched":
        return setting, by_load(setting, system.most_sharing, has_replicas=how == "load")
    fits = setting.hardware.fits
    problem = Problem(traffic.services, cluster, fits, evaluate, system.most_sharing, enough)
    return setting, search(problem).placement


def even(setting: Setting, evaluate: Evaluator) -> Placement:
    """As many GPUs for each service, in the tensor parallel degree that is best for it.

    Raises:
        InfeasibleError: One does not fit on its share.
    """
    share = setting.cluster.num_gpus // len(setting.services)
    groups: list[Group] = []
    for name, service in setting.services.items():
        choices = [
            tuple([Group(degree, (name,))] * (share // degree))
            for degree in setting.cluster.degrees
            if degree <= share and setting.hardware.fits(degree, [service])
        ]
        if not choices:
            raise InfeasibleError(f"{share} GPUs must hold {service.model} (they do not).")
        scores = [score({name: evaluate(Placement(own))[name]}) for own in choices]
        groups += choices[scores.index(min(scores))]
    return Placement(tuple(groups))


def by_load(setting: Setting, most_sharing: int, *, has_replicas: bool) -> Placement:
    """The heaviest service to the group with the least load: no simulator.

    So does MuxServe's greedy placement (Duan et al. 2024) where a group's throughput is what its
    GPUs have time for; there each service has one group.

    Args:
        setting: The cluster.
        most_sharing: Services of a group.
        has_replicas: Whether room that is left is filled with further groups of the heaviest; else
            groups are as large as they can be.

    Raises:
        InfeasibleError: One does not fit.
    """
    services, fits, cluster = setting.services, setting.hardware.fits, setting.cluster
    wanted = math.ceil(len(services) / most_sharing)
    degree = 1
    while not has_replicas and 2 * degree * wanted <= cluster.num_gpus:
        degree *= 2
    groups = list(partition(list(services.values()), cluster, degree, most_sharing, fits))
    work = {
        name: service.rate * gpu_seconds(service.model, service.lengths)
        for name, service in services.items()
    }
    homes = dict.fromkeys(services, 0)
    while (found := _next(setting, groups, work, homes, most_sharing)) is not None:
        position, name = found
        if homes[name] and not has_replicas:
            break
        groups[position] = groups[position].plus(name)
        homes[name] += 1
    placement = Placement(tuple(groups))
    check(placement, services, cluster, fits)
    return placement


def _next(
    setting: Setting,
    groups: Sequence[Group],
    work: Mapping[str, float],
    homes: Mapping[str, int],
    most_sharing: int,
) -> tuple[int, str] | None:
    """A group and the service it takes: without a place, then large, then heavy ones first."""
    services, fits = setting.services, setting.hardware.fits

    def order(name: str) -> tuple[bool, int, float]:
        is_placed = homes[name] > 0
        least = 0 if is_placed else least_degree(services[name], setting.cluster, fits)
        return is_placed, -least, -work[name] / (homes[name] + 1)

    def load(position: int) -> float:
        group = groups[position]
        return sum(work[name] / homes[name] for name in group.services) / group.degree

    for name in sorted(services, key=order):
        for position in sorted(range(len(groups)), key=load):
            group = groups[position]
            held = [services[other] for other in (*group.services, name)]
            is_new = name not in group.services and len(held) <= most_sharing
            if is_new and fits(group.degree, held):
                return position, name
    return None


def measure(setting: Setting, requests: Sequence[SharedRequest]) -> dict[str, float]:
    """What the paper measures, of requests that have all ended.

    Normalized latency, P99 of the latency in seconds, attainment, mean TTFT in seconds, mean TPOT
    in milliseconds.
    """
    latency_s = np.array([request.latency_s for request in requests])
    mean_s = np.array([setting.profiles[request.service].mean_s for request in requests])
    tpot_s = [(r.last_s - r.first_s) / (r.output - 1) for r in requests if r.output > 1]
    return {
        "norm": float(np.mean(latency_s / mean_s)),
        "p99": float(np.percentile(latency_s, 99)),
        "attained": float(np.mean([request.is_met for request in requests])),
        "ttft": float(np.mean([r.first_s - r.arrival_s for r in requests])),
        "tpot": 1e3 * float(np.mean(tpot_s)),
    }


def run(
    system: System, traffic: Traffic, num_gpus: int, change: Callable[[Any], Any] = list
) -> dict[str, float] | None:
    """Place by the past and serve the run; None where there is no place.

    Args:
        system: Which.
        traffic: Of the services.
        num_gpus: GPUs.
        change: What the run is made of the traffic's arrivals by.
    """
    placed = _placed(system, _Key(traffic), num_gpus)
    if placed is None:
        return None
    setting, placement = placed
    requests = setting.requests(change(traffic.arrivals))
    return measure(setting, SharedCluster(setting, placement).run(requests))


class _Key:
    """Traffic by identity: it is large, and each is made once."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def __hash__(self) -> int:
        return id(self.traffic)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.traffic is self.traffic


@functools.lru_cache(maxsize=64)
def _placed(system: System, key: _Key, num_gpus: int) -> tuple[Setting, Placement] | None:
    try:
        return place(system, key.traffic, num_gpus)
    except InfeasibleError:
        return None
