"""The answer to one request as its client gets it, whichever replicas it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import NamedTuple, Protocol

from multidict import CIMultiDict, MultiMapping

from sola_sched.proxy.errors import error_body
from sola_sched.proxy.headers import for_pages
from sola_sched.serving.answering.protocols import as_json, protocol_of
from sola_sched.serving.call import Call
from sola_sched.serving.resuming import events
from sola_sched.serving.resuming.rewrite import Rewrite
from sola_sched.serving.resuming.transcript import Transcript

#: Bytes of a stream's events that may be unread: to read them takes about a millisecond.
_MOST_UNREAD = 2**16
_ABORTED = "the replica has given it up, as one does that ends"


class Client(Protocol):
    """Who has sent the request."""

    async def start(self, status: int, headers: MultiMapping[str]) -> None:
        """Begin the answer."""

    async def write(self, data: bytes) -> None:
        """More of the answer."""

    def abort(self) -> None:
        """Cut the connection."""


class Part(NamedTuple):
    """Events of a replica, as they go on to the client.

    Attributes:
        data: What the client gets.
        tells: Whether that says anything of the answer; a server's comments do not.
        is_last: Whether the answer is whole with it.
        failure: An error that another replica may not have, which came in place of more.
    """

    data: bytes
    tells: bool
    is_last: bool
    failure: str | None


class Outgoing:
    """What a client is sent.

    Args:
        call: The request.
        client: Gets the answer.

    Attributes:
        has_started: Whether the status of the answer has been sent.
        is_plain: Whether what was started is no stream of events, so that nothing can be said in
            it of its end.
        rewrite: What events go through, after the stream has gone on elsewhere.
    """

    def __init__(self, call: Call, client: Client) -> None:
        self.has_started = self.is_plain = False
        self.rewrite: Rewrite | None = None
        self._call, self._client = call, client
        self._is_stream = call.is_stream  # looked at for each event
        self._protocol = protocol_of(call.path)
        self._unread: list[bytes] = []  # events that are not in the transcript yet
        self._num_unread = 0  # bytes of these
        self._transcript = Transcript()
        self._last = b""

    @property
    def has_told(self) -> bool:
        """Whether anything of a stream that can be resumed was sent."""
        return bool(self._unread or self._transcript.head)

    @property
    def has_last_event(self) -> bool:
        """Whether a stream of this kind is whole only with an event that says so."""
        return self._is_stream or bool(self._protocol.endings)

    def why_aborted(self, body: bytes) -> str | None:
        """That an answer in one piece says that its request was given up; None if it does not."""
        return _ABORTED if self._protocol.is_aborted_whole(body) else None

    def sent(self) -> Transcript:
        """All that was sent of a stream that can be resumed."""
        self._transcript.read(self._unread)
        self._unread.clear()
        self._num_unread = 0
        return self._transcript

    def lengths(self) -> tuple[list[int] | None, int]:
        """Ids of the prompt, where they are known, and output tokens of a stream that is whole."""
        num_before = self._transcript.num_tokens
        self._transcript.read(self._unread[:1])
        # As good as always one token an event; the rest of the events is not worth reading.
        return self._transcript.prompt_ids, num_before + len(self._unread) - 1

    def taken(self, found: Iterable[bytes]) -> Part:
        """What becomes of these events.

        Raises:
            DivergedError: They do not go on from what was sent.
        """
        out: list[bytes] = []
        tells = is_last = False
        for event in found:
            if self._protocol.is_aborted(event):  # before its end, which would be taken for one
                return Part(b"".join(out), tells, is_last, _ABORTED)
            if not (self._is_stream and event.startswith(events.CHUNK)):
                if events.is_comment(event):  # of the server; its engine may have stalled
                    out.append(event)
                    continue
                if self._is_failure(event):
                    failure = event.decode(errors="replace").strip()
                    return Part(b"".join(out), tells, is_last, failure)
                if self._is_stream and events.is_error(event):  # the client's own is the end
                    return Part(b"".join((*out, event, events.DONE)), True, True, None)
                is_last |= self._is_last(event)
            if changed := self._changed(event):
                tells = True
                out.append(changed)
        return Part(b"".join(out), tells, is_last, None)

    def _is_failure(self, event: bytes) -> bool:
        """Whether it is an error in place of an answer that another replica may have."""
        if self._is_stream:
            return events.is_error(event) and not events.is_of_client(event)
        return not self._last and self._protocol.is_error(event)

    def _is_last(self, event: bytes) -> bool:
        if self._is_stream:
            return events.is_done(event)
        return bool(self._protocol.endings) and self._protocol.is_end(event)

    def _changed(self, event: bytes) -> bytes:
        """What the client gets for an event; empty for nothing."""
        if not self._is_stream:
            self._last = event
            return event
        changed = self.rewrite.feed(event) if self.rewrite is not None else event
        if not changed:
            return b""
        self._unread.append(changed)
        self._num_unread += len(changed)
        if self._num_unread > _MOST_UNREAD:  # or much would be read at once when a replica is lost
            self.sent()
        return changed if self._call.wants_ids else events.without_token_ids(changed)

    async def write(self, status: int, headers: MultiMapping[str], data: bytes) -> None:
        """More of a stream, which this may begin."""
        if not data:
            return
        if not self.has_started:
            await self._start(status, headers)
        await self._client.write(data)

    async def whole(self, status: int, headers: MultiMapping[str], body: bytes) -> None:
        """An answer in one piece, or the beginning of one that is no stream of events."""
        self.is_plain = True
        await self._start(status, headers)
        await self._client.write(body)

    async def more(self, data: bytes) -> None:
        """More of an answer that is no stream of events."""
        await self._client.write(data)

    async def end_with(self, end: Iterable[bytes]) -> None:
        """The last events of a stream."""
        await self._client.write(b"".join(end))

    async def give_up(self, reason: str, status: HTTPStatus) -> None:
        """Tell the client that there is no more of its answer, or none."""
        if self.is_plain:
            self._client.abort()
            return
        if self.has_started:
            await self._client.write(self._protocol.last_events(reason, status, self._last))
            return
        headers = CIMultiDict({"Content-Type": "application/json"})
        headers.update(for_pages(self._call.headers))
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = "1"
        await self.whole(status, headers, as_json(error_body(self._call.path, reason, status)))

    async def _start(self, status: int, headers: MultiMapping[str]) -> None:
        self.has_started = True
        await self._client.start(status, headers)
