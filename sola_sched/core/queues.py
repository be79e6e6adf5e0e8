"""The waiting queue that an engine drains, with a planned front.

`PlannedQueue` has the methods of vLLM's `RequestQueue` (it needs none of vLLM). Outside a step it
is first-come-first-served, or sorted. For the duration of a step a plan may choose which requests
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

    Every operation is O(1) except `plan` (size of the plan) and `remove_requests` (number
    removed). Items must be hashable and compare by identity or equality.

    Args:
        items: Its first content, in order.
        key: Sorts the queue, the smallest first, as vLLM's priority queue does: then nothing has
            a place in front. No two items may have the same. None for first-come-first-served.
    """

    def __init__(self, items: Iterable[T] = (), *, key: Callable[[T], Any] | None = None) -> None:
        self._items: OrderedDict[T, None] = OrderedDict()
        self._key = key
        self._sorted: list[tuple[Any, T]] = []  # with a key
        self._visible: deque[T] | None = None
        for item in items:
            self.add_request(item)

    # Planning -------------------------------------------------------------------------------

    def plan(self, items: Iterable[T]) -> None:
        """Show only `items`, in this order, until `unplan`; those not in the queue are skipped."""
        self._visible = deque(item for item in items if item in self._items)

    def unplan(self) -> None:
        """Show the whole queue again."""
        self._visible = None

    def __contains__(self, item: object) -> bool:
        return item in self._items

    # vLLM's RequestQueue --------------------------------------------------------------------

    def add_request(self, request: T) -> None:
        """Append a request, or sort it in."""
        self._items[request] = None
        if self._key is not None:
            bisect.insort(self._sorted, (self._key(request), request))

    def peek_request(self) -> T:
        """The next request, without removing it.

        Raises:
            IndexError: Nothing is visible.
        """
        if self._visible is not None:
            if not self._visible:
                raise IndexError("peek from a queue with no visible request")
            return self._visible[0]
        if not self._items:
            raise IndexError("peek from an empty queue")
        return next(iter(self))

    def pop_request(self) -> T:
        """Remove and return the next request.

        Raises:
            IndexError: Nothing is visible.
        """
        request = self.peek_request()
        if self._visible is not None:
            self._visible.popleft()
        self._forget(request)
        return request

    def prepend_request(self, request: T) -> None:
        """Put a request in front, or sort it in; during a planned step it stays unseen."""
        self.add_request(request)
        self._items.move_to_end(request, last=False)

    def prepend_requests(self, requests: Iterable[T]) -> None:
        """Put requests in front, the last one given first."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: T) -> None:
        """Remove one request.

        Raises:
            KeyError: It is not in the queue.
        """
        self._forget(request)
        if self._visible is not None and request in self._visible:
            self._visible.remove(request)

    def remove_requests(self, requests: Iterable[T]) -> None:
        """Remove those of `requests` that are in the queue."""
        for request in requests:
            if request in self._items:
                self.remove_request(request)

    def __bool__(self) -> bool:
        """Whether a request is visible; during a planned step unseen ones do not count."""
        return bool(self._items if self._visible is None else self._visible)

    def __len__(self) -> int:
        """All requests in the queue, seen or unseen."""
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        if self._key is None:
            return iter(self._items)
        return (item for _, item in self._sorted)

    def _forget(self, request: T) -> None:
        del self._items[request]
        if self._key is not None:
            del self._sorted[bisect.bisect_left(self._sorted, (self._key(request),))]
