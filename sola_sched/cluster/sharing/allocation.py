"""Algorithm 1 for one degree: GPU groups, then services, the least served first (section 4.1).

Departures from the paper:

- A group that was merged because a service needs its size is kept for such services until all of
  them have a place. As printed, the algorithm gives it to whoever is least served.
- While services have no place, a second group for one that has is taken only if enough room is
  left for the others. As printed, replicas of the busiest may leave no room for the last. If that
  leaves some without a place all the same, only room that one of them can take is counted.
- The best placement of all steps is kept. As printed, services are added until nothing fits, and
  a replica too many costs those that are there already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sola_sched.cluster.sharing.placement import Cluster, Fits, Group, Placement
from sola_sched.cluster.sharing.services import Service
from sola_sched.cluster.sharing.unserved import Evaluate, Score, score, unserved_index
from sola_sched.errors import InfeasibleError


def least_degree(service: Service, cluster: Cluster, fits: Fits) -> int:
    """GPUs that the service needs at least.

    Raises:
        InfeasibleError: It fits on no node.
    """
    for degree in cluster.degrees:
        if fits(degree, [service]):
            return degree
    raise InfeasibleError(
        f"service {service.name!r} must fit on the GPUs of a node (its model {service.model} and "
        f"one request of {service.longest} tokens do not fit on {cluster.degrees[-1]}); take "
        "larger GPUs, a smaller model, or shorter requests."
    )


def partition(
    services: Sequence[Service], cluster: Cluster, degree: int, most_sharing: int, fits: Fits
) -> tuple[Group, ...]:
    """Empty groups of one degree, of which as many are merged as large services need.

    Raises:
        InfeasibleError: A service fits nowhere, or there are too few GPUs for the large ones.
    """
    large: list[list[Service]] = []  # of each merged group
    sizes: list[int] = []
    needs = [(least_degree(service, cluster, fits), service) for service in services]
    for need, service in sorted(needs, key=lambda pair: (-pair[0], pair[1].name)):
        if need <= degree:
            continue
        for held, size in zip(large, sizes, strict=True):
            if size >= need and len(held) < most_sharing and fits(size, [*held, service]):
                held.append(service)
                break
        else:
            large.append([service])
            sizes.append(need)
    left = cluster.num_gpus - sum(sizes)
    if left < 0:
        raise InfeasibleError(
            f"{cluster.num_gpus} GPUs must hold the services that need more than {degree} GPUs "
            f"each (they need {sum(sizes)}); add GPUs or let more services share."
        )
    return (*(Group(size) for size in sizes), *(Group(degree) for _ in range(left // degree)))


def allocate(
    services: Mapping[str, Service],
    groups: Sequence[Group],
    most_sharing: int,
    fits: Fits,
    evaluate: Evaluate,
    cluster: Cluster,
    enough: float = 1.0,
) -> tuple[Score, Placement]:
    """The second stage, lines 8 to 18 of Algorithm 1.

    Args:
        services: By name.
        groups: Empty.
        most_sharing: Services of a group at most; 1 gives each group to one service.
        fits: Memory.
        evaluate: What a placement does to the services.
        cluster: For the degrees.
        enough: See `score`.

    Returns:
        The best placement of all steps with the fewest services left out, by `Score`. Some are
        left out only if they did not fit beside the others.
    """

    def tried(is_strict: bool) -> tuple[Score, Placement]:
        return _allocate(services, groups, most_sharing, fits, evaluate, cluster, enough, is_strict)

    found = tried(False)
    return tried(True) if found[1].unplaced(list(services)) else found


def _allocate(
    services: Mapping[str, Service],
    groups: Sequence[Group],
    most_sharing: int,
    fits: Fits,
    evaluate: Evaluate,
    cluster: Cluster,
    enough: float,
    is_strict: bool,
) -> tuple[Score, Placement]:
    """See `allocate`; `is_strict` counts as room only what a service without a place can take."""
    placement = Placement(tuple(groups))
    least = {s.name: least_degree(s, cluster, fits) for s in services.values()}
    smallest = min(group.degree for group in groups)
    outcomes = evaluate(placement)
    best, least_left = (score(outcomes, enough), placement), len(services)
    while True:
        found = _next(placement, services, outcomes, most_sharing, fits, least, smallest, is_strict)
        if found is None:
            return best
        placement = placement.with_service(*found)
        outcomes = evaluate(placement)
        here, left = score(outcomes, enough), len(placement.unplaced(list(services)))
        if (left, here) < (least_left, best[0]):
            best, least_left = (here, placement), left


def _next(
    placement: Placement,
    services: Mapping[str, Service],
    outcomes: Mapping[str, object],
    most_sharing: int,
    fits: Fits,
    least: Mapping[str, int],
    smallest: int,
    is_strict: bool,
) -> tuple[int, str] | None:
    """The group with the lowest rate that takes a service, and the least served one it takes."""
    unplaced = set(placement.unplaced(list(services)))
    large = {name for name in unplaced if least[name] > smallest}
    index = {name: unserved_index(outcomes[name]) for name in services}  # type: ignore[arg-type]
    order = sorted(services, key=lambda name: (-index[name], name))
    room = sum(
        most_sharing - len(group.services)
        for group in placement.groups
        if not is_strict or _takes_any(group, unplaced, services, most_sharing, fits)
    )
    if room <= len(unplaced):
        order = [name for name in order if name in unplaced]
    rates = [_rate(placement, services, i) for i in range(len(placement.groups))]
    for position in sorted(range(len(rates)), key=lambda i: (rates[i], i)):
        group = placement.groups[position]
        if len(group.services) >= most_sharing:
            continue
        held = [services[name] for name in group.services]
        for name in order:
            if name in group.services or (large and group.degree > smallest and name not in large):
                continue
            if fits(group.degree, [*held, services[name]]):
                return position, name
    return None


def _takes_any(
    group: Group,
    names: Collection[str],
    services: Mapping[str, Service],
    most_sharing: int,
    fits: Fits,
) -> bool:
    held = [services[name] for name in group.services]
    return len(held) < most_sharing and any(
        fits(group.degree, [*held, services[name]]) for name in names
    )


def _rate(placement: Placement, services: Mapping[str, Service], position: int) -> float:
    """Requests per second and GPU that a group gets, those of a service spread evenly."""
    group = placement.groups[position]
    total = sum(services[n].rate / len(placement.groups_of(n)) for n in group.services)
    return total / group.degree
