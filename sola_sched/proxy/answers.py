"""An answer to one client, written piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web
from multidict import MultiMapping

#: Bytes that are written at once: so much of an answer waits here for a client that reads slowly.
_PIECE = 2**16


class ClientGoneError(Exception):
    """Who has sent the request does not read any more."""


class Answer:
    """The answer to a request.

    Args:
        request: Of the client.

    Attributes:
        writing_since_s: Since when the client has taken nothing of what is being written, as far as
            is known, on the event loop's clock; None while nothing is.
        on_begin: Called when it begins.
    """

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.writing_since_s: float | None = None
        self.on_begin: Callable[[], None] | None = None
        self._response: web.StreamResponse | None = None
        self._num_unsent = 0  # bytes, at the last look
        self._loop = asyncio.get_running_loop()
        self._has_body = request.method != "HEAD"

    @property
    def has_begun(self) -> bool:
        """Whether its status has been sent."""
        return self._response is not None

    async def start(self, status: int, headers: MultiMapping[str]) -> None:
        """Begin it.

        Raises:
            ClientGoneError: The client has gone; so do the others.
        """
        self._response = web.StreamResponse(status=status, headers=headers)
        if self.on_begin is not None:
            self.on_begin()
        await self._do(self._response.prepare(self.request))

    async def write(self, data: bytes) -> None:
        """More of it; called for each token, so `_do` is written out.

        A large body is written in pieces, and `writing_since_s` starts anew with each: a client
        that reads slowly but goes on reading is not taken for one that has stopped. An answer to
        HEAD has no body: its client would take it for the next answer.
        """
        assert self._response is not None
        if not self._has_body:
            return
        if len(data) > _PIECE:
            for begin in range(0, len(data), _PIECE):
                await self.write(data[begin : begin + _PIECE])
            return
        self.writing_since_s = self._loop.time()
        try:
            await self._response.write(data)
        except ConnectionError as error:
            raise ClientGoneError from error
        finally:
            self.writing_since_s = None

    def has_not_read_since(self, time_s: float) -> bool:
        """Whether nothing of what is being written has gone out since then; asked now and then.

        When bytes go out is not seen, only that there are fewer or more of them than at the last
        call. If so, they are taken to have gone out at the moment of this call.
        """
        transport = self.request.transport
        num_unsent = 0 if transport is None else transport.get_write_buffer_size()
        if num_unsent != self._num_unsent:
            self._num_unsent = num_unsent
            if self.writing_since_s is not None:
                self.writing_since_s = self._loop.time()
        return self.writing_since_s is not None and self.writing_since_s < time_s

    async def end(self) -> web.StreamResponse:
        """The whole response, also where its client has gone."""
        if self._response is None:
            return web.Response(status=HTTPStatus.BAD_GATEWAY)
        with contextlib.suppress(ClientGoneError):
            await self._do(self._response.write_eof())
        return self._response

    async def whole(self, response: web.StreamResponse) -> None:
        """A response that was made elsewhere."""
        self._response = response
        await self._do(response.prepare(self.request))
        await self._do(response.write_eof())

    def abort(self) -> None:
        """Cut the connection."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def _do(self, writing: Awaitable[object]) -> None:
        self.writing_since_s = self._loop.time()
        try:
            await writing
        except ConnectionError as error:  # aiohttp's own are such, too
            raise ClientGoneError from error
        finally:
            self.writing_since_s = None
