"""When to place anew, what changes, and in which order nothing is lost (SeaLLM, 4.3 and 5)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sola_sched.cluster.sharing.placement import Group, Placement
from sola_sched.cluster.sharing.unserved import Score

#: beta of Eq. 8, as in section 6.1.
BETA = 0.1


def next_interval_s(interval_s: float, real: float, estimated: float, beta: float = BETA) -> float:
    """Eq. 8: shorter by beta if what was achieved is off by more than beta, else longer.

    Where both are equal to a share of beta the paper leaves the interval open; it stays.

    Args:
        interval_s: The interval that has ended.
        real: What was achieved in it, e.g. attainment.
        estimated: What the placement's search had expected of it.
        beta: In (0, 1).

    Raises:
        ValueError: A number is out of its range.
    """
    if not (interval_s > 0.0 and math.isfinite(interval_s)):
        raise ValueError(f"'interval_s' must be finite and > 0 (got {interval_s!r}).")
    if not 0.0 < beta < 1.0:
        raise ValueError(f"'beta' must be in (0, 1) (got {beta!r}).")
    if not (math.isfinite(real) and math.isfinite(estimated) and real >= 0.0 <= estimated):
        raise ValueError(
            f"'real' and 'estimated' must be finite and >= 0 (got {real!r} and {estimated!r})."
        )
    gap = abs(real - estimated)
    if gap > beta * estimated:
        return (1.0 - beta) * interval_s
    return (1.0 + beta) * interval_s if gap < beta * estimated else interval_s


@dataclass(frozen=True)
class Step:
    """One step of a migration.

    Attributes:
        action: ``stop`` a group after its step under way, its requests waiting at the dispatcher;
            ``start`` a group with its weights.
        group: Which.
    """

    action: Literal["start", "stop"]
    group: Group


def migration(old: Placement, new: Placement, num_gpus: int) -> list[Step]:
    """The steps from one placement to the other; groups that both have go on undisturbed.

    A group is started as soon as the GPUs for it are free, and one is stopped only for the GPUs of
    those that are still to be started, or once all of them have started. So a service has groups
    whenever GPUs allow it, and requests of one that has none for a while wait at the dispatcher.

    Args:
        old, new: Before and after.
        num_gpus: Of the cluster; those that `old` leaves empty are used first.

    Raises:
        ValueError: A placement has more GPUs than there are.
    """
    for name, placement in (("old", old), ("new", new)):
        used = sum(group.degree for group in placement.groups if group.services)
        if used > num_gpus:
            raise ValueError(f"'{name}' must use at most {num_gpus} GPUs (got {used}).")
    leaving, coming = changes(old, new)
    running = Counter(name for group in old.groups for name in group.services)
    free = num_gpus - sum(group.degree for group in old.groups if group.services)
    steps: list[Step] = []
    # Services without a group in the meantime come first, then large groups.
    for group in sorted(coming, key=lambda g: (-g.degree, g.services)):
        while free < group.degree:
            # The group whose services have the most others.
            victim = max(
                leaving, key=lambda g: (min(running[name] for name in g.services), -g.degree)
            )
            leaving.remove(victim)
            running.subtract(victim.services)
            free += victim.degree
            steps.append(Step("stop", victim))
        steps.append(Step("start", group))
        running.update(group.services)
        free -= group.degree
    return [*steps, *(Step("stop", group) for group in leaving)]


def changes(old: Placement, new: Placement) -> tuple[list[Group], list[Group]]:
    """Groups with services that only the old placement has, and that only the new one has."""
    before, after = (Counter(g for g in p.groups if g.services) for p in (old, new))
    return list((before - after).elements()), list((after - before).elements())


@dataclass(frozen=True)
class Replacement:
    """Whether a placement is worth what changing to it costs.

    Attributes:
        load_s: Seconds to load a group, during which it serves nobody.
    """

    load_s: Callable[[Group], float]

    def outage(self, old: Placement, new: Placement) -> float:
        """Seconds times GPUs that serve nobody: weights are loaded and KV is computed again.

        The paper pulls weights beside serving, into host memory; from there onto the GPU it takes
        the time of `load_s`, and that is counted.
        """
        _, coming = changes(old, new)
        return sum(group.degree * self.load_s(group) for group in coming)

    def is_worth(
        self,
        old: tuple[Placement, Score],
        new: tuple[Placement, Score],
        interval_s: float,
        num_gpus: int,
    ) -> bool:
        """Whether the attainment gained in an interval outweighs the share of it that is lost.

        The paper takes every new placement. Here one that promises too little is not taken: of
        the requests of an interval, the share of GPU time that changing takes counts as missed.
        """
        if old[0] == new[0]:
            return False
        lost = self.outage(old[0], new[0]) / (num_gpus * interval_s)
        gained = old[1].missed - new[1].missed
        if gained > lost:
            return True
        return lost < 1e-3 and gained >= 0.0 and new[1].latency < (1.0 - BETA) * old[1].latency


def served_through(steps: Sequence[Step], old: Placement, num_gpus: int) -> dict[str, int]:
    """Least number of groups that each service has at any time of a migration; for checks.

    Raises:
        ValueError: A step needs GPUs that are not free, or stops what does not run.
    """
    running = Counter(g for g in old.groups if g.services)
    least: dict[str, int] = {}

    def look() -> None:
        count = Counter(n for group in running.elements() for n in group.services)
        for name in {*least, *count}:
            least[name] = min(least.get(name, count[name]), count[name])

    look()
    for step in steps:
        if step.action == "stop":
            if not running[step.group]:
                raise ValueError(f"a group must run to be stopped (got {step.group}).")
            running[step.group] -= 1
        else:
            running[step.group] += 1
            used = sum(group.degree for group in running.elements())
            if used > num_gpus:
                raise ValueError(f"a step must need at most {num_gpus} GPUs (got {used}).")
        look()
    return least
