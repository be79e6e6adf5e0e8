"""Rows of the requests that hold a slot, aligned with the engine's list of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np

from sola_sched.core.state import IntArray

#: So many requests may have gone between two looks; with more, all rows are looked up again.
_MAX_GONE = 8

_id_of = operator.attrgetter("request_id")


class _Named(Protocol):
    request_id: str


R = TypeVar("R", bound=_Named)


class RunningRows(Generic[R]):
    """Follows a list of which a few items go and to which a few are appended from step to step.

    Args:
        row_of: Row by request id.
    """

    def __init__(self, row_of: Mapping[str, int]) -> None:
        self._row_of = row_of
        self._requests: list[R] = []
        self._rows: IntArray = np.empty(0, dtype=np.int64)

    def of(self, running: list[R]) -> IntArray:
        """Rows of `running`, in its order: the same array as before if that is unchanged.

        Whether a request is the same is a question of identity, so that this holds whatever the
        engine has done with its list in between.
        """
        if running == self._requests:
            return self._rows
        stays = self._that_stay(running)
        if stays is None:
            self.put(running, self._looked_up(running))
        else:
            new = running[len(stays) :]
            rows = np.concatenate([stays, self._looked_up(new)]) if new else stays
            self.put(running, rows)
        return self._rows

    def put(self, running: list[R], rows: IntArray) -> None:
        """Tell the rows of `running`."""
        self._requests, self._rows = running.copy(), rows

    def _that_stay(self, running: list[R]) -> IntArray | None:
        """Rows of the requests that are there still, where `running` begins with them."""
        requests, rows = self._requests, self._rows
        parts, num_same = [], 0
        for _ in range(_MAX_GONE + 1):
            place = _first_difference(requests, running[num_same:])
            parts.append(rows[:place])
            num_same += place
            if place == len(requests):
                return np.concatenate(parts) if len(parts) > 1 else parts[0]
            requests, rows = requests[place + 1 :], rows[place + 1 :]
        return None

    def _looked_up(self, requests: list[R]) -> IntArray:
        return np.fromiter(map(self._row_of.__getitem__, map(_id_of, requests)), np.int64,
                           len(requests))  # fmt: skip


def _first_difference(one: list[R], other: list[R]) -> int:
    """Place from which two lists differ; found by halves, which are compared without a loop."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are the same, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
