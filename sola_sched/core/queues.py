"""The waiting queue that an engine drains, with a planned front.

`PlannedQueue` does what vLLM's own queues do (it needs none of vLLM): outside a step it is
first-come-first-served, or sorted. For the duration of a step a plan may choose which requests
the engine sees, and in which order; all others stay in the queue, unseen.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class PlannedQueue(Generic[T]):
    """Queue whose visible part a plan can replace.

    Every operation is O(1), or O(log n) and a move of memory where the queue is sorted, except
    `plan` (size of the plan) and `remove_requests` (number removed, and size of the plan). Items
    must be hashable and compare by identity or equality. As in vLLM's queues an item that is
    added twice is there twice.

    Args:
        items: Its first content, in order.
        key: Sorts the queue, the smallest first, as vLLM's priority queue does: then nothing has
            a place in front. It is asked for once, when an item is added: the item keeps that
            place, whatever becomes of its key. None for first-come-first-served.
    """

    def __init__(self, items: Iterable[T] = (), *, key: Callable[[T], Any] | None = None) -> None:
        self._key = key
        # By number: those appended count up from 1, those put in front down from 0.
        self._in_order: OrderedDict[int, T] = OrderedDict()
        self._sorted: list[tuple[Any, int, T]] = []  # with a key, in place of the former
        # Where each item is, its first place first: its number, and with a key the key.
        self._places: dict[T, list[tuple[Any, int]]] = {}
        self._last, self._first = 0, 1
        self._visible: deque[T] | None = None
        for item in items:
            self.add_request(item)

    # Planning -------------------------------------------------------------------------------

    def plan(self, items: Iterable[T]) -> None:
        """Show only `items`, in this order, until `unplan`; those not in the queue are skipped."""
        self._visible = deque(item for item in dict.fromkeys(items) if item in self._places)

    def unplan(self) -> None:
        """Show the whole queue again."""
        self._visible = None

    def __contains__(self, item: object) -> bool:
        return item in self._places

    # vLLM's RequestQueue --------------------------------------------------------------------

    def add_request(self, request: T) -> None:
        """Append a request, or sort it in; during a planned step it stays unseen."""
        self._last += 1
        if self._key is None:
            self._in_order[self._last] = request
            self._places.setdefault(request, []).append((None, self._last))
        else:
            self._sort_in(request, self._last)

    def peek_request(self) -> T:
        """The next request, without removing it.

        Raises:
            IndexError: Nothing is visible.
        """
        if self._visible is not None:
            if not self._visible:
                raise IndexError("peek from a queue with no visible request")
            return self._visible[0]
        if not self._places:
            raise IndexError("peek from an empty queue")
        return next(iter(self._in_order.values())) if self._key is None else self._sorted[0][2]

    def pop_request(self) -> T:
        """Remove and return the next request.

        Raises:
            IndexError: Nothing is visible.
        """
        request = self.peek_request()
        if self._visible is not None:
            self._visible.popleft()
        self._take_out(request)
        return request

    def prepend_request(self, request: T) -> None:
        """Put a request in front, or sort it in; during a planned step it stays unseen."""
        if self._key is not None:
            return self.add_request(request)
        self._first -= 1
        self._in_order[self._first] = request
        self._in_order.move_to_end(self._first, last=False)
        self._places.setdefault(request, []).insert(0, (None, self._first))
        return None

    def prepend_requests(self, requests: Iterable[T]) -> None:
        """Put requests in front, the last one given first."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: T) -> None:
        """Remove one request, from its first place.

        Raises:
            ValueError: It is not in the queue.
        """
        if request not in self._places:
            raise ValueError(f"a request to be removed must be in the queue (got {request!r})")
        self._take_out(request)
        if request not in self._places and self._visible is not None and request in self._visible:
            self._visible.remove(request)

    def remove_requests(self, requests: Iterable[T]) -> None:
        """Remove those of `requests` that are in the queue, from all their places."""
        gone = {request for request in requests if request in self._places}
        for request in gone:
            while request in self._places:
                self._take_out(request)
        if gone and self._visible:
            self._visible = deque(item for item in self._visible if item not in gone)

    def __bool__(self) -> bool:
        """Whether a request is visible; during a planned step unseen ones do not count."""
        return bool(self._places if self._visible is None else self._visible)

    def __len__(self) -> int:
        """All requests in the queue, seen or unseen."""
        return len(self._in_order if self._key is None else self._sorted)

    def __iter__(self) -> Iterator[T]:
        if self._key is None:
            return iter(self._in_order.values())
        return iter([item for *_, item in self._sorted])

    def _sort_in(self, request: T, number: int) -> None:
        assert self._key is not None
        key = self._key(request)
        bisect.insort(self._sorted, (key, number, request))
        bisect.insort(self._places.setdefault(request, []), (key, number))

    def _take_out(self, request: T) -> None:
        """Take a request that is in the queue from its first place."""
        places = self._places[request]
        key, number = places.pop(0)
        if not places:
            del self._places[request]
        if self._key is None:
            del self._in_order[number]
        else:
            del self._sorted[bisect.bisect_left(self._sorted, (key, number))]
