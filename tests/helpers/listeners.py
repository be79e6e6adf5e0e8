"""Servers on this machine, and clients that write bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from yarl import URL

from sola_sched.proxy.front import Front
from sola_sched.proxy.listener import Listener, listening

HERE = ("127.0.0.1", 0)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(app: web.Application, front: Front | None = None) -> AsyncIterator[str]:
    """The URL of an application."""
    async with listening((Listener(app, front), HERE)) as (url,):
        yield url


@asynccontextmanager
async def upstream(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server that answers every request so; `GET /sola/load` with 404."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/sola/load":
            return web.Response(status=404)
        return await handler(request)

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    async with serving(app) as url:
        yield url


class RawClient:
    """A connection on which a test writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> RawClient:
        """Connect."""
        address = URL(url)
        return cls(*await asyncio.open_connection(address.host, address.port))

    async def send(self, data: bytes) -> None:
        """Write it."""
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self, limit_s: float = 10.0) -> bytes:
        """All that comes until the other side closes."""
        data = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(limit_s):
                while piece := await self.reader.read(2**16):
                    data += piece
        return data

    def close(self) -> None:
        """Close it."""
        self.writer.close()


async def ask(url: str, data: bytes, limit_s: float = 10.0) -> bytes:
    """Everything that is answered to these bytes, which must ask for the connection's end."""
    client = await RawClient.to(url)
    try:
        await client.send(data)
        return await client.rest(limit_s)
    finally:
        client.close()


def post(path: str, body: bytes, *lines: str) -> bytes:
    """A request with further header lines, after which the connection ends."""
    head = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *lines]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def status_of(answer: bytes) -> int:
    """Of HTTP; 0 where there is none."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def run(test: Callable[[], Awaitable[Any]], limit_s: float = 30.0) -> None:
    """Run it in an event loop of its own."""

    async def whole() -> None:
        async with asyncio.timeout(limit_s):
            await test()

    asyncio.run(whole())
