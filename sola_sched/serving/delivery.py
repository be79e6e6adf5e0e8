"""One request from its arrival to its answer, on as many replicas as it takes.

What has been sent to a client is never sent again. Until the first event nothing has been, so the
request starts anew elsewhere; after it a stream is resumed (`resume.py`). A replica that refuses
(HTTP 503) is not asked again; when all have, the client gets the refusal that asks it to come back
soonest. The SLO clock is the first arrival's: later attempts tell the engine how long it has run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import aiohttp

from sola_sched.cluster.view import RoutedRequest
from sola_sched.config.http_headers import OF_CONNECTION
from sola_sched.config.slo import BEGAN_KEY, RESUMED_KEY, WAITED_KEY
from sola_sched.errors import ConfigError
from sola_sched.serving import events
from sola_sched.serving.arrivals import ATTEMPT_HEADER
from sola_sched.serving.asked import Asked
from sola_sched.serving.call import Call, Lengths
from sola_sched.serving.protocols import as_json, protocol_of
from sola_sched.serving.questions import Questions
from sola_sched.serving.replicas import Attempt, Replica, Replicas
from sola_sched.serving.resume import Plan, continuation, ending, replay, ways
from sola_sched.serving.rewrite import DivergedError, Rewrite
from sola_sched.serving.slo_headers import XARGS
from sola_sched.serving.transcript import Transcript

logger = logging.getLogger(__name__)

_EVENT_STREAM = "text/event-stream"
#: Names of requests; what a client calls them need not be unique.
_numbers = itertools.count()
#: Answers that another replica may do better than.
_FAILURES = frozenset((500, 502, 504))
_CANNOT_GO_ON = (
    "the replica was lost, and the rest of this answer cannot come from another one: see 'What "
    "happens when a replica fails' in docs/cluster.md; with a 'seed' or at temperature 0 it can"
)


@dataclass(frozen=True)
class GatewayOptions:
    """How long a gateway waits, and how often it tries.

    Attributes:
        stall_s: A replica that has requests and has computed nothing for so long has stalled.
        patience_s: How long a request waits for a replica, when none can be reached.
        avoid_s: A replica gets nothing for so long after a connection to it has failed.
        connect_s: Most that a connection may take.
        max_failures: Failed attempts after which a request is given up; one may be what kills them.
    """

    stall_s: float = 15.0
    patience_s: float = 60.0
    avoid_s: float = 1.0
    connect_s: float = 5.0
    max_failures: int = 4

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0.0 < value < math.inf or (name == "max_failures" and value < 1):
                raise ConfigError(
                    f"'{name}' must be {'>= 1' if name == 'max_failures' else 'finite and > 0'} "
                    f"(got {value!r}); correct it."
                )


class Client(Protocol):
    """Who has sent the request."""

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin the answer."""

    async def write(self, data: bytes) -> None:
        """More of the answer."""


