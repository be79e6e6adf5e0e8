"""Bodies of requests: read within limits of size and time, and inflated within the same."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from sola_sched.proxy.errors import RefusedError
from sola_sched.proxy.limits import Limits

_PLAIN = ("", "identity")
_DEFLATED = ("deflate", "gzip", "x-gzip")
#: `zlib` finds out itself whether it is gzip's format or its own.
_EITHER_FORMAT = 47
#: Of what was compressed in parts, each of which costs time. Compressors make one, some of 64 KiB.
_MOST_MEMBERS = 1000
#: Bytes that are inflated at once; those behind a member's end are copied.
_PIECE = 2**16
#: A request that is still being sent when the server ends has so long, seconds.
_END_S = 5.0


@dataclass
class _Holding:
    """Bytes that one request holds."""

    num_bytes: int = 0


class Bodies:
    """The bodies that are held for one server.

    Args:
        limits: Of size and time.

    Attributes:
        num_bytes: Of all that are held now.
    """

    def __init__(self, limits: Limits) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._being_read: set[asyncio.Timeout] = set()
        self._is_ending = False

    @asynccontextmanager
    async def of(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body, held as long as its request is there.

        Raises:
            RefusedError: It is too long, too slow, corrupt, or compressed in another way.
        """
        coding = request.headers.get("Content-Encoding", "").strip().lower()
        if coding not in _PLAIN and coding not in _DEFLATED:
            raise RefusedError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"a body must be plain, or compressed with gzip or deflate (got {coding[:40]!r}).",
                {"Accept-Encoding": "gzip, deflate"},
            )
        if (request.content_length or 0) > self._limits.max_body_bytes:
            raise self._too_long()
        holding = _Holding()
        try:
            body = await self._read(request, holding)
            if coding in _DEFLATED and body:
                body = await asyncio.to_thread(self._inflated, body)  # lets go of the interpreter
                self._hold(holding, len(body))
            yield body
        finally:
            self.num_bytes -= holding.num_bytes

    async def _read(self, request: web.Request, holding: _Holding) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s) as limit:
                self._being_read.add(limit)
                if self._is_ending:
                    self._hurry(limit)
                try:
                    async for piece in request.content.iter_any():
                        data += piece
                        if len(data) > self._limits.max_body_bytes:
                            raise self._too_long()
                        self._hold(holding, len(piece))
                finally:
                    self._being_read.discard(limit)
        except TimeoutError:
            raise RefusedError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"a body must be there within {self._limits.body_s:g} s (got {len(data)} bytes).",
            ) from None
        except web.RequestPayloadError as error:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"a body must be as its headers say (got: {error})."
            ) from error
        return bytes(data)

    def end(self) -> None:
        """The server ends: a request that is not whole soon is not waited for."""
        self._is_ending = True
        for limit in self._being_read:
            self._hurry(limit)

    def _hurry(self, limit: asyncio.Timeout) -> None:
        soon = asyncio.get_running_loop().time() + _END_S
        when = limit.when()
        if not limit.expired() and (when is None or soon < when):
            limit.reschedule(soon)

    def _hold(self, holding: _Holding, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        holding.num_bytes += num_bytes
        if self.num_bytes > self._limits.max_held_bytes:
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"bodies of all requests must not exceed {self._limits.max_held_bytes} bytes; try "
                "again later.",
                {"Retry-After": "1"},
            )

    def _inflated(self, body: bytes) -> bytes:
        """The body as it was before it was compressed."""
        parts: list[bytes] = []
        room, left, num_members = self._limits.max_body_bytes, memoryview(body), 0
        while left:  # of gzip there may be several after another
            num_members += 1
            if num_members > _MOST_MEMBERS:
                raise RefusedError(
                    HTTPStatus.BAD_REQUEST,
                    f"a compressed body must have {_MOST_MEMBERS} members at most.",
                )
            inflating = zlib.decompressobj(_EITHER_FORMAT)
            while not inflating.eof:
                if not left:
                    raise RefusedError(
                        HTTPStatus.BAD_REQUEST,
                        "a compressed body must be whole (its end is missing).",
                    )
                piece, left = left[:_PIECE], left[_PIECE:]
                try:
                    parts.append(inflating.decompress(piece, room + 1))
                except zlib.error as error:
                    raise RefusedError(
                        HTTPStatus.BAD_REQUEST, f"a compressed body must be whole ({error})."
                    ) from error
                room -= len(parts[-1])
                if room < 0:
                    raise self._too_long()
            rest = len(inflating.unused_data)
            left = memoryview(body)[len(body) - len(left) - rest :]
        return b"".join(parts)

    def _too_long(self) -> RefusedError:
        return RefusedError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"a body must not be longer than {self._limits.max_body_bytes} bytes; the server's "
            "option is --max-body-bytes.",
        )
