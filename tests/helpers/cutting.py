"""A replica whose streams are cut where the client says: it passes all else on to a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from sola_sched.serving.arrivals import ATTEMPT_HEADER

#: Events of each attempt after which its stream is cut, e.g. `5,3`: the second one after 3 more.
CUT_HEADER = "x-cut-after"
_HALF = b'data: {"id": "half of an ev'


@asynccontextmanager
async def cutting(server_url: str) -> AsyncIterator[str]:
    """Serve it on a free port; the address.

    Args:
        server_url: The server that answers.
    """
    # A connection that is kept may close as it is used.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(auto_decompress=False, connector=connector) as session:

        async def answer(request: web.Request) -> web.StreamResponse:
            passed = {k: v for k, v in request.headers.items() if k.lower() != "host"}
            async with session.request(
                request.method, server_url + request.path_qs, headers=passed,
                data=await request.read(),
            ) as reply:  # fmt: skip
                if reply.content_type != "text/event-stream":
                    return web.Response(
                        status=reply.status, body=await reply.read(),
                        content_type=reply.content_type,
                    )  # fmt: skip
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                with suppress(ConnectionResetError):  # the client has left
                    await _pass_on(request, response, reply)
                return response

        async def no_feed(_: web.Request) -> web.Response:
            return web.Response(status=404)

        app = web.Application(client_max_size=2**26)
        app.router.add_get("/sola/load", no_feed)
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app, host="127.0.0.1") as own:
            yield str(own.make_url("")).rstrip("/")


async def _pass_on(
    request: web.Request, response: web.StreamResponse, reply: aiohttp.ClientResponse
) -> None:
    cuts = request.headers.get(CUT_HEADER, "").split(",")
    num_attempt = int(request.headers.get(ATTEMPT_HEADER, "1")) - 1
    cut = cuts[num_attempt] if num_attempt < len(cuts) else ""
    left = int(cut) if cut else None
    async for data in reply.content.iter_any():
        if left is None:
            await response.write(data)
            continue
        *events, rest = data.split(b"\n\n")
        assert not rest  # vLLM writes whole events
        kept = events[:left]
        await response.write(b"".join(event + b"\n\n" for event in kept))
        left -= len(kept)
        if left == 0:
            await response.write(_HALF)
            await asyncio.sleep(0.01)
            assert request.transport is not None
            request.transport.abort()
            return