class CutError(Exception):
    """An attempt has ended before the answer was whole."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A whole answer of a replica."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def retry_after_s(self) -> float:
        """When it asks to be tried again; later than all if it does not say."""
        try:
            return float(self.headers.get("Retry-After", "inf"))
        except ValueError:  # a date
            return float("inf")


class Delivery:
    """Delivers one request.

    Args:
        call: The request.
        client: Gets the answer.
        replicas: Where it may go.
        session: Connections to them.
        lengths: Estimates for the router.
        options: Waits and limits.
        counts: Of what happened, by name.
    """

    def __init__(
        self,
        call: Call,
        client: Client,
        *,
        replicas: Replicas,
        session: aiohttp.ClientSession,
        lengths: Lengths,
        options: GatewayOptions,
        counts: Counter[str],
    ) -> None:
        self._call, self._client = call, client
        self._number = next(_numbers)
        self._replicas, self._session = replicas, session
        self._lengths, self._options, self._counts = lengths, options, counts
        self._path, self._body = call.path, call.body
        self._asked = Asked(call.path, call.body or {}, call.wants_ids)
        self._protocol = protocol_of(call.path)
        self._rewrite: Rewrite | None = None
        self._has_to_continue = False
        self._sent: list[bytes] = []  # events that are not in the transcript yet
        self._transcript = Transcript()
        self._last = b""
        self._first_token_s: float | None = None
        self._num_resumed: int | None = None
        self._has_started = self._has_waited = False
        self._refused_by: set[Replica] = set()
        self._avoid: set[int] = set()
        self._refusal: _Answer | None = None
        self._num_attempts = self._num_failures = 0
        self._has_arrived = False  # at a replica, which has counted it

    async def run(self) -> None:
        """Deliver it; the client has a whole answer in the end, or an error."""
        while True:
            placed = await self._place()
            if placed is None:
                return
            replica, request = placed
            try:
                is_done = await self._try(replica, request)
            except DivergedError as error:
                await self._give_up(f"the answer could not be repeated elsewhere: {error}")
                return
            except (CutError, TimeoutError, aiohttp.ClientError, OSError) as error:
                self._has_arrived |= not isinstance(error, aiohttp.ClientConnectorError)
                is_done = await self._failed(replica, error)
            if is_done:
                return

    async def _place(self) -> tuple[Replica, RoutedRequest] | None:
        """Wait for a replica, and say as what the request goes there.

        Returns:
            None once the client has been told that there is none.
        """
        limit_s = self._replicas.clock() + self._options.patience_s
        while True:
            changed = self._replicas.changed
            name = f"{self._number}#{self._num_attempts}"
            request = self._lengths.routed(
                self._call, name, self._num_resumed, frozenset(self._avoid)
            )
            choice = self._replicas.choose(request, self._refused_by)
            if isinstance(choice, Replica):
                return choice, request
            if self._refusal is not None:  # all that can be reached have refused
                await self._answer(self._refusal)
                return None
            left_s = limit_s - self._replicas.clock()
            if left_s <= 0.0:
                await self._give_up(choice.reason, HTTPStatus.SERVICE_UNAVAILABLE)
                return None
            self._has_waited = True
            try:  # a replica that was avoided comes back without an event
                await asyncio.wait_for(changed.wait(), min(left_s, self._options.avoid_s))
            except TimeoutError:
                continue

    async def _try(self, replica: Replica, request: RoutedRequest) -> bool:
        """One attempt; whether it has answered."""
        async with asyncio.timeout(None) as limit:
            with self._replicas.attempt(replica, request, limit) as attempt:
                self._num_attempts += 1
                if self._has_to_continue and await self._continue_at(replica):
                    return True
                async with self._session.request(
                    self._call.method,
                    replica.url + self._path,
                    headers=self._headers(),
                    json=self._timed_body(),
                    data=self._call.data if self._body is None else None,
                    allow_redirects=False,
                ) as reply:
                    self._has_arrived = True
                    is_stream = reply.content_type == _EVENT_STREAM
                    if is_stream and reply.status == HTTPStatus.OK:
                        return await self._relay(reply, replica, attempt)
                    answer = _Answer(reply.status, _passed_back(reply.headers), await reply.read())
        return await self._answered(replica, answer)

    def _headers(self) -> dict[str, str]:
        """Those of the request, and where a replica has counted it, the number of attempts."""
        if not self._has_arrived:
            return self._call.headers
        return {**self._call.headers, ATTEMPT_HEADER: str(self._num_attempts)}

    def _timed_body(self) -> dict[str, Any] | None:
        """The body; after a wait with how long the request has run already."""
        if self._body is None or (self._num_attempts == 1 and not self._has_waited):
            return self._body
        now_s = self._replicas.clock()
        xargs = dict(self._body.get(XARGS) or {})
        since_s = self._call.arrival_s
        if self._num_resumed and self._first_token_s is not None:
            since_s = self._first_token_s
            if not xargs.get(RESUMED_KEY):
                xargs[BEGAN_KEY] = round(1e3 * (since_s - self._call.arrival_s), 3)
            xargs[RESUMED_KEY] = self._num_resumed + (xargs.get(RESUMED_KEY) or 0)
        waited_ms = 1e3 * (now_s - since_s)
        xargs[WAITED_KEY] = round(waited_ms + (xargs.get(WAITED_KEY) or 0.0), 3)
        return {**self._body, XARGS: xargs}

    async def _relay(
        self, reply: aiohttp.ClientResponse, replica: Replica, attempt: Attempt
    ) -> bool:
        """Pass a stream on, event by event; of one that breaks within an event the whole ones.

        Raises:
            CutError: It ended before its end.
        """
        splitter = events.EventSplitter()
        is_over = False
        async for data in reply.content.iter_any():
            if attempt.is_over:  # what has come is not taken for sent
                raise CutError("the replica is lost or has stalled")
            out: list[bytes] = []
            failure: CutError | None = None
            has_more = False
            for event in splitter.feed(data):
                if events.is_comment(event):  # of the server; its engine may have stalled
                    out.append(event)
                    continue
                if self._call.is_stream and _is_failure(event):
                    failure = CutError(event.decode(errors="replace").strip())
                    break
                is_over |= self._is_end(event)
                if changed := self._changed(event):
                    has_more = True
                    out.append(changed)
            if has_more:
                attempt.has_begun = True
                if self._first_token_s is None:
                    self._first_token_s = self._replicas.clock()
                if is_over:
                    attempt.limit = None
            with attempt.writing():
                await self._write(reply, b"".join(out))
            if has_more:
                self._replicas.progressed(replica)
            if failure is not None:
                raise failure
            if is_over and self._call.is_stream:
                self._learn()
                return True
        if not is_over and (self._call.is_stream or self._protocol.endings):
            raise CutError("the stream ended without its end")
        with attempt.writing():
            await self._write(reply, splitter.rest)
        return True

    def _is_end(self, event: bytes) -> bool:
        if self._call.is_stream:
            return events.is_done(event)
        return bool(self._protocol.endings) and self._protocol.is_end(event)

    def _changed(self, event: bytes) -> bytes:
        """What the client gets for an event; empty for nothing."""
        if not self._call.is_stream:
            self._last = event
            return event
        changed = self._rewrite.feed(event) if self._rewrite is not None else event
        if not changed:
            return b""
        self._sent.append(changed)
        return changed if self._call.wants_ids else events.without_token_ids(changed)

    async def _write(self, reply: aiohttp.ClientResponse, data: bytes) -> None:
        if not data:
            return
        if not self._has_started:
            await self._start(reply.status, _passed_back(reply.headers))
        await self._client.write(data)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._has_started = True
        await self._client.start(status, headers)

    async def _answered(self, replica: Replica, answer: _Answer) -> bool:
        """Whether a whole answer is one for the client."""
        self._replicas.progressed(replica)
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self._counts["refused"] += 1
            self._refused_by.add(replica)
            best = self._refusal
            if best is None or answer.retry_after_s < best.retry_after_s:
                self._refusal = answer
            return False
        if answer.status in _FAILURES and self._num_failures + 1 < self._options.max_failures:
            raise CutError(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        if self._has_started and answer.status != HTTPStatus.OK:
            raise CutError(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        await self._answer(answer)
        return True

    async def _answer(self, answer: _Answer) -> None:
        if self._has_started:
            await self._give_up("no other replica takes the rest of the answer")
            return
        await self._start(answer.status, answer.headers)
        await self._client.write(answer.body)

    async def _failed(self, replica: Replica, error: Exception) -> bool:
        """After a failed attempt: whether the request has ended with it."""
        self._num_failures += 1
        self._counts["failed_attempts"] += 1
        self._avoid.add(replica.position)
        if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError):
            self._replicas.failed(replica, self._options.avoid_s)
        what = str(error) or type(error).__name__
        logger.warning("request %s on %s: %s", self._call.request_id, replica.name, what)
        if self._num_failures >= self._options.max_failures:
            await self._give_up(f"{self._num_failures} attempts have failed, the last one: {what}")
            return True
        if self._sent or self._transcript.head:
            return await self._resume()
        if self._has_started and not self._call.is_stream:  # it cannot be resumed
            await self._give_up(what)
            return True
        self._counts["retried"] += 1
        return False

    async def _resume(self) -> bool:
        """Prepare the rest of a stream; whether there is nothing more to be had."""
        self._transcript.read(self._sent)
        self._sent.clear()
        if (end := ending(self._asked, self._transcript)) is not None:
            await self._end_with(end)
            return True
        found = ways(self._asked, self._transcript)
        self._has_to_continue = found.can_continue
        if found.can_continue:
            self._num_resumed = self._transcript.num_tokens
            return False
        if found.can_replay:
            self._go_on(replay(self._asked, self._transcript))
            return False
        await self._give_up(_CANNOT_GO_ON)
        return True

    async def _continue_at(self, replica: Replica) -> bool:
        """Prepare a continuation as this replica wants it; whether the answer has ended."""
        asked, sent = self._asked, self._transcript
        questions = Questions(self._session, replica.url, self._headers())
        max_tokens = await questions.max_tokens(asked) or asked.max_tokens
        num_told = await questions.num_told(asked, sent.choices[0])
        plan: Plan | list[bytes] | None = None
        if max_tokens is not None and num_told is not None:
            plan = continuation(asked, sent, num_told, max_tokens)
        if isinstance(plan, list):
            await self._end_with(plan)
            return True
        if plan is None and ways(asked, sent).can_replay:
            plan = replay(asked, sent)
        if plan is None:
            await self._give_up(_CANNOT_GO_ON)
            return True
        self._has_to_continue = False
        self._go_on(plan)
        return False

    def _go_on(self, plan: Plan) -> None:
        self._counts["replayed" if plan.num_kept is None else "continued"] += 1
        self._path, self._body, self._rewrite = plan.path, plan.body, plan.rewrite
        self._num_resumed = plan.num_kept

    async def _end_with(self, end: list[bytes]) -> None:
        await self._client.write(b"".join(end))
        self._learn()

    async def _give_up(self, reason: str, status: HTTPStatus = HTTPStatus.BAD_GATEWAY) -> None:
        """Tell the client."""
        self._counts["given_up"] += 1
        if self._has_started:
            await self._client.write(self._protocol.last_events(reason, status, self._last))
            return
        headers = {"Content-Type": "application/json"}
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = "1"
        await self._start(status, headers)
        await self._client.write(as_json(self._protocol.whole(reason, status)))

    def _learn(self) -> None:
        """Take in the lengths of a stream that is complete."""
        if self._call.body is None:
            return
        num_before = self._transcript.num_tokens
        self._transcript.read(self._sent[:1])
        if prompt_ids := self._transcript.prompt_ids:
            self._lengths.learn_prompt(self._call.body, len(prompt_ids))
        # As good as always one token an event; the rest of the events is not worth reading.
        self._lengths.learn_output(self._call.body, num_before + len(self._sent) - 1)


def _is_failure(event: bytes) -> bool:
    """Whether an event is an error that another replica may not have."""
    return events.is_error(event) and not events.is_of_client(event)


#: The gateway's own server writes the others.
_NOT_PASSED_BACK = OF_CONNECTION | {"content-length", "date", "server"}


def _passed_back(headers: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k.lower() not in _NOT_PASSED_BACK}
