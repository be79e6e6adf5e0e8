"""A client that goes takes its request along: no server computes for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from gateway_clients import QUICK, gateway_at, until
from listeners import RawClient, post, run, serving, upstream

from sola_sched.cluster.routers import RoundRobin
from sola_sched.colocation.door import Door
from sola_sched.colocation.sleeping import SleepOptions
from sola_sched.proxy.front import Front
from sola_sched.serving.gateway import Gateway


class Server:
    """A server that begins to answer and never ends.

    Args:
        num_events: Of a stream, before it says nothing more; None for no beginning at all.
    """

    def __init__(self, num_events: int | None) -> None:
        self.num_running = self.num_ended = 0
        self._num_events = num_events

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/is_sleeping":
            return web.json_response({"is_sleeping": False})
        self.num_running += 1
        try:
            if self._num_events is not None:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                for _ in range(self._num_events):
                    await response.write(b'data: {"id": "c", "choices": []}\n\n')
            await asyncio.sleep(60)
        finally:
            self.num_running -= 1
            self.num_ended += 1
        return web.Response()


@asynccontextmanager
async def proxy(which: str, server_url: str) -> AsyncIterator[tuple[str, Front]]:
    """A gateway or a door before one server."""
    if which == "door":
        door = Door({"a": server_url}, SleepOptions())
        async with serving(door.app(), door.front) as url:
            yield url, door.front
        return
    async with gateway_at(server_url) as (url, gateway):
        yield url, gateway.front
        assert all(not replica.attempts for replica in gateway.replicas)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("num_events", [None, 0, 1])
@pytest.mark.parametrize("which", ["gateway", "door"])
def test_a_client_that_goes_ends_its_request_on_the_server(
    which: str, num_events: int | None, path: str
) -> None:
    server = Server(num_events)

    async def test() -> None:
        async with upstream(server) as server_url, proxy(which, server_url) as (url, front):
            client = await RawClient.to(url)
            await client.send(post(path, b'{"model": "a", "prompt": "p", "stream": true}'))
            await until(lambda: server.num_running == 1)
            await asyncio.sleep(0.05)
            client.close()

            await until(lambda: server.num_ended == 1, limit_s=2.0)
            await until(lambda: not front._answers)
            assert server.num_running == 0

    run(test)
    assert server.num_ended == 1


def test_a_client_that_goes_while_it_waits_for_a_replica_is_forgotten() -> None:
    async def test() -> None:
        gateway = Gateway(RoundRobin(), replace(QUICK, patience_s=30.0))
        async with serving(gateway.app(), gateway.front) as url:
            client = await RawClient.to(url)
            await client.send(post("/v1/completions", b'{"prompt": "p"}'))
            await until(lambda: gateway.front._answers)
            client.close()

            await until(lambda: not gateway.front._answers)
            assert gateway.counts["given_up"] == 0

    run(test)
