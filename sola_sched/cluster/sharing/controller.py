"""Decides at the end of each interval whether to place anew (SeaLLM, 4.3). Pure: no clock, no Ray.

The same decisions are taken in virtual time (`simulator.sharing.replaced`) and on Ray Serve
(`sola_sched.adaptive_placement`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sola_sched.cluster.sharing.placement import Group, Placement
from sola_sched.cluster.sharing.replacement import Replacement, next_interval_s
from sola_sched.cluster.sharing.unserved import Score

#: What is known of an interval's requests, as the placer takes it.
Past = TypeVar("Past", contravariant=True)


class Placer(Protocol[Past]):
    """The search and its simulator, with the services as they are now."""

    def place(self, past: Past) -> Placement:
        """The best placement for such requests.

        Raises:
            InfeasibleError: There is none.
        """

    def score(self, placement: Placement, past: Past) -> Score:
        """What a placement is worth for them."""

    def load_s(self, group: Group) -> float:
        """Seconds to load a group, during which it serves nobody."""


@dataclass(frozen=True)
class Decision:
    """What is to be done.

    Attributes:
        placement: From now on.
        is_new: Whether it is another one than before.
        reason: In words, for the log.
    """

    placement: Placement
    is_new: bool
    reason: str


class Controller(Generic[Past]):
    """Keeps the interval and what is expected of the placement that is in force.

    Args:
        estimated: Of the first placement.
        interval_s: I_0, the first interval.
        num_gpus: Of the cluster.
        is_adaptive: Change the interval by Eq. 8; else it stays.
    """

    def __init__(
        self, estimated: Score, *, interval_s: float, num_gpus: int, is_adaptive: bool = True
    ) -> None:
        self.estimated, self.interval_s = estimated, interval_s
        self._num_gpus, self._is_adaptive = num_gpus, is_adaptive

    def end_interval(
        self, now: Placement, real: float | None, past: Past, placer: Placer[Past]
    ) -> Decision:
        """An interval has ended.

        Args:
            now: The placement in force.
            real: Share of the requests that ended in it that met their targets; None for none.
            past: Its requests.
            placer: Finds and judges placements.

        Raises:
            InfeasibleError: No placement was found; everything is as before.
        """
        if real is not None and self._is_adaptive:
            self.interval_s = next_interval_s(self.interval_s, real, self.estimated.attainment)
        new = placer.place(past)
        here, there = placer.score(now, past), placer.score(new, past)
        cost = Replacement(placer.load_s)
        said = f"{here.attainment:.1%} expected as it is, {there.attainment:.1%} placed anew"
        if cost.is_worth((now, here), (new, there), self.interval_s, self._num_gpus):
            self.estimated = there
            return Decision(new, True, said)
        self.estimated = here
        return Decision(now, False, f"{said}: it stays")

    def services_changed(
        self, past: Past, placer: Placer[Past], fits: Callable[[Placement], bool], now: Placement
    ) -> Decision:
        """Services came, went or are others: place anew, whatever that costs.

        Args:
            past: Requests to expect.
            placer: With the services as they are now.
            fits: Whether a placement serves just these services.
            now: The placement in force, as far as it serves them.

        Raises:
            InfeasibleError: No placement was found.
        """
        new = placer.place(past)
        there = placer.score(new, past)
        if fits(now) and placer.score(now, past).missed <= there.missed:
            new, there = now, placer.score(now, past)
        self.estimated = there
        return Decision(new, new != now, f"services have changed, {there.attainment:.1%} expected")
