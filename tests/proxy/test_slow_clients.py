"""Clients that read slowly get all of their answers; those without a key have nothing held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from listeners import RawClient, ask, post, run, serving, status_of
from multidict import CIMultiDict

from sola_sched.proxy.front import Front, is_up
from sola_sched.proxy.keys import Keys
from sola_sched.proxy.limits import Limits
from sola_sched.proxy.paths import Passage

PATH = "/v1/completions"
LONG = bytes(24 * 2**20)
Serve = Callable[[web.Request, Passage, bytes], Awaitable[web.StreamResponse]]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_client_that_reads_slowly_is_not_left_while_it_reads(is_whole: bool) -> None:
    async def serve(request: web.Request, passage: Passage, data: bytes) -> web.StreamResponse:
        if is_whole:
            return web.Response(body=LONG)
        answer = front.answer(request)
        await answer.start(200, CIMultiDict({"Content-Length": str(len(LONG))}))
        await answer.write(LONG)
        return await answer.end()

    front = Front(serve, Limits(write_s=1.5), Keys())

    async def test() -> None:
        async with serving(front.app(is_up), front) as url:
            client = await RawClient.to(url)
            await client.send(post(PATH, b"{}"))
            num_read, begin_s = 0, asyncio.get_running_loop().time()
            while piece := await client.reader.read(2**16):
                num_read += len(piece)
                await asyncio.sleep(0.01)

            assert num_read > len(LONG)
            assert asyncio.get_running_loop().time() - begin_s > 3.0  # twice the limit

    run(test)


def options(*lines: str, body: bytes = b"") -> bytes:
    """What a browser asks before it sends a request to another origin, or what looks like it."""
    length = [f"Content-Length: {len(body)}"] if body else []
    head = ["OPTIONS /v1/completions HTTP/1.1", "Host: x", "Connection: close", *length, *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


def test_without_a_key_a_browser_may_ask_what_it_may_send_and_nothing_has_a_body() -> None:
    bodies: list[bytes] = []

    async def serve(request: web.Request, passage: Passage, data: bytes) -> web.StreamResponse:
        bodies.append(data)
        return web.Response()

    front = Front(serve, Limits(max_body_bytes=1000, max_held_bytes=1500), Keys(["k"]))
    chunked = options("Transfer-Encoding: chunked")

    async def test() -> None:
        async with serving(front.app(is_up), front) as url:
            held = [await RawClient.to(url) for _ in range(4)]
            for client in held:
                await client.send(options("Content-Length: 900") + b"x" * 800)
                await client.send(b"")
            for client in held:
                assert status_of(await client.reader.readline()) == 401
            assert front.bodies.num_bytes == 0

            asked = [options(), options("Content-Length: 0"), options(body=b"hello"),
                     chunked + b"5\r\nhello\r\n0\r\n\r\n",
                     options("Upgrade: websocket", "Connection: Upgrade", body=b"hello"),
                     options("Authorization: Bearer k", body=b"hello")]  # fmt: skip
            answers = [status_of(await ask(url, each)) for each in asked]
            assert answers == [200, 200, 401, 401, 401, 200]
            for client in held:
                client.close()

    run(test)
    assert bodies == [b"", b"", b"hello"]
