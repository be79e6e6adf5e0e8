"""Grouped distributed scheduling: many small fleets, each with a placement of its own.

Source: Aladdin, Appendix A. Requests are dealt out to groups in turn; each group places among its
own instances. A group needs 1 / (2 e) instances so that the instances wasted stay below the share
e, and no more requests per second than its placement can place in the time allowed:

    1 / (2 e) <= r_i <= r(T_s),    sum of r_i = r_a                             (Eq. 8)

The paper writes both bounds for the rate r_i; the text derives the lower one for the number of
instances, and it is used so here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sola_sched.cluster.placement.best_fit import best_fit, least_pressed
from sola_sched.cluster.placement.demand import Demand
from sola_sched.cluster.placement.fleet import Fleet
from sola_sched.errors import ConfigError, InfeasibleError


def group_sizes(
    num_instances: int, rate_per_s: float, *, extra_ratio: float, rate_limit_per_s: float
) -> list[int]:
    """Instances of each group: as few groups as the rate allows (Eq. 8).

    Args:
        num_instances: N_w, >= 1.
        rate_per_s: r_a, requests per second in all, >= 0.
        extra_ratio: e, the share of extra instances accepted, in (0, 1].
        rate_limit_per_s: r(T_s), what one placement can place, requests per second, > 0.

    Raises:
        ConfigError: A value is out of its range.
        InfeasibleError: The two bounds exclude each other; the message has both.
    """
    for name, value, ok in (
        ("num_instances", num_instances, num_instances >= 1),
        ("rate_per_s", rate_per_s, 0.0 <= rate_per_s < math.inf),
        ("extra_ratio", extra_ratio, 0.0 < extra_ratio <= 1.0),
        ("rate_limit_per_s", rate_limit_per_s, 0.0 < rate_limit_per_s < math.inf),
    ):
        if not ok:
            raise ConfigError(f"'{name}' is out of range (got {value!r}).")
    least = math.ceil(1.0 / (2.0 * extra_ratio) - 1e-9)
    num_groups = max(1, math.ceil(rate_per_s / rate_limit_per_s))
    most_groups = max(1, num_instances // least)
    if num_groups > most_groups:
        raise InfeasibleError(
            f"{rate_per_s:g} requests/s need {num_groups} groups of at most {rate_limit_per_s:g} "
            f"requests/s, and {num_instances} instances make {most_groups} groups of {least} or "
            f"more, {num_groups - most_groups} too few; accept more than "
            f"{100 * extra_ratio:g} % extra instances or a slower placement."
        )
    small, larger = divmod(num_instances, num_groups)
    return [small + (k < larger) for k in range(num_groups)]


class GroupedFleet:
    """Fleets that requests are dealt out to, in proportion to their instances.

    Args:
        fleets: The groups.
        is_relative: As for `best_fit`.
    """

    def __init__(self, fleets: Sequence[Fleet], *, is_relative: bool = False) -> None:
        if not fleets:
            raise ConfigError("'fleets' must have a group (got none).")
        self.fleets = list(fleets)
        self._is_relative = is_relative
        self._turns = _turns([len(fleet) for fleet in self.fleets])
        self._turn = 0

    def place(self, demand: Demand) -> tuple[int, int] | None:
        """Group and instance of the request, which the fleet takes; None if its group is full.

        Where its group has no room a second one is asked, the next in turn.
        """
        for _ in range(min(2, len(self.fleets))):
            group = self._next_group()
            i = best_fit(self.fleets[group], demand, is_relative=self._is_relative)
            if i is not None:
                self.fleets[group].add(i, demand)
                return group, i
        return None

    def place_anyway(self, demand: Demand) -> tuple[int, int]:
        """Where a request goes that fits nowhere: the least pressed instance of the next group."""
        group = self._next_group()
        i = least_pressed(self.fleets[group], demand)
        if i is None:
            raise InfeasibleError(f"Group {group} has no instance that takes requests.")
        self.fleets[group].add(i, demand)
        return group, i

    def _next_group(self) -> int:
        group = self._turns[self._turn]
        self._turn = (self._turn + 1) % len(self._turns)
        return group


def _turns(sizes: Sequence[int]) -> list[int]:
    """The groups in turn, each as often as it has instances, evenly spread."""
    divisor = math.gcd(*sizes)
    due = [((k + 0.5) * divisor / size, g) for g, size in enumerate(sizes)
           for k in range(size // divisor)]  # fmt: skip
    return [g for _, g in sorted(due)]
