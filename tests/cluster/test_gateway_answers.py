"""Long answers that are no streams of events: passed on as they come, to clients that are slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from gateway_clients import gateway_to, until
from listeners import Handler, RawClient, ask, post, run, status_of

from sola_sched.proxy.limits import Limits
from sola_sched.serving.answering.answers import MOST_KEPT
from sola_sched.serving.gateway import Gateway

PATH = "/v1/embeddings"
BODY = b'{"input": "p"}'
PIECE = b"x" * 2**16


def saying(*pieces: bytes, status: int = 200, is_cut: bool = False) -> Handler:
    """A server whose answers have these pieces; it may cut the last one."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != PATH:
            return web.Response(status=404)
        size = sum(map(len, pieces)) + is_cut
        response = web.StreamResponse(status=status, headers={"Content-Length": str(size)})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


def asked(*handlers: Handler, body: bytes = BODY, **more: Any) -> tuple[bytes, Gateway]:
    """An answer through a gateway before these servers, and the gateway."""
    found: list[tuple[bytes, Gateway]] = []

    async def test() -> None:
        async with gateway_to(*handlers, **more) as (url, gateway):
            found.append((await ask(url, post(PATH, body)), gateway))

    run(test)
    return found[0]


def test_a_client_that_reads_slowly_and_does_not_stop_gets_all_of_a_long_answer() -> None:
    num_pieces = 24 * 16

    async def test() -> None:
        limits = Limits(write_s=1.0)
        async with gateway_to(saying(*[PIECE] * num_pieces), limits=limits) as (url, _):
            client = await RawClient.to(url)
            await client.send(post(PATH, BODY))
            num_read, begin_s = 0, asyncio.get_running_loop().time()
            while piece := await client.reader.read(2**16):
                num_read += len(piece)
                await asyncio.sleep(0.01)

            assert num_read >= num_pieces * len(PIECE)
            assert asyncio.get_running_loop().time() - begin_s > 3.0  # some times the limit

    run(test)


def test_a_client_that_pauses_does_not_make_its_replica_seem_to_stall() -> None:
    whole = [PIECE] * 24 * 16

    async def test() -> None:
        async with gateway_to(saying(*whole), saying(*whole)) as (url, gateway):
            client = await RawClient.to(url)
            await client.send(post(PATH, BODY))
            num_read = 0
            while piece := await client.reader.read(2**16):
                if num_read // 2**22 < (num_read + len(piece)) // 2**22:
                    await asyncio.sleep(2 * gateway.options.stall_s)
                num_read += len(piece)

            assert num_read >= sum(map(len, whole))
            assert (gateway.counts["stalls"], gateway.counts["given_up"]) == (0, 0)

    run(test)


def test_a_long_answer_is_not_held_for_a_client_that_does_not_read() -> None:
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        if request.path != PATH:
            return web.Response(status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(PIECE)
            sent += len(PIECE)
        return response

    async def test() -> None:
        async with gateway_to(answer) as (url, gateway):
            client = await RawClient.to(url)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(post(PATH, BODY))
            before = -1
            while sent != before:  # what fits into the buffers of both connections
                before = sent
                await asyncio.sleep(0.3)
            assert 0 < sent < 2**25
            client.writer.transport.abort()
            await until(lambda: not gateway.front._answers)

    run(test)


@pytest.mark.parametrize("num_kept", [0, 1])
def test_what_breaks_off_is_had_elsewhere_until_it_has_begun_to_go_on(num_kept: int) -> None:
    size = MOST_KEPT if num_kept == 0 else MOST_KEPT + 2**18
    cut, good = saying(b"x" * size, is_cut=True), saying(b"good")

    answer, gateway = asked(cut, good)

    if num_kept == 0:
        assert answer.endswith(b"\r\n\r\ngood")
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(answer) == 200
    assert f"Content-Length: {size + 1}".encode() in head
    assert set(body) == {ord("x")}  # nothing else is written into it
    assert len(body) <= size
    assert gateway.counts["given_up"] == 1


def test_a_long_answer_that_is_late_is_cut_and_has_nothing_else_in_it() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(2 * MOST_KEPT)})
        await response.prepare(request)
        await response.write(b"x" * (MOST_KEPT + 1))
        await asyncio.sleep(30)
        return response

    answer, _ = asked(slow, limits=Limits(whole_s=0.5))

    assert status_of(answer) == 200
    assert answer.partition(b"\r\n\r\n")[2] == b"x" * (MOST_KEPT + 1)


@pytest.mark.parametrize("status", [500, 503])
def test_long_errors_are_not_the_answer_while_another_replica_has_one(status: int) -> None:
    bad = saying(*[PIECE] * 8, status=status)

    answer, _ = asked(bad, saying(b"good"))

    assert answer.endswith(b"\r\n\r\ngood")


@pytest.mark.parametrize(
    "sizes", [(0,), (1,), (MOST_KEPT,), (MOST_KEPT, 1), (2**20,), (100, 2**20, 7)]
)
@pytest.mark.parametrize("status", [200, 400])
def test_answers_of_all_lengths_come_as_they_are(sizes: Sequence[int], status: int) -> None:
    pieces = [json.dumps("a" * size).encode() for size in sizes]

    answer, _ = asked(saying(*pieces, status=status))

    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(answer) == status
    assert body == b"".join(pieces)
    assert f"Content-Length: {len(body)}".encode() in head
