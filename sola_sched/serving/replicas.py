"""The replicas that a gateway knows: which can be used, what runs there, where a request goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sola_sched.cluster.reports import Reports
from sola_sched.cluster.unknown import unknown_view
from sola_sched.cluster.view import InstanceView, Refusal, RoutedRequest, Router
from sola_sched.config.flags import refuse_user
from sola_sched.errors import ReportError

logger = logging.getLogger(__name__)

#: Errors in a row, of an HTTP server that answers, after which others are asked.
_MOST_ERRORS = 3
#: What a request may take to an engine's queue.
_DELIVERY_S = 0.02


@dataclass(eq=False)
class Attempt:
    """One request on one replica.

    Attributes:
        limit: Ends it at once when it is rescheduled; None if somebody else ends it, or it has had
            its whole answer.
        has_begun: Whether a token has come.
        is_writing: Whether its client is being written to. A client may be slow: meanwhile nothing
            is known of the replica, and what is broken off in a write breaks the client's answer.
        is_over: It is to go elsewhere.
    """

    limit: asyncio.Timeout | None
    has_begun: bool = False
    is_writing: bool = False
    is_over: bool = False

    def end(self) -> None:
        """End it, at once or after the write."""
        self.is_over = True
        if self.limit is not None and not self.is_writing and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While its client is written to."""
        self.is_writing = True
        try:
            yield
        finally:
            self.is_writing = False
            if self.is_over:
                self.end()


@dataclass(eq=False)
class Replica:
    """One vLLM server.

    Attributes:
        name, url: Its own; the URL without a trailing slash.
        position: What `Router` calls it; another may get it after this one has left.
        has_feed: Whether it answers with a feed; None until it is known.
        has_reported: Whether its engine has reported; False again after it has started anew.
        has_limits: Whether its longest prompt is known, be it from before it has started anew.
        is_gone: It has left, or is not to be reached; the feed may bring it back.
        has_left: It does not come back.
        is_silent: It takes connections and answers nothing; so it gets nothing until it does.
        must_show: Whether it would be known if it computed, though it sends no reports.
        counted: What its engine had counted when its metrics were last looked at.
        is_suspect: It has stalled, and has shown nothing since; it gets one request at a time.
        avoid_until_s: Nobody is sent there before, after a connection has failed.
        num_errors: Requests in a row that it has answered with an error.
        alive_s: When it last was known to make progress, or was given its first request since.
        attempts: Requests that are there.
    """

    name: str
    url: str
    position: int
    has_feed: bool | None = None
    has_reported: bool = False
    has_limits: bool = False
    is_gone: bool = False
    has_left: bool = False
    is_silent: bool = False
    must_show: bool = False
    counted: bytes = b""
    is_suspect: bool = False
    avoid_until_s: float = 0.0
    num_errors: int = 0
    alive_s: float = 0.0
    attempts: set[Attempt] = field(default_factory=set)


