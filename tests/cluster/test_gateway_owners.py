"""Requests about what one replica has, a stored response or a session, go to that replica."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web
from gateway_clients import Echo, gateway_to
from listeners import run

PATH = "/v1/completions"


def _stores() -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A server that keeps its answers, and does not know those of others."""
    known: dict[str, str] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        response_id = request.path.removeprefix("/v1/responses/").removesuffix("/cancel")
        if response_id in known:
            return web.json_response({"id": response_id})
        if request.path != "/v1/responses":
            return web.json_response({"error": {"message": "not found"}}, status=404)
        body = await request.json()
        if body.get("previous_response_id", next(iter(known), None)) not in {None, *known}:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        new = f"resp_{id(known)}_{len(known)}"
        known[new] = new
        if not body.get("stream"):
            return web.json_response({"id": new, "previous_response_id": None})
        events = [{"response": {"id": new}, "type": kind} for kind in
                  ("response.created", "response.completed")]  # fmt: skip
        text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        return web.Response(text=text, content_type="text/event-stream")

    return answer


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_stored_response_is_found_where_it_is(is_stream: bool, forgets: bool) -> None:
    async def test() -> None:
        stores = [_stores() for _ in range(3)]
        async with gateway_to(*stores) as (url, gateway), aiohttp.ClientSession() as session:
            for _ in range(10):
                body: dict[str, Any] = {"input": "p", "stream": is_stream}
                async with session.post(f"{url}/v1/responses", json=body) as reply:
                    stored = (await reply.text()).partition("resp_")[2].partition('"')[0]
                if forgets:  # as one that has started anew
                    gateway._owners._servers.clear()
                for method, path, more in (
                    ("GET", f"/v1/responses/resp_{stored}", None),
                    ("POST", f"/v1/responses/resp_{stored}/cancel", None),
                    ("POST", "/v1/responses", {"previous_response_id": f"resp_{stored}"}),
                ):
                    async with session.request(method, url + path, json=more) as reply:
                        assert reply.status == 200, path
            async with session.get(f"{url}/v1/responses/resp_none") as reply:
                assert reply.status == 404

    run(test)


def test_a_session_stays_where_it_is_until_its_replica_is_lost() -> None:
    async def test() -> None:
        echoes = [Echo() for _ in range(3)]
        async with gateway_to(*echoes) as (url, gateway), aiohttp.ClientSession() as session:

            async def go(i: int, **headers: str) -> None:
                ways: list[dict[str, Any]] = [
                    {"session_id": "s"}, {"vllm_xargs": {"session_id": "s"}}, {},
                ]  # fmt: skip
                more = {"X-Session-ID": "s"} if i % 3 == 2 else {}
                async with session.post(url + PATH, json=ways[i % 3], headers=more) as reply:
                    assert reply.status == 200

            for i in range(9):
                await go(i)
            assert sorted(len(echo.requests) for echo in echoes) == [0, 0, 9]
            owner = next(r for r, e in zip(gateway.replicas, echoes, strict=True) if e.requests)
            gateway.sync({r.name: r.url for r in gateway.replicas if r is not owner})
            for i in range(9):
                await go(i)
            assert sorted(len(echo.requests) for echo in echoes) == [0, 9, 9]

    run(test)
