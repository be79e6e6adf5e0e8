"""One request from its arrival to its answer, on as many replicas as it takes.

What has been sent to a client is never sent again. Until the first event nothing has been, so the
request starts anew elsewhere; after it a stream is resumed (`resuming`). A replica that refuses
(HTTP 503) is not asked again; when all have, the client gets the refusal that asks it to come back
soonest. The SLO clock is the first arrival's: later attempts tell the engine how long it has run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from dataclasses import replace
from http import HTTPStatus

import aiohttp
from multidict import CIMultiDict

from sola_sched.cluster.view import Refusal, RoutedRequest
from sola_sched.config.slo import BEGAN_KEY, RESUMED_KEY, WAITED_KEY
from sola_sched.proxy.headers import passed_back
from sola_sched.proxy.json_object import encoded
from sola_sched.proxy.owners import Owners, of_response, response_id
from sola_sched.proxy.upstream import NOT_CONNECTED, Upstream, reason
from sola_sched.serving.answering.answers import Answer, beginning
from sola_sched.serving.answering.outgoing import Client, Outgoing
from sola_sched.serving.answering.refusals import Refusals
from sola_sched.serving.arrivals import ATTEMPT_HEADER
from sola_sched.serving.call import Call, Lengths
from sola_sched.serving.options import GatewayOptions
from sola_sched.serving.replicas import Attempt, Replica, Replicas
from sola_sched.serving.resuming import events
from sola_sched.serving.resuming.asked import Asked, without_query
from sola_sched.serving.resuming.plans import Plan, continuation, ending, replay, ways
from sola_sched.serving.resuming.questions import Questions
from sola_sched.serving.resuming.rewrite import DivergedError
from sola_sched.serving.slo_headers import with_xargs, xargs_of

logger = logging.getLogger(__name__)

_EVENT_STREAM = "text/event-stream"
#: Names of requests; what a client calls them need not be unique.
_numbers = itertools.count()
_CANNOT_GO_ON = (
    "the replica was lost, and the rest of this answer cannot come from another one: see 'What "
    "happens when a replica fails' in docs/cluster.md; with a 'seed' or at temperature 0 it can"
)


class CutError(Exception):
    """An attempt has ended before the answer was whole."""


class Delivery:
    """Delivers one request.

    Args:
        call: The request.
        client: Gets the answer.
        replicas: Where it may go.
        upstream: Connections to them.
        owners: Which of them has what.
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
        upstream: Upstream,
        owners: Owners[Replica],
        lengths: Lengths,
        options: GatewayOptions,
        counts: Counter[str],
    ) -> None:
        self._call, self._out = call, Outgoing(call, client)
        self._number = next(_numbers)
        self._replicas, self._upstream, self._owners = replicas, upstream, owners
        self._lengths, self._options, self._counts = lengths, options, counts
        self._path, self._body = call.path, call.body
        self._asked = Asked(call.path, call.body or {}, call.wants_ids)
        self._has_to_continue = False
        self._first_token_s: float | None = None
        self._num_resumed: int | None = None
        self._owner_key, self._may_store = call.owner_key, call.may_store
        self._has_waited = False
        self._refusals = Refusals(call, replicas, counts)
        self._avoid: set[int] = set()
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
                await self.give_up(f"the answer could not be repeated elsewhere: {error}")
                return
            except (CutError, TimeoutError, aiohttp.ClientError, OSError) as error:
                self._has_arrived |= not isinstance(error, NOT_CONNECTED)
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
            choice = self._choose(request)
            if isinstance(choice, Replica):
                return choice, request
            if self._refusals.answer is not None:  # all that can be reached have refused
                await self._answer(self._refusals.answer)
                return None
            left_s = limit_s - self._replicas.clock()
            if left_s <= 0.0:
                await self.give_up(choice.reason, HTTPStatus.SERVICE_UNAVAILABLE)
                return None
            self._has_waited = True
            try:  # a replica that was avoided comes back without an event
                await asyncio.wait_for(changed.wait(), min(left_s, self._options.avoid_s))
            except TimeoutError:
                continue

    def _choose(self, request: RoutedRequest) -> Replica | Refusal:
        """The replica that has what the request is about, or the one that the router says."""
        owner = self._owners.of(self._owner_key) if self._owner_key is not None else None
        has_failed = owner is None or owner in self._refusals.by or owner.position in self._avoid
        if not has_failed:
            others = {each for each in self._replicas if each is not owner}
            choice = self._replicas.choose(request, others)
            if isinstance(choice, Replica):
                return choice
        return self._replicas.choose(request, self._refusals.by)

    async def _try(self, replica: Replica, request: RoutedRequest) -> bool:
        """One attempt; whether it has answered."""
        async with asyncio.timeout(None) as limit:
            with self._replicas.attempt(replica, request, limit) as attempt:
                self._num_attempts += 1
                if self._has_to_continue and await self._continue_at(replica):
                    return True
                async with self._upstream.request(
                    self._call.method,
                    replica.url + self._path,
                    headers=self._headers(),
                    data=self._data(),
                    is_repeatable=self._call.is_repeatable,
                ) as reply:
                    self._has_arrived = True
                    if self._owner_key is not None and reply.status == HTTPStatus.OK:
                        self._owners.learn(self._owner_key, replica)
                    is_stream = (
                        reply.content_type == _EVENT_STREAM
                        and reply.status == HTTPStatus.OK
                        and reply.headers.get("Content-Encoding", "identity") == "identity"
                    )
                    headers = passed_back(reply.headers, replica.url, keeps_length=not is_stream)
                    if is_stream:
                        return await self._relay(reply, headers, replica, attempt)
                    data, is_whole = await beginning(reply)
                    answer = Answer(reply.status, headers, data)
                    if not is_whole and not self._out.has_started:
                        if not self._refusals.may_go_on(reply.status):
                            return await self._pass_on(reply, answer, replica, attempt)
                        answer = replace(answer, body=data + await reply.read())
        return await self._answered(replica, answer, request.prompt_tokens)

    async def _pass_on(
        self, reply: aiohttp.ClientResponse, begun: Answer, replica: Replica, attempt: Attempt
    ) -> bool:
        """Pass on a long answer that is no stream of events, as it comes after its beginning."""
        attempt.has_begun = True
        self._learn_stored(begun.body, replica)
        with attempt.writing():
            await self._out.whole(begun.status, begun.headers, begun.body)
        self._replicas.progressed(replica)
        async for piece in reply.content.iter_any():
            with attempt.writing():
                await self._out.more(piece)
            self._replicas.progressed(replica)  # only now: the client may have read slowly
        self._replicas.served(replica)
        return True

    def _headers(self) -> CIMultiDict[str]:
        """Those of the request, and where a replica has counted it, the number of attempts."""
        headers = self._call.headers.copy()
        if self._has_arrived:
            headers[ATTEMPT_HEADER] = str(self._num_attempts)
        return headers

    def _data(self) -> bytes:
        """The body; after a wait with how long the request has run already."""
        if self._body is None:
            return self._call.data
        if self._num_attempts == 1 and not self._has_waited:
            return encoded(self._body)
        now_s = self._replicas.clock()
        path = without_query(self._path)
        xargs = dict(xargs_of(self._body, path))
        since_s = self._call.arrival_s
        if self._num_resumed and self._first_token_s is not None:
            since_s = self._first_token_s
            if not xargs.get(RESUMED_KEY):
                xargs[BEGAN_KEY] = round(1e3 * (since_s - self._call.arrival_s), 3)
            xargs[RESUMED_KEY] = self._num_resumed + (xargs.get(RESUMED_KEY) or 0)
        waited_ms = 1e3 * (now_s - since_s)
        xargs[WAITED_KEY] = round(waited_ms + (xargs.get(WAITED_KEY) or 0.0), 3)
        return encoded(with_xargs(self._body, path, xargs))

    async def _relay(
        self,
        reply: aiohttp.ClientResponse,
        headers: CIMultiDict[str],
        replica: Replica,
        attempt: Attempt,
    ) -> bool:
        """Pass a stream on, event by event; of one that breaks within an event the whole ones.

        Raises:
            CutError: It ended before its end.
        """
        splitter = events.EventSplitter()
        is_whole = False
        try:
            async for data in reply.content.iter_any():
                if attempt.is_over:  # what has come is not taken for sent
                    raise CutError("the replica is lost or has stalled")
                self._learn_stored(data, replica)
                part = self._out.taken(splitter.feed(data))
                is_whole |= part.is_last
                if part.tells:
                    attempt.has_begun = True
                    if self._first_token_s is None:
                        self._first_token_s = self._replicas.clock()
                    if is_whole:
                        attempt.limit = None
                with attempt.writing():
                    await self._out.write(reply.status, headers, part.data)
                if part.tells:
                    self._replicas.progressed(replica)
                if part.failure is not None:
                    self._replicas.erred(replica, self._options.avoid_s)
                    raise CutError(part.failure)
                if is_whole and self._call.is_stream:
                    self._replicas.served(replica)
                    self._learn()
                    return True
        except (aiohttp.ClientError, OSError):
            if not is_whole:
                raise
            return True
        if not is_whole and self._out.has_last_event:
            raise CutError("the stream ended without its end")
        self._replicas.served(replica)
        with attempt.writing():
            await self._out.write(reply.status, headers, splitter.rest)
        return True

    async def _answered(self, replica: Replica, answer: Answer, num_prompt: int) -> bool:
        """Whether a whole answer is one for the client."""
        self._replicas.progressed(replica)
        if self._refusals.take(replica, answer, self._out.has_started, num_prompt):
            return False
        is_whole = answer.status == HTTPStatus.OK
        if is_whole and (why := self._out.why_aborted(answer.body)) is not None:
            self._replicas.erred(replica, self._options.avoid_s)
            raise CutError(why)
        self._learn_stored(answer.body, replica)
        if answer.is_failure:
            self._replicas.erred(replica, self._options.avoid_s)
        else:
            self._replicas.served(replica)
        may_retry = self._call.is_repeatable and self._num_failures + 1 < self._options.max_failures
        is_no_rest = self._out.has_started and answer.status != HTTPStatus.OK
        if is_no_rest or (answer.is_failure and may_retry):
            raise CutError(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        if not self._out.has_started and (num_told := answer.prompt_tokens) is not None:
            self._lengths.learn_prompt(self._call, num_told)
        await self._answer(answer)
        return True

    def _learn_stored(self, data: bytes, replica: Replica) -> None:
        """The replica keeps this answer, whose beginning says its name."""
        if self._may_store and (stored_id := response_id(data)) is not None:
            self._may_store = False
            self._owners.learn(of_response(stored_id), replica)

    async def _answer(self, answer: Answer) -> None:
        if self._out.has_started:
            await self.give_up("no other replica takes the rest of the answer")
            return
        await self._out.whole(answer.status, answer.headers, answer.body)

    async def _failed(self, replica: Replica, error: Exception) -> bool:
        """After a failed attempt: whether the request has ended with it."""
        self._num_failures += 1
        self._counts["failed_attempts"] += 1
        self._avoid.add(replica.position)
        if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError):
            self._replicas.failed(replica, self._options.avoid_s)
        told = str(error) or type(error).__name__
        logger.warning("request %s on %s: %s", self._call.request_id, replica.name, told)
        what = reason(error)
        if self._out.is_plain:  # what is missing can only be seen from its length
            await self.give_up(what)
            return True
        if self._has_arrived and not self._call.is_repeatable:
            await self.give_up(f"it may have been done, and must not be done twice: {what}")
            return True
        if self._num_failures >= self._options.max_failures:
            await self.give_up(f"{self._num_failures} attempts have failed, the last one: {what}")
            return True
        if self._out.has_told:
            return await self._resume()
        if self._out.has_started and not self._call.is_stream:  # it cannot be resumed
            await self.give_up(f"the replica was lost within its answer: {what}")
            return True
        self._counts["retried"] += 1
        return False

    async def _resume(self) -> bool:
        """Prepare the rest of a stream; whether there is nothing more to be had."""
        sent = self._out.sent()
        if (end := ending(self._asked, sent)) is not None:
            await self._end_with(end)
            return True
        found = ways(self._asked, sent)
        self._has_to_continue = found.can_continue
        if found.can_continue:
            self._num_resumed = sent.num_tokens
            return False
        if found.can_replay:
            self._go_on(replay(self._asked, sent))
            return False
        await self.give_up(_CANNOT_GO_ON)
        return True

    async def _continue_at(self, replica: Replica) -> bool:
        """Prepare a continuation as this replica wants it; whether the answer has ended."""
        asked, sent = self._asked, self._out.sent()
        questions = Questions(self._upstream.session, replica.url, self._headers())
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
            await self.give_up(_CANNOT_GO_ON)
            return True
        self._has_to_continue = False
        self._go_on(plan)
        return False

    def _go_on(self, plan: Plan) -> None:
        self._counts["replayed" if plan.num_kept is None else "continued"] += 1
        self._path, self._body, self._num_resumed = plan.path, plan.body, plan.num_kept
        self._out.rewrite = plan.rewrite

    async def _end_with(self, end: list[bytes]) -> None:
        await self._out.end_with(end)
        self._learn()

    async def give_up(self, reason: str, status: HTTPStatus = HTTPStatus.BAD_GATEWAY) -> None:
        """Tell the client that there is no more of its answer, or none."""
        self._counts["given_up"] += 1
        await self._out.give_up(reason, status)

    def _learn(self) -> None:
        """Take in the lengths of a stream that is complete."""
        if self._call.body is None:
            return
        prompt_ids, num_output = self._out.lengths()
        if prompt_ids:
            self._lengths.learn_prompt(self._call, len(prompt_ids))
        self._lengths.learn_output(self._call, num_output)
