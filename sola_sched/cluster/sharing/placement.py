"""Who shares which GPUs: the paper's P = {(S_i, G_i, p_i)} (SeaLLM, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sola_sched.cluster.sharing.services import Service
from sola_sched.errors import InfeasibleError

#: Whether so many GPUs hold the weights of these services and a longest request of each.
Fits = Callable[[int, Sequence[Service]], bool]


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs; no group reaches over two nodes."""

    num_nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InfeasibleError(f"'{name}' must be a whole number >= 1 (got {value!r}).")

    @classmethod
    def of(cls, num_gpus: int, gpus_per_node: int = 8) -> Cluster:
        """So many GPUs on nodes of `gpus_per_node`, or on one node if they are fewer."""
        if num_gpus > gpus_per_node and num_gpus % gpus_per_node:
            raise InfeasibleError(
                f"'num_gpus' must fill nodes of {gpus_per_node} (got {num_gpus}); "
                "give a multiple, or smaller nodes."
            )
        return cls(max(1, num_gpus // gpus_per_node), min(num_gpus, gpus_per_node))

    @property
    def num_gpus(self) -> int:
        """In all."""
        return self.num_nodes * self.gpus_per_node

    @property
    def degrees(self) -> list[int]:
        """Powers of two that a node holds: section 4.1's first heuristic."""
        return [1 << i for i in range(self.gpus_per_node.bit_length())]


@dataclass(frozen=True)
class Group:
    """A sharing group: services that take turns on the same GPUs, in tensor parallel.

    Attributes:
        degree: GPUs, all of which share each step.
        services: Names, sorted.
    """

    degree: int
    services: tuple[str, ...] = ()

    def plus(self, name: str) -> Group:
        """With one more service."""
        return Group(self.degree, tuple(sorted((*self.services, name))))


@dataclass(frozen=True)
class Placement:
    """All groups of a cluster. A service may be in several; its requests are then spread."""

    groups: tuple[Group, ...]

    @property
    def num_gpus(self) -> int:
        """Of all groups, empty ones included."""
        return sum(group.degree for group in self.groups)

    def groups_of(self, name: str) -> list[int]:
        """Positions of the groups that serve `name`."""
        return [i for i, group in enumerate(self.groups) if name in group.services]

    def unplaced(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that no group serves."""
        placed = {name for group in self.groups for name in group.services}
        return [name for name in names if name not in placed]

    def with_service(self, position: int, name: str) -> Placement:
        """With one more service in the group at `position`."""
        groups = list(self.groups)
        groups[position] = groups[position].plus(name)
        return Placement(tuple(groups))


def check(
    placement: Placement, services: Mapping[str, Service], cluster: Cluster, fits: Fits
) -> None:
    """Hold a placement against Eq. 3, Eq. 4 and the memory.

    Raises:
        InfeasibleError: A service is unknown or has no place, there are too few GPUs, or a group
            does not hold what it is given.
    """
    if placement.num_gpus > cluster.num_gpus:
        raise InfeasibleError(
            f"a placement must use at most {cluster.num_gpus} GPUs (got {placement.num_gpus})."
        )
    for group in placement.groups:
        if group.degree not in cluster.degrees:
            raise InfeasibleError(
                f"'degree' must be one of {cluster.degrees} on nodes of {cluster.gpus_per_node} "
                f"GPUs (got {group.degree})."
            )
        unknown = [name for name in group.services if name not in services]
        if unknown:
            raise InfeasibleError(
                f"a group must serve known services (got {unknown[0]!r}; known are "
                f"{', '.join(sorted(services))})."
            )
        if group.services and not fits(group.degree, [services[n] for n in group.services]):
            raise InfeasibleError(
                f"{group.degree} GPUs must hold the weights of {', '.join(group.services)} and a "
                "longest request of each (they do not); take a higher degree or fewer services."
            )
    missing = placement.unplaced(list(services))
    if missing:
        raise InfeasibleError(f"each service must have a place (got none for {missing}).")


def gpus_of(placement: Placement, cluster: Cluster) -> list[list[tuple[int, int]]]:
    """Node and index of each group's GPUs, in the order of the groups; none crosses a node.

    Raises:
        InfeasibleError: They do not fit.
    """
    free = [list(range(cluster.gpus_per_node)) for _ in range(cluster.num_nodes)]
    found: list[list[tuple[int, int]]] = [[] for _ in placement.groups]
    largest_first = sorted(
        range(len(placement.groups)), key=lambda i: (-placement.groups[i].degree, i)
    )
    for position in largest_first:
        degree = placement.groups[position].degree
        node = next((n for n, gpus in enumerate(free) if len(gpus) >= degree), None)
        if node is None:
            raise InfeasibleError(
                f"a group of {degree} GPUs must lie on one node of {cluster.gpus_per_node} "
                "(none has as many left)."
            )
        found[position] = [(node, gpu) for gpu in free[node][:degree]]
        del free[node][:degree]
    return found
