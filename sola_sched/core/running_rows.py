"""Rows of the requests that hold a slot, aligned with the engine's list of them."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np

from sola_sched.core.state import IntArray

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
        self._numbers = array("q")  # the same rows, to be changed
        self._is_changed = False  # since `_rows` was made

    @property
    def known(self) -> IntArray:
        """Rows of the list as it was when `of` or `put` was called last, less those that left."""
        if self._is_changed:
            self._rows, self._is_changed = np.array(self._numbers), False
        return self._rows

    def left(self, row: int) -> None:
        """Tell that the request in this row is not in the list any more.

        Nobody need tell: without it, all rows of the list are looked up again.
        """
        try:
            place = self._numbers.index(row)
        except ValueError:  # it waited
            return
        del self._numbers[place], self._requests[place]
        self._is_changed = True

    def take_new(self, running: list[R], count: int) -> list[int] | None:
        """Rows of those that have been appended to that list, which are known from now on.

        Args:
            running: The list.
            count: So many of it count, from the front; those behind may come and go.

        Returns:
            None, and nothing is known but what was, if it has changed otherwise.
        """
        num_known = len(self._requests)
        if running[:num_known] != self._requests:
            return None
        rows = self._looked_up(running[num_known:count])
        if rows:
            self._requests += running[num_known:count]
            self._numbers.extend(rows)
            self._is_changed = True
        return rows

    def of(self, running: list[R]) -> IntArray:
        """Rows of `running`, in its order: the same array as before if that is unchanged.

        Whether a request is the same is a question of identity, so that this holds whatever the
        engine has done with its list in between.
        """
        if running != self._requests and self.take_new(running, len(running)) is None:
            self._requests, self._is_changed = running.copy(), True
            self._numbers = array("q", self._looked_up(running))
        return self.known

    def _looked_up(self, requests: list[R]) -> list[int]:
        return list(map(self._row_of.__getitem__, map(_id_of, requests)))

    def put(self, running: list[R], rows: IntArray) -> None:
        """Tell the rows of `running`."""
        self._requests, self._rows = running.copy(), rows
        self._numbers, self._is_changed = array("q", rows.tobytes()), False
