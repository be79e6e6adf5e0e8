"""Groups on particular GPUs, and the order of changes in which nothing is lost (SeaLLM, 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from sola_sched.cluster.sharing.placement import Cluster, Group, Placement, gpus_of

#: Node and index there.
Gpu = tuple[int, int]


@dataclass(frozen=True)
class Seat:
    """A group with its GPUs, all of one node."""

    group: Group
    gpus: tuple[Gpu, ...]

    @property
    def node(self) -> int:
        """Where it is."""
        return self.gpus[0][0]

    def overlaps(self, other: Seat) -> bool:
        """Whether they share a GPU."""
        return not set(self.gpus).isdisjoint(other.gpus)


def seat(
    placement: Placement,
    cluster: Cluster,
    old: Sequence[Seat] = (),
    changed: Collection[str] = (),
) -> list[Seat]:
    """GPUs for each group that serves anybody; groups that there are already keep theirs.

    Where the GPUs that are left have no node with enough of them for a new group, all groups are
    seated anew.

    Args:
        placement: Who shares how many GPUs.
        cluster: The GPUs.
        old: The seats of before.
        changed: Services whose engines have to start anew, so that no group of them is kept.

    Raises:
        InfeasibleError: They do not fit.
    """
    groups = Counter(group for group in placement.groups if group.services)
    kept = []
    for one in old:
        if groups[one.group] and not set(one.group.services) & set(changed):
            groups[one.group] -= 1
            kept.append(one)
    used = {gpu for one in kept for gpu in one.gpus}
    busy = {gpu for one in old for gpu in one.gpus}
    free = [
        [(node, gpu) for gpu in range(cluster.gpus_per_node) if (node, gpu) not in used]
        for node in range(cluster.num_nodes)
    ]
    found = list(kept)
    for group in sorted(groups.elements(), key=lambda g: (-g.degree, g.services)):
        # Where the fewest must stop for it; then where the least room is left.
        best = min(
            (sorted(gpus, key=lambda gpu: gpu in busy)[: group.degree] for gpus in free
             if len(gpus) >= group.degree),
            key=lambda gpus: (sum(g in busy for g in gpus), len(free[gpus[0][0]])),
            default=None,
        )  # fmt: skip
        if best is None:
            whole = Placement(tuple(group for group in placement.groups if group.services))
            return [
                Seat(group, tuple(gpus))
                for group, gpus in zip(whole.groups, gpus_of(whole, cluster), strict=True)
            ]
        free[best[0][0]] = [gpu for gpu in free[best[0][0]] if gpu not in best]
        found.append(Seat(group, tuple(sorted(best))))
    return found


@dataclass(frozen=True)
class Move:
    """One step of a migration.

    Attributes:
        action: ``stop`` a group after its step under way, its requests waiting at the dispatcher or
            going to the service's other groups; ``start`` a group with its weights.
        seat: Which.
    """

    action: Literal["start", "stop"]
    seat: Seat


def moves(old: Sequence[Seat], new: Sequence[Seat], changed: Collection[str] = ()) -> list[Move]:
    """The steps from one seating to the other; seats that both have go on undisturbed.

    A group is stopped only for the GPUs of one that is still to be started, or once all have
    started; who leaves no service without a group goes first. So a service has groups whenever the
    GPUs allow it, and requests of one that has none for a while wait at the dispatcher.

    Args:
        old, new: Before and after.
        changed: Services whose engines have to start anew even on the same GPUs.
    """

    def is_anew(one: Seat) -> bool:
        return bool(set(one.group.services) & set(changed))

    stays = [one for one in new if one in old and not is_anew(one)]
    leaving = [one for one in old if one not in stays]
    coming = [one for one in new if one not in stays]
    running = Counter(name for one in old for name in one.group.services)
    found: list[Move] = []

    def blockers(one: Seat) -> list[Seat]:
        return [other for other in leaving if other.overlaps(one)]

    def harm(one: Seat) -> tuple[int, int, int]:
        after = running.copy()
        for other in blockers(one):
            after.subtract(other.group.services)
        bare = sum(
            after[name] <= 0 and name not in one.group.services
            for other in blockers(one)
            for name in other.group.services
        )
        helped = sum(running[name] <= 0 for name in one.group.services)
        return bare, -helped, len(blockers(one))

    while coming:
        chosen = min(coming, key=lambda one: (*harm(one), -one.group.degree, one.gpus))
        for other in blockers(chosen):
            leaving.remove(other)
            running.subtract(other.group.services)
            found.append(Move("stop", other))
        coming.remove(chosen)
        running.update(chosen.group.services)
        found.append(Move("start", chosen))
    return [*found, *(Move("stop", one) for one in leaving)]


def served_through(steps: Sequence[Move], old: Sequence[Seat]) -> dict[str, int]:
    """Least number of groups that each service has at any time of a migration; for checks.

    Raises:
        ValueError: A step needs GPUs that are not free, or stops what does not run.
    """
    running = list(old)
    least: dict[str, int] = {}

    def look() -> None:
        count = Counter(name for one in running for name in one.group.services)
        for name in {*least, *count}:
            least[name] = min(least.get(name, count[name]), count[name])

    look()
    for step in steps:
        if step.action == "stop":
            if step.seat not in running:
                raise ValueError(f"a group must run to be stopped (got {step.seat}).")
            running.remove(step.seat)
        else:
            if any(step.seat.overlaps(other) for other in running):
                raise ValueError(f"a step must need free GPUs (got {step.seat}).")
            running.append(step.seat)
        look()
    return least
