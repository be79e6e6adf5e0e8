"""Ray Serve's request router, as a thin shell around ours; all of Ray's alpha interface is here.

Serve makes one router in each process that calls a deployment. In the gateway's it only says which
replicas there are: the gateway chooses and sends by itself. In Serve's own proxy it chooses, by the
headers of the request alone, since Serve gives a router no body.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pickle
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import aiohttp
import ray
from multidict import CIMultiDict
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from sola_sched.cluster.view import Refusal, RoutedRequest
from sola_sched.config.flags import is_loopback
from sola_sched.errors import SloError
from sola_sched.serving import membership
from sola_sched.serving.call import Call, Lengths, ids_and_chars
from sola_sched.serving.feed import follow
from sola_sched.serving.policies import DEFAULT, make_router
from sola_sched.serving.replicas import Replica, Replicas
from sola_sched.serving.slo_headers import with_slo_headers

logger = logging.getLogger(__name__)

#: Of a request whose body nobody has read, characters of what is not its prompt.
_OTHER_BYTES = 200
#: What a prompt that nobody has read counts for at most, whatever replicas take.
_MOST_TOKENS = 2**17
#: A size with more digits is as good as one with so many.
_MOST_DIGITS = 15
URL = "url"


class _Choice(NamedTuple):
    """Where a request goes that Serve has not sent yet.

    Attributes:
        replica: The one.
        future: Of Serve; ends with the replica that gets it.
    """

    replica: Replica
    future: Any


class SolaRequestRouter(RequestRouter):
    """Serve's door to a `Router`.

    Attributes:
        num_failures: Errors of ours, after which Serve has decided.
    """

    def initialize_state(self, router: str = DEFAULT, seed: int = 0) -> None:
        """Called once by Serve, with the deployment's `request_router_kwargs`."""
        self._mine = Replicas(make_router(router, seed), time.monotonic)
        self._lengths = Lengths()
        self.num_failures = 0
        self._far: set[str] = set()
        self._followers: dict[Replica, asyncio.Task[None]] = {}
        self._in_flight: dict[tuple[str, str], ExitStack] = {}  # by replica and request
        self._chosen: dict[str, _Choice] = {}  # by request

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are."""
        super().update_replicas(replicas)
        with_url = [replica for replica in replicas if URL in replica.replica_metadata]
        urls = {r.replica_id.unique_id: r.replica_metadata[URL] for r in with_url}
        far = {r.replica_id.unique_id for r in with_url if _is_out_of_reach(r)}
        for name in far - self._far:
            logger.error(
                "replica %s cannot be asked: it listens on %s of another node. Set 'engine_host' "
                "to null, so that each engine listens on its node's address.", name, urls[name],
            )  # fmt: skip
        self._far = far
        if membership.listeners:
            for listener in membership.listeners:
                name = membership.key(self._deployment_id.app_name, self._deployment_id.name)
                listener(name, {name: url for name, url in urls.items() if name not in far})
            return
        new, left = self._mine.sync(urls)
        for replica in left:
            if (task := self._followers.pop(replica, None)) is not None:
                task.cancel()
        for replica in new:
            if replica.name not in far:  # Serve's way to it stays
                self._followers[replica] = asyncio.create_task(self._follow(replica))

    async def _follow(self, replica: Replica) -> None:
        """Take in a replica's reports; its connections end with this, as Serve ends no router."""
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            await follow(replica, self._mine, session)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Our choice first, the rest in case that it is full."""
        able = self.select_available_replicas(candidate_replicas)
        if pending_request is None or len(able) < 2:
            return [able] if able else []
        ranked = [able]
        with self._never_failing("choosing a replica"):
            ranked = self._ranked(able, pending_request)
        return ranked

    def _ranked(
        self, able: list[RunningReplica], pending_request: PendingRequest
    ) -> list[list[RunningReplica]]:
        name, future = pending_request.metadata.internal_request_id, pending_request.future
        before = self._give_up(name)
        if before is None or before.future is not future:  # Serve makes one for each try
            future.add_done_callback(lambda _: self._given_up(name, future))
        request = self._routed(pending_request, name)
        there = {replica.replica_id.unique_id for replica in able}
        choice = self._mine.choose(request, [r for r in self._mine if r.name not in there])
        if isinstance(choice, Refusal):
            return [able]
        self._chosen[name] = _Choice(choice, future)
        best = [replica for replica in able if replica.replica_id.unique_id == choice.name]
        return [best, [replica for replica in able if replica not in best]]

    def _give_up(self, name: str) -> _Choice | None:
        """Take back the choice for a request, if there is one that no replica has accepted."""
        chosen = self._chosen.pop(name, None)
        if chosen is not None:
            self._mine.not_sent(name, chosen.replica)
        return chosen

    def _given_up(self, name: str, future: Any) -> None:
        """Serve has no replica for a request, and nobody waits for one any more."""
        chosen = self._chosen.get(name)
        if chosen is not None and chosen.future is future and _is_failed(future):
            self._give_up(name)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """The replica has accepted the request."""
        name = pending_request.metadata.internal_request_id
        chosen = self._chosen.pop(name, None)
        if chosen is not None and chosen.replica.name != replica_id.unique_id:
            self._mine.not_sent(name, chosen.replica)
        for replica in self._mine:
            if replica.name == replica_id.unique_id:
                with self._never_failing("booking a request"):
                    self._end(replica.name, name)
                    stack = self._in_flight[replica.name, name] = ExitStack()  # Serve ends it
                    request = self._routed(pending_request, name)
                    stack.enter_context(self._mine.attempt(replica, request, None))

    def _end(self, replica: str, name: str) -> None:
        if (attempt := self._in_flight.pop((replica, name), None)) is not None:
            attempt.close()

    def _routed(self, pending_request: PendingRequest, name: str) -> RoutedRequest:
        """What our router is told of a request.

        What a client says of the size of a body counts for no more than a replica could take: a
        body holds images too, and may never come.
        """
        request = self._lengths.routed(_call_of(pending_request), name, None, frozenset())
        longest = (
            min(view.max_model_len, view.kv_capacity_tokens)
            for view in self._mine.reports.views
            if view.is_alive
        )
        most = min(_MOST_TOKENS, max(longest, default=_MOST_TOKENS) - 1)
        if request.prompt_tokens <= most:
            return request
        return dataclasses.replace(request, prompt_tokens=max(1, most))

    @contextlib.contextmanager
    def _never_failing(self, what: str) -> Iterator[None]:
        """Serve would leave a request without an answer for ever after an error of a router."""
        try:
            yield
        except Exception:
            self.num_failures += 1
            if self.num_failures == 1:
                logger.exception("%s has failed: Serve decides; further ones are counted", what)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request is over, or was not accepted."""
        chosen = self._chosen.get(internal_request_id)
        if chosen is not None and chosen.future.done():  # else it is chosen for anew
            self._give_up(internal_request_id)
        self._end(replica_id.unique_id, internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The replica is dead."""
        super().on_replica_actor_died(replica_id)
        for replica in self._mine:
            if replica.name == replica_id.unique_id:
                self._mine.lost(replica)


def _is_failed(future: Any) -> bool:
    return future.cancelled() or future.exception() is not None


def _is_out_of_reach(replica: RunningReplica) -> bool:
    """Whether it listens for its own node alone, which is another than this one."""
    host = urllib.parse.urlsplit(replica.replica_metadata[URL]).hostname or ""
    return is_loopback(host) and replica.node_id != ray.get_runtime_context().get_node_id()


def _call_of(pending_request: PendingRequest) -> Call:
    """What Serve shows of a request: of HTTP the headers, of a handle's call a mapping."""
    first = pending_request.args[0] if pending_request.args else None
    body: Mapping[str, Any] = dict(first) if isinstance(first, dict) else {}
    if isinstance(first, bytes):
        first = pickle.loads(first)  # made by Serve's own proxy, in this process
    num_ids, num_chars = ids_and_chars(body)
    scope = getattr(first, "asgi_scope", None)
    if scope is not None:
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        size = _size_of(headers.get("content-length", ""))
        num_chars = max(1, size - _OTHER_BYTES)
        with contextlib.suppress(SloError):  # the replica refuses it
            body = with_slo_headers(body, headers)
    name = pending_request.metadata.request_id
    call = Call("POST", "/", CIMultiDict(), b"", body, name, time.monotonic())
    call.num_ids, call.num_chars = num_ids, num_chars
    return call


def _size_of(text: str) -> int:
    """Bytes that a client announces; 0 where that is no number."""
    return int(text[:_MOST_DIGITS]) if text.isdecimal() else 0
