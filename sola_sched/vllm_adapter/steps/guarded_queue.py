"""vLLM's waiting queue in two forms: with plans, and vLLM's own from the moment ours fails.

vLLM drains the queue in the middle of its own `schedule()`, where nothing of ours may raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from sola_sched.core.queues import PlannedQueue


class GuardedQueue(RequestQueue):
    """A `PlannedQueue` until that fails; then, with the same requests, a queue of vLLM's own.

    Which requests are there after a failure is known from the engine: whoever lives and has no
    other place. If a plan was in force, no further request is shown until it ends.

    Args:
        key: As for `PlannedQueue`.
        own_queue: Makes a queue of vLLM's own with these requests.
        without_place: Gives, in order of arrival, the live requests that wait and are in no other
            queue of the engine.
        failed: Told what was being done and what was raised.
    """

    def __init__(
        self,
        *,
        key: Callable[[Request], Any] | None,
        own_queue: Callable[[Iterable[Request]], Any],
        without_place: Callable[[], list[Request]],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._key = key
        self._own_queue, self._without_place, self._failed = own_queue, without_place, failed
        self._planned: PlannedQueue[Request] | None = PlannedQueue(key=key)
        self._own: Any = None
        self._shown: list[Request] | None = None  # what a plan shows
        self._next: Request | None = None  # the one that was looked at last, and must be popped
        self._has_told = False  # that a request is visible, and none has been popped since
        #: Not here, although no other queue may show them: vLLM has them in hand during its step.
        self._out: set[Request] = set()

    # Planning -------------------------------------------------------------------------------

    def renew(self) -> None:
        """Make plans possible again after a failure."""
        if self._planned is None:
            self._planned = PlannedQueue(self._own, key=self._key)
            self._own = None

    def begin_step(self, elsewhere: Iterable[Request] = ()) -> None:
        """Call before each `schedule()`, when nobody is in vLLM's hands.

        Args:
            elsewhere: Those in the other queue of requests that wait. vLLM takes them out during
                its step, and puts most of them back at its end.
        """
        self._out = set(elsewhere)
        self._next = None

    def plan(self, items: Iterable[Request]) -> None:
        """As `PlannedQueue.plan`; may raise, then `unplan` follows.

        After a failure all are visible again: vLLM's own queue goes on in its own order.
        """
        if self._planned is not None:
            self._shown, self._has_told = list(items), False
            self._planned.plan(self._shown)

    def unplan(self) -> None:
        """Show the whole queue again."""
        self._shown = None
        if self._planned is not None:
            try:
                self._planned.unplan()
            except Exception as error:
                self._fall_back("showing all waiting requests", error)

    def __contains__(self, item: object) -> bool:
        if self._planned is not None:
            try:
                return item in self._planned
            except Exception as error:
                self._fall_back("looking for a waiting request", error)
        return any(request is item for request in self._own)

    # vLLM's RequestQueue --------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Append a request, or sort it in."""
        self._out.discard(request)
        if self._planned is not None:
            try:
                return self._planned.add_request(request)
            except Exception as error:
                self._fall_back("adding a waiting request", error, without=request)
        self._own.add_request(request)
        return None

    def prepend_request(self, request: Request) -> None:
        """Put a request in front, or sort it in."""
        self._out.discard(request)
        if self._planned is not None:
            try:
                return self._planned.prepend_request(request)
            except Exception as error:
                self._fall_back("putting back a waiting request", error, without=request)
        self._own.prepend_request(request)
        return None

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put requests in front, the last one given first."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """The next request, without removing it.

        Raises:
            IndexError: Nothing is visible.
        """
        if self._planned is not None:
            try:
                self._next = self._planned.peek_request()
                return self._next
            except Exception as error:
                if isinstance(error, IndexError) and not self:
                    raise
                self._fall_back("looking at the next request", error)
        shown = [r for r in self._shown or () if r in self]
        self._next = shown[0] if shown else self._own.peek_request()
        return self._next

    def pop_request(self) -> Request:
        """Remove and return the next request.

        Raises:
            IndexError: Nothing is visible.
        """
        self._has_told = False
        if self._planned is not None:
            try:
                request = self._planned.pop_request()
                self._out.add(request)
                return request
            except Exception as error:
                if isinstance(error, IndexError) and not self:
                    raise
                self._fall_back("taking the next request", error)
        # vLLM has given blocks to the one that it looked at.
        request = self._next if self._next is not None else self.peek_request()
        self._next = None
        self._out.add(request)
        if request in self:
            self._own.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Remove one request.

        Raises:
            ValueError: It is not in the queue.
        """
        self._out.add(request)
        if self._planned is not None:
            try:
                return self._planned.remove_request(request)
            except Exception as error:
                if isinstance(error, ValueError) and request not in self:
                    raise
                self._fall_back("removing a waiting request", error, without=request)
                return None
        self._own.remove_request(request)
        return None

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those of `requests` that are in the queue."""
        gone = set(requests)
        self._out |= gone
        if self._planned is not None:
            try:
                return self._planned.remove_requests(gone)
            except Exception as error:
                self._fall_back("removing waiting requests", error)
        self._own.remove_requests(gone)
        return None

    def __bool__(self) -> bool:
        """Whether a request is visible; during a planned step unseen ones do not count.

        Up to 0.30 vLLM asks twice before it takes one, so what it was told stands until then.
        """
        if self._planned is not None:
            try:
                self._has_told = bool(self._planned)
                return self._has_told
            except Exception as error:
                self._fall_back("asking whether a request waits", error)
        if self._shown is None:
            return bool(self._own)
        return self._has_told and any(request in self for request in self._shown)

    def __len__(self) -> int:
        """All requests in the queue, seen or unseen."""
        if self._planned is not None:
            try:
                return len(self._planned)
            except Exception as error:
                self._fall_back("counting the waiting requests", error)
        return len(self._own)

    def __iter__(self) -> Iterator[Request]:
        if self._planned is not None:
            try:
                return iter(self._planned)
            except Exception as error:
                self._fall_back("going through the waiting requests", error)
        return iter(self._own)

    def _fall_back(self, doing: str, error: BaseException, without: Request | None = None) -> None:
        """Go on with a queue of vLLM's own: in our order, as far as that can still be told.

        Args:
            without: Leave this one out.
        """
        self._failed(doing, error)
        planned, self._planned = self._planned, None
        gone = self._out if without is None else {*self._out, without}
        there = dict.fromkeys(r for r in self._without_place() if r not in gone)
        try:
            in_order = [request for request in planned or () if request in there]
        except Exception:  # that is what failed
            in_order = []
        self._own = self._own_queue(dict.fromkeys((*in_order, *there)))
