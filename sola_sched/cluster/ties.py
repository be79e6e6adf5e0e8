"""What a router does where instances are as good as each other: it takes them in turn.

The first of equals, each time, would get all requests of a quiet hour, and its death would hit
them all. Engines learn their step times one by one, so the predictions of two idle ones are never
the same to the last digit: nearly equal is equal there. Where requests are, the least difference
counts: what it sends to one instance changes the next prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class Turns:
    """Whose turn it is, by positions: after the last one the next higher, then from the first."""

    def __init__(self) -> None:
        self._last = -1

    def next(self, tied: Collection[int]) -> int:
        """The one of these, not empty, whose turn it is."""
        later = [position for position in tied if position > self._last]
        self._last = min(later or tied)
        return self._last

    def least(
        self,
        positions: Sequence[int],
        costs: Sequence[float],
        num_requests: Callable[[int], float],
        *,
        ratio: float = 0.0,
        slack: float = 0.0,
    ) -> int:
        """One of the positions with the least cost; of equals one with the fewest requests.

        Args:
            positions: Not empty.
            costs: Of each.
            num_requests: On a position.
            ratio, slack: Of idle instances, costs above the least by this share of it and this much
                are equal to it.
        """
        least = min(costs)
        equal = {i: num_requests(i) for i, c in zip(positions, costs, strict=True) if c == least}
        fewest = min(equal.values())
        if fewest:
            return self.next([i for i, number in equal.items() if number == fewest])
        most = least + ratio * abs(least) + slack
        near = (i for i, cost in zip(positions, costs, strict=True) if cost <= most)
        return self.next([i for i in near if not num_requests(i)])
