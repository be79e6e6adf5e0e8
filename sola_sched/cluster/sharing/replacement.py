"""When to place anew, and whether it is worth its cost (SeaLLM, section 4.3)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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
