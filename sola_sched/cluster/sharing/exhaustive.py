"""Every placement of a small cluster, to see how far Algorithm 1 is from the best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from sola_sched.cluster.sharing.placement import Group, Placement
from sola_sched.cluster.sharing.search import Found, Problem
from sola_sched.cluster.sharing.services import by_name
from sola_sched.cluster.sharing.unserved import score
from sola_sched.errors import InfeasibleError

#: Placements that are tried at most: past that the search would not end.
MOST_PLACEMENTS = 200_000


def search_exhaustively(problem: Problem) -> Found:
    """The best placement of all, groups of unequal degrees and replicas included.

    Raises:
        InfeasibleError: None gives each service a place, or there are more than
            `MOST_PLACEMENTS`.
    """
    names = sorted(by_name(problem.services))
    best: Found | None = None
    for number, placement in enumerate(placements(problem)):
        if number >= MOST_PLACEMENTS:
            raise InfeasibleError(
                f"an exhaustive search must have at most {MOST_PLACEMENTS:,} placements (there "
                "are more); take fewer GPUs or services."
            )
        if placement.unplaced(names):
            continue
        value = score(problem.evaluate(placement))
        if best is None or value < best.score:
            degree = min(group.degree for group in placement.groups)
            best = Found(placement, value, degree, problem.most_sharing)
    if best is None:
        raise InfeasibleError(
            f"{problem.cluster.num_gpus} GPUs must have a place for all {len(names)} services "
            "(no placement has); add GPUs or let more services share."
        )
    return best


def placements(problem: Problem) -> Iterator[Placement]:
    """All placements up to the order of groups, each service at most once in a group.

    GPUs may be left empty.
    """
    services = by_name(problem.services)
    cluster = problem.cluster
    subsets: dict[int, list[Group]] = {}
    for degree in cluster.degrees:
        subsets[degree] = [Group(degree)] + [
            Group(degree, held)
            for size in range(1, problem.most_sharing + 1)
            for held in itertools.combinations(sorted(services), size)
            if problem.fits(degree, [services[name] for name in held])
        ]
    for sizes in _partitions(cluster.num_gpus, cluster.degrees):
        choices = [
            itertools.combinations_with_replacement(subsets[degree], len(list(same)))
            for degree, same in itertools.groupby(sizes)
        ]
        for groups in itertools.product(*choices):
            yield Placement(tuple(itertools.chain.from_iterable(groups)))


def _partitions(total: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as a sum of degrees, the largest first."""
    if not total:
        yield ()
        return
    for degree in sorted(degrees, reverse=True):
        if degree <= total:
            smaller = [other for other in degrees if other <= degree]
            for rest in _partitions(total - degree, smaller):
                yield (degree, *rest)
