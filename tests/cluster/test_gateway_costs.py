"""What a client gives to be kept or repeated is short, whatever it sends."""

from __future__ import annotations

import tracemalloc

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from gateway_clients import gateway_to
from listeners import ask, post, run, status_of

from sola_sched.proxy.owners import Owners

PATH = "/v1/completions"


def _ids_that_arrive(*sent: str) -> list[str]:
    """The names of requests that a server is told, for those that clients give."""
    arrived: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        arrived.append(request.headers["X-Request-Id"])
        return web.json_response({})

    async def test() -> None:
        async with gateway_to(answer) as (url, _):
            for each in sent:
                asked = post(PATH, b'{"prompt": "p"}', f"X-Request-Id: {each}")
                assert status_of(await ask(url, asked)) == 200

    run(test)
    return arrived


def test_a_long_name_of_a_request_does_not_come_with_each_token() -> None:
    """vLLM writes the name of a request into each event of its stream."""
    good, long, empty = _ids_that_arrive("trace-1", "x" * 8_000, "")

    assert good == "trace-1"
    assert 0 < len(long) < 200
    assert 0 < len(empty) < 200
    assert long != empty


def test_long_names_of_sessions_take_no_room() -> None:
    owners: Owners[int] = Owners()
    tracemalloc.start()
    try:
        for number in range(1000):
            owners.learn(f"session {number} " + 10_000 * "s", number)

        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    assert owners.of("session 7 " + 10_000 * "s") == 7
    assert owners.of("session 7 " + 10_001 * "s") is None
