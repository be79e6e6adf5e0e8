"""Rows of the requests that hold a slot, aligned with the engine's list of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import compress, count
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

    @property
    def known(self) -> IntArray:
        """Rows of the list as it was when `of` or `put` was called last."""
        return self._rows

    def new_in(self, running: list[R]) -> list[R] | None:
        """Requests that have been appended to that list; None if it has changed otherwise."""
        num_known = len(self._requests)
        return running[num_known:] if running[:num_known] == self._requests else None

    def of(self, running: list[R]) -> IntArray:
        """Rows of `running`, in its order: the same array as before if that is unchanged.

        Whether a request is the same is a question of identity, so that this holds whatever the
        engine has done with its list in between.
        """
        if running != self._requests:
            parts = self._that_stay(running)
            new = running[sum(map(len, parts)) :]
            if new:
                parts.append(self._looked_up(new))
            self.put(running, np.concatenate(parts) if parts else self._rows[:0])
        return self._rows

    def put(self, running: list[R], rows: IntArray) -> None:
        """Tell the rows of `running`."""
        self._requests, self._rows = running.copy(), rows

    def _that_stay(self, running: list[R]) -> list[IntArray]:
        """Rows, in parts, of the requests that `running` begins with and that were there before.

        None of them where too many have gone.
        """
        requests, rows = self._requests, self._rows
        parts: list[IntArray] = []
        while running[: len(requests)] != requests:
            if len(parts) == _MAX_GONE:
                return []
            differs = compress(count(), map(operator.is_not, requests, running))
            place = next(differs, len(running))  # the one that was there has gone
            parts.append(rows[:place])
            requests, rows, running = requests[place + 1 :], rows[place + 1 :], running[place:]
        return [*parts, rows]

    def _looked_up(self, requests: list[R]) -> IntArray:
        return np.fromiter(map(self._row_of.__getitem__, map(_id_of, requests)), np.int64,
                           len(requests))  # fmt: skip
