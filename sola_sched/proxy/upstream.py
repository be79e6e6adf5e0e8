"""Requests to vLLM servers, over connections that are kept.

A server closes a connection that has been idle (uvicorn after 5 s), and may do so in the moment in
which a request is sent over it. Nothing is wrong then with the server: the request goes again at
once, over a new connection.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import aiohttp
from multidict import MultiMapping

#: Longer bodies are sent piece by piece, so that others get their turn meanwhile.
_SHORT = 2**16
#: Most bytes of one line in the head of an answer.
_LONGEST_LINE = 2**16
#: What is raised where no connection was made, so that nothing was sent.
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
#: Whether the connection that a task has got last had been used before.
_is_used_before: ContextVar[bool] = ContextVar("_is_used_before", default=False)


def reason(error: Exception, url: str = "") -> str:
    """Why a server has not answered, as clients may know it: without its address.

    Args:
        url: Of the server, which the error may name.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        why = f" ({os.strerror(number)})" if number in errno.errorcode else ""
        return f"no connection could be made{why}"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection could be made in time"
    if isinstance(error, TimeoutError):
        return "it has not answered in time"
    if isinstance(error, aiohttp.ClientResponseError):
        return "its answer is no HTTP"
    if isinstance(error, aiohttp.ClientError | ConnectionError):
        return "the connection broke off"
    text = str(error)
    return (text.replace(url, "it") if url else text) or type(error).__name__


class Upstream:
    """Connections to servers; an asynchronous context.

    Args:
        connect_s: Most seconds that a new connection may take.

    Attributes:
        session: For requests that need nothing of this.
    """

    def __init__(self, connect_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s)
        self._stack = AsyncExitStack()
        self.session: aiohttp.ClientSession
        self._anew: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self.session = await self._open(_KeepingConnector(limit=0))
        self._anew = await self._open(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def _open(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),  # cookies are the clients'
                max_line_size=_LONGEST_LINE,
                max_field_size=_LONGEST_LINE,
            )
        )

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: MultiMapping[str],
        data: bytes,
        is_repeatable: bool,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask a server; its answer as it comes, not followed and not inflated.

        Args:
            is_repeatable: Whether the request may be sent twice; one that may not gets a new
                connection, which no server closes for having been idle.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: It has not answered.
        """
        async with await self._answer(method, url, headers, data, is_repeatable) as reply:
            yield reply

    async def _answer(
        self, method: str, url: str, headers: MultiMapping[str], data: bytes, is_repeatable: bool
    ) -> aiohttp.ClientResponse:
        if is_repeatable:
            try:
                return await _ask(self.session, method, url, headers, data)
            except NOT_CONNECTED:
                raise
            except (aiohttp.ClientConnectionError, ConnectionError):
                if not _is_used_before.get():
                    raise
        return await _ask(self._anew, method, url, headers, data)


class _KeepingConnector(aiohttp.TCPConnector):
    """Says whether a connection had been used before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: WeakSet[asyncio.Protocol] = WeakSet()

    async def connect(
        self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        """See `BaseConnector.connect`."""
        _is_used_before.set(False)
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        if protocol is not None:
            _is_used_before.set(protocol in self._known)
            self._known.add(protocol)
        return connection


async def _ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: MultiMapping[str],
    data: bytes,
) -> aiohttp.ClientResponse:
    body: Any = data if len(data) <= _SHORT else io.BytesIO(data)
    return await session.request(
        method,
        url,
        headers=headers,
        data=body or None,
        allow_redirects=False,
        skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
    )