class Replicas:
    """All replicas, the last report of each, and the router's view of them.

    Not thread-safe: it belongs to one event loop.

    Args:
        router: Decides where requests go.
        clock: Monotonic time in seconds.

    Attributes:
        reports: The last reports and what was sent since.
        changed: Set, and replaced, whenever a replica may have become usable.
    """

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.reports = Reports(delivery_s=_DELIVERY_S)
        self.changed = asyncio.Event()
        self._router = router
        self._all: list[Replica] = []
        self._left: list[Replica] = []  # with requests yet
        self._known: InstanceView | None = None  # what others are taken for

    def __iter__(self) -> Iterator[Replica]:
        """Those that have not left."""
        return iter(self._all)

    def sync(self, urls: Mapping[str, str]) -> tuple[list[Replica], list[Replica]]:
        """Make these, names to URLs, the replicas that there are.

        Returns:
            Those that are new, and those that have left.

        Raises:
            ConfigError: A URL has a user or a password, which would be shown in logs and answers.
        """
        for url in urls.values():
            refuse_user(url, "URLs of replicas must be")
        left = [r for r in self if urls.get(r.name) != r.url]
        for replica in left:
            self._leave(replica)
        known = {replica.name for replica in self}
        new = [self._join(name, url) for name, url in urls.items() if name not in known]
        return new, left

    def _join(self, name: str, url: str) -> Replica:
        now_s = self.clock()
        position = self.reports.join(unknown_view(now_s, self._known), now_s)
        replica = Replica(name, url.rstrip("/"), position, alive_s=now_s)
        self._all.append(replica)
        self.wake()
        logger.info("replica %s joins: %s", name, replica.url)
        return replica

    def _leave(self, replica: Replica) -> None:
        """It takes nothing more; what runs there may end, as long as tokens come."""
        logger.info("replica %s leaves", replica.name)
        replica.is_gone = replica.has_left = True
        replica.has_reported = False
        self._left.append(replica)
        self.reports.died(replica.position)
        self._all.remove(replica)
        self._forget_if_empty(replica)

    def _forget_if_empty(self, replica: Replica) -> None:
        """One that has left is forgotten with its last request."""
        if replica in self._left and not replica.attempts:
            self._left.remove(replica)
            self.reports.forget(replica.position)

    def wake(self) -> None:
        """Let those look again that wait for a replica."""
        self.changed.set()
        self.changed = asyncio.Event()

    def is_usable(self, replica: Replica) -> bool:
        """Whether it may be sent a request."""
        if replica.is_gone or replica.is_silent or (replica.is_suspect and replica.attempts):
            return False
        return self.clock() >= replica.avoid_until_s

    def choose(self, request: RoutedRequest, refused_by: Collection[Replica]) -> Replica | Refusal:
        """The replica that gets the request.

        Args:
            refused_by: Those that have refused this very request.
        """
        usable = {r.position: r for r in self if self.is_usable(r) and r not in refused_by}
        if not usable:
            return Refusal("no replica can be reached", is_temporary=True)
        views = self._views(usable)
        place = self._router.choose(request, views, self.clock())
        if isinstance(place, Refusal) and not place.is_temporary:
            # The prompt's length is a guess: who takes the longest may take it, or says why not.
            place = self._router.choose(_shortened(request, views), views, self.clock())
        if isinstance(place, Refusal):
            fresh = (r for r in usable.values() if r.position not in request.avoid)
            return place if place.is_temporary else next(fresh, next(iter(usable.values())))
        return usable[place]

    def with_longer_context(self, replica: Replica, num_prompt: int) -> set[Replica]:
        """Those that are known to take longer prompts than this one, be they usable now or not.

        Where it has never said what it takes, those that take this prompt as it was guessed; where
        there is none, all others that have said what they take.
        """
        views = self.reports.views
        known = {each for each in self if each.has_limits and each is not replica}
        if replica.has_limits:
            most = views[replica.position].max_model_len
            return {each for each in known if views[each.position].max_model_len > most}
        return {each for each in known if views[each.position].max_model_len > num_prompt} or known

    def shown(self) -> list[dict[str, Any]]:
        """What is known of each that has not left; null where it has not reported."""
        now_s, views = self.clock(), self.reports.views
        rows = []
        for replica in self:
            view = views[replica.position]
            load = {
                "report_age_s": round(now_s - view.reported_s, 3),
                "num_running": view.num_running,
                "num_waiting": view.num_waiting,
                "num_lost": view.num_lost,
                "num_free_slots": view.num_free_slots,
                "kv_used_tokens": view.kv_used_tokens,
            }
            rows.append(
                {
                    "name": replica.name,
                    "url": replica.url,
                    "is_usable": self.is_usable(replica),
                    "has_feed": replica.has_feed,
                    "num_in_flight": len(replica.attempts),
                    **(load if replica.has_reported else dict.fromkeys(load)),
                }
            )
        return rows

    def not_sent(self, req_id: str, replica: Replica) -> None:
        """The request does not go to the replica that was chosen for it."""
        self._router.ended(req_id, replica.position)

    def _views(self, usable: Collection[int]) -> Sequence[InstanceView]:
        views = self.reports.views
        if len(usable) == len(views):
            return views
        return [
            view if position in usable or not view.is_alive else replace(view, is_alive=False)
            for position, view in enumerate(views)
        ]

    @contextmanager
    def attempt(
        self, replica: Replica, request: RoutedRequest, limit: asyncio.Timeout | None
    ) -> Iterator[Attempt]:
        """The time that a request spends on a replica."""
        attempt = Attempt(limit)
        if not replica.attempts:
            replica.alive_s = self.clock()
        replica.attempts.add(attempt)
        if not replica.has_left:
            self.reports.sent(replica.position, request, self.clock())
        try:
            yield attempt
        finally:
            replica.attempts.discard(attempt)
            self._router.ended(request.req_id, replica.position)
            if not replica.has_left:
                self.reports.ended(replica.position, request.req_id)
            self._forget_if_empty(replica)

    def reported(self, replica: Replica, view: InstanceView) -> None:
        """A report has come; one that cannot be true is ignored and counted."""
        if replica.has_left:
            return
        # A feed that was opened again begins with a report that is known, give or take its way.
        last_s = self.reports.views[replica.position].reported_s
        view = replace(view, reported_s=max(view.reported_s, last_s))
        if self.reports.report(replica.position, view, self.clock()):
            replica.has_reported = replica.has_limits = True
            self.progressed(replica)
            if self._known is None:
                self._known = view
                for other in self:
                    if not other.has_reported:
                        self.reports.assume(other.position, unknown_view(self.clock(), view))

    def ignore(self, replica: Replica, error: ReportError) -> None:
        """A report could not even be read."""
        self.reports.ignore(replica.position, error, f"replica {replica.name}")

    def progressed(self, replica: Replica) -> None:
        """The replica has computed something."""
        replica.alive_s = self.clock()
        if replica.avoid_until_s or replica.is_silent or replica.is_suspect:
            replica.avoid_until_s, replica.is_silent, replica.is_suspect = 0.0, False, False
            self.wake()

    def failed(self, replica: Replica, avoid_s: float) -> None:
        """A connection to the replica has failed: it gets nothing for so long."""
        replica.avoid_until_s = self.clock() + avoid_s

    def erred(self, replica: Replica, avoid_s: float) -> None:
        """The replica has answered with an error of its own: one that often does gets nothing for
        so long, if there is another. It would seem idle, and get most of all requests first."""
        replica.num_errors += 1
        others = (each for each in self if each is not replica)
        if replica.num_errors >= _MOST_ERRORS and any(map(self.is_usable, others)):
            self.failed(replica, avoid_s)

    def served(self, replica: Replica) -> None:
        """The replica has served a request."""
        replica.num_errors = 0

    def silent(self, replica: Replica) -> None:
        """The replica does not answer; what runs there may go on yet."""
        replica.is_silent = True

    def lost(self, replica: Replica) -> None:
        """The replica is known to be dead: those that are there go elsewhere at once."""
        replica.is_gone = True
        self.began_anew(replica)
        self._end_attempts(replica)

    def began_anew(self, replica: Replica) -> None:
        """The load that the replica has told is not true any more: its engine has started anew.

        A new engine may tell nothing before it has a request, so it must not seem full until then.
        Its limits are taken to be the same as before.
        """
        if replica.has_reported:
            replica.has_reported = False
            last = self.reports.views[replica.position]
            view = unknown_view(self.clock(), self._known).but(
                kv_capacity_tokens=last.kv_capacity_tokens,
                max_num_seqs=last.max_num_seqs,
                max_model_len=last.max_model_len,
            )
            self.reports.assume(replica.position, view)

    def found(self, replica: Replica) -> None:
        """The replica can be reached; one that could be before has not shown that it computes."""
        if replica.is_silent:
            replica.is_silent = False
            self.wake()
        if replica.is_gone:
            replica.is_gone, replica.avoid_until_s = False, 0.0
            replica.alive_s = self.clock()
            self.wake()

    def end_stalled(self, stall_s: float) -> list[Replica]:
        """Send the requests of stalled replicas elsewhere, if there is such a place.

        A replica has stalled when it has had requests for `stall_s` and computed nothing. Of one
        that sends no reports its streams and answers tell, and its metrics (`feed.py`); without
        metrics it needs a stream that has begun, as an answer that does not stream may take long.

        Returns:
            Those that have stalled.
        """
        now_s = self.clock()
        stalled = [
            replica
            for replica in (*self, *self._left)
            if now_s - replica.alive_s > stall_s and _must_progress(replica)
        ]
        others = [r for r in self if self.is_usable(r) and r not in stalled]
        if not others:
            return []
        for replica in stalled:
            logger.warning(
                "replica %s has computed nothing for %.1f s with %d requests: they go elsewhere",
                replica.name, now_s - replica.alive_s, len(replica.attempts),
            )  # fmt: skip
            replica.avoid_until_s, replica.is_suspect = now_s + stall_s, True
            self._end_attempts(replica)
        return stalled

    def _end_attempts(self, replica: Replica) -> None:
        for attempt in replica.attempts:
            attempt.end()


def _shortened(request: RoutedRequest, views: Sequence[InstanceView]) -> RoutedRequest:
    """The request with the longest prompt that one of them takes."""
    longest = (min(v.max_model_len, v.kv_capacity_tokens) for v in views if v.is_alive)
    most = max(longest, default=1) - 1
    return replace(request, prompt_tokens=max(1, min(request.prompt_tokens, most)))


def _must_progress(replica: Replica) -> bool:
    if replica.has_reported or replica.must_show or replica.is_silent:
        return any(not attempt.is_writing for attempt in replica.attempts)
    return any(attempt.has_begun and not attempt.is_writing for attempt in replica.attempts)
