"""Algorithm 1 over all degrees and numbers of sharing services, in parallel (section 4.1, 5)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from sola_sched.cluster.sharing.allocation import allocate, partition
from sola_sched.cluster.sharing.placement import Cluster, Fits, Placement
from sola_sched.cluster.sharing.services import Service, by_name
from sola_sched.cluster.sharing.unserved import Evaluate, Score
from sola_sched.errors import InfeasibleError


@dataclass(frozen=True)
class Found:
    """A placement that a search found.

    Attributes:
        placement: Where each service goes.
        score: What it is worth, by the search's evaluation.
        degree: Of the groups that were not merged.
        most_sharing: Services of a group at most.
    """

    placement: Placement
    score: Score
    degree: int
    most_sharing: int


@dataclass(frozen=True)
class Problem:
    """What is searched. With several processes it is pickled, and so are `fits` and `evaluate`.

    Attributes:
        services: All of them.
        cluster: The GPUs.
        fits: Memory.
        evaluate: What a placement does to the services.
        most_sharing: Services of a group at most; the paper has 2, for lack of memory.
        enough: Attainment above which placements differ by latency alone; 1 is Algorithm 1.
    """

    services: Sequence[Service]
    cluster: Cluster
    fits: Fits
    evaluate: Evaluate
    most_sharing: int = 2
    enough: float = 1.0

    def __post_init__(self) -> None:
        if self.most_sharing < 1:
            raise InfeasibleError(
                f"'most_sharing' must be >= 1 (got {self.most_sharing}); 1 shares nothing."
            )


def search(problem: Problem, num_workers: int = 1) -> Found:
    """The best placement of Algorithm 1.

    Each degree is tried with each number of sharing services, as the paper's eight processes do.

    Args:
        problem: What is searched.
        num_workers: Processes.

    Raises:
        ConfigError: Two services have one name, or there is none.
        InfeasibleError: No degree gives each service a place.
    """
    services = by_name(problem.services)
    patterns = [
        (degree, sharing)
        for degree in reversed(problem.cluster.degrees)
        for sharing in range(1, problem.most_sharing + 1)
    ]
    found = _each(problem, patterns, num_workers)
    whole = [one for one in found if one and not one.placement.unplaced(list(services))]
    if not whole:
        raise InfeasibleError(_why(problem, services, patterns))
    return min(whole, key=lambda one: (one.score, one.degree, one.most_sharing))


def try_pattern(problem: Problem, pattern: tuple[int, int]) -> Found | None:
    """The best placement of one degree and number of sharing services; None where none fits."""
    degree, sharing = pattern
    services = by_name(problem.services)
    try:
        groups = partition(list(services.values()), problem.cluster, degree, sharing, problem.fits)
        value, placement = allocate(
            services, groups, sharing, problem.fits, problem.evaluate, problem.cluster,
            problem.enough,
        )  # fmt: skip
    except InfeasibleError:
        return None
    return Found(placement, value, degree, sharing)


def _each(
    problem: Problem, patterns: Sequence[tuple[int, int]], num_workers: int
) -> list[Found | None]:
    if num_workers <= 1:
        return [try_pattern(problem, pattern) for pattern in patterns]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _keep, (problem,)) as pool:
        return list(pool.map(_try_kept, patterns))


_kept: list[Problem] = []  # of a worker process


def _keep(problem: Problem) -> None:
    _kept[:] = [problem]


def _try_kept(pattern: tuple[int, int]) -> Found | None:
    return try_pattern(_kept[0], pattern)


def _why(
    problem: Problem, services: Mapping[str, Service], patterns: Sequence[tuple[int, int]]
) -> str:
    for pattern in patterns:
        try:
            partition(list(services.values()), problem.cluster, *pattern, problem.fits)
        except InfeasibleError as error:
            reason = str(error)
        else:
            break
    else:
        return reason
    return (
        f"{problem.cluster.num_gpus} GPUs must have a place for all {len(services)} services with "
        f"at most {problem.most_sharing} on the same GPUs (no partition has); add GPUs or let "
        "more services share."
    )
