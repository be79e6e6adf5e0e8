"""Replicas that answer as no server should, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession, web
from fake_replica import FakeReplica
from gateway_clients import QUICK, gateway_to
from hypothesis import given
from hypothesis import strategies as st
from listeners import Handler, run, serving, upstream
from multidict import CIMultiDict

from sola_sched.cluster.routers import RoundRobin
from sola_sched.serving.answering.outgoing import Outgoing
from sola_sched.serving.arrivals import ATTEMPT_HEADER
from sola_sched.serving.call import Call
from sola_sched.serving.gateway import Gateway
from sola_sched.serving.resuming.asked import Asked
from sola_sched.serving.resuming.events import DONE
from sola_sched.serving.resuming.plans import Plan, continuation, ending, replay, ways
from sola_sched.serving.resuming.rewrite import DivergedError

PATH = "/v1/completions"


def chunk(**choice: Any) -> bytes:
    """An event with one token."""
    token = {"index": 0, "text": "a", "token_ids": [5], "finish_reason": None}
    head = {"id": "c", "object": "o", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**head, "choices": [{**token, **choice}]}).encode() + b"\n\n"


def streaming(
    *events: bytes, is_cut: bool = False, is_held: bool = False, **headers: str
) -> Handler:
    """A server whose streams are these events; it may cut them, or never end them."""

    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **named})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await asyncio.sleep(30 if is_held else 0.01)
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


def asked(*handlers: Handler, path: str = PATH, **options: Any) -> tuple[int, bytes, Gateway]:
    """A stream through a gateway before these servers: status, body, and the gateway."""
    found: list[tuple[int, bytes]] = []
    gateway = Gateway(RoundRobin(), QUICK)

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(upstream(each)) for each in handlers]
            gateway.sync({f"r{i}": url for i, url in enumerate(urls)})
            url = await stack.enter_async_context(serving(gateway.app(), gateway.front))
            session = await stack.enter_async_context(ClientSession(auto_decompress=False))
            body = {"prompt": "p", "stream": True, "temperature": 0, **options}
            async with session.post(url + path, json=body) as reply:
                found.append((reply.status, await reply.read()))

    run(test)
    return *found[0], gateway


@pytest.mark.parametrize(
    "odd",
    ['"n": 1' + "0" * 5000, '"messages": true', '"messages": [{"content": 1.5}, 2]',
     '"sampling_params": {"max_tokens": 1}'],
)  # fmt: skip
def test_a_stream_whose_request_no_other_server_could_read_ends_with_an_error(odd: str) -> None:
    body = f'{{"stream": true, "temperature": 0, "stop": ["x"], {odd}}}'.encode()
    cut = streaming(chunk(), is_cut=True)
    found: list[bytes] = []

    async def test() -> None:
        async with (
            gateway_to(cut, cut) as (url, _),
            ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", data=body) as reply,
        ):
            found.append(await reply.read())

    run(test)
    assert (b'"error"' in found[0], found[0].endswith(DONE)) == (True, True)


@contextmanager
def full_address() -> Iterator[tuple[str, int]]:
    """An address at which no connection comes about, and none is refused."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield full.getsockname()


def test_what_was_never_sent_may_be_sent_elsewhere_and_counts_there() -> None:
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"id": "resp_1"})

    async def test() -> None:
        with full_address() as address:
            gateway = Gateway(RoundRobin(), replace(QUICK, connect_s=0.3))
            async with upstream(answer) as good:
                gateway.sync({"full": f"http://127.0.0.1:{address[1]}", "good": good})
                async with serving(gateway.app(), gateway.front) as url, ClientSession() as session:
                    for _ in range(2):  # one of them goes to the first replica first
                        body = {"input": "p", "background": True}
                        async with session.post(f"{url}/v1/responses", json=body) as reply:
                            assert (reply.status, await reply.json()) == (200, {"id": "resp_1"})
            assert gateway.counts["failed_attempts"] >= 1

    asyncio.run(asyncio.wait_for(test(), 20))
    assert not any(ATTEMPT_HEADER in request.headers for request in seen)


def test_an_address_that_takes_no_connection_costs_the_limit_of_connecting() -> None:
    fake = FakeReplica()

    async def test() -> None:
        with full_address() as address:
            options = replace(QUICK, connect_s=0.3)
            async with fake.running():
                gateway = Gateway(RoundRobin(), options)
                gateway.sync({"full": f"http://127.0.0.1:{address[1]}", "good": fake.url})
                async with serving(gateway.app(), gateway.front) as url, ClientSession() as session:
                    for _ in range(4):
                        began_s = time.monotonic()
                        body = {"prompt": "p", "max_tokens": 3}
                        async with session.post(f"{url}/v1/completions", json=body) as reply:
                            assert reply.status == 200
                        assert time.monotonic() - began_s < 4.0
                assert gateway.counts["failed_attempts"] >= 1

    asyncio.run(asyncio.wait_for(test(), 20))


BAD_ANSWERS = [
    b"", b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("answer", [None, *BAD_ANSWERS])
def test_clients_are_not_told_where_replicas_are(answer: bytes | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer or b"")
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if answer is None:
            server.close()
        gateway = Gateway(RoundRobin(), replace(QUICK, max_failures=1))
        gateway.sync({"r": f"http://localhost:{port}"})
        async with (
            serving(gateway.app(), gateway.front) as url,
            ClientSession() as session,
            session.post(url + PATH, json={"prompt": "p"}) as reply,
        ):
            message = (await reply.json())["error"]["message"]
            assert reply.status in (502, 503)
        server.close()
        assert not any(each in message for each in (str(port), "127.0.0.1", "localhost", "::1"))
        assert not message.endswith(": ")

    run(test)


@pytest.mark.parametrize(
    ("path", "error", "good"),
    [
        (PATH, b'data: {"error": {"code": 500, "message": "boom"}}\n\n', [chunk(), DONE]),
        (
            "/v1/messages",
            b'event: error\ndata: {"type": "error", "error": {"type": "internal_error"}}\n\n',
            [b'event: message_stop\ndata: {"type": "message_stop"}\n\n'],
        ),
        (
            "/v1/responses",
            b'event: error\ndata: {"type": "error", "message": "boom"}\n\n',
            [b'event: response.completed\ndata: {"type": "response.completed"}\n\n'],
        ),
    ],
)
def test_an_error_in_place_of_the_first_event_is_tried_elsewhere(
    path: str, error: bytes, good: Sequence[bytes]
) -> None:
    status, data, gateway = asked(
        streaming(error), streaming(*good), path=path, return_token_ids=True
    )

    assert (status, data) == (200, b"".join(good))
    assert gateway.counts["retried"] == 1

    status, data, _ = asked(streaming(error), path=path)

    assert status == 502
    message = json.loads(data)["error"]["message"]
    assert "boom" in message or "internal_error" in message


def test_an_error_that_is_the_requests_own_ends_its_stream() -> None:
    error = b'data: {"error": {"code": 400, "message": "bad"}}\n\n'

    status, data, gateway = asked(streaming(chunk(), error, is_held=True), streaming(chunk(), DONE))

    assert status == 200
    assert data.endswith(error + DONE)
    assert data.count(b'"text"') == 1
    assert gateway.counts["stalls"] == 0


def test_a_compressed_stream_is_passed_on_as_it_is() -> None:
    packed = gzip.compress(chunk() + DONE)

    status, data, gateway = asked(streaming(packed, Content_Encoding="gzip"))

    assert (status, data) == (200, packed)
    assert gateway.counts["failed_attempts"] == 0


ODD = [
    {"delta": None}, {"delta": "x"}, {"text": 5}, {"token_ids": "abc"}, {"token_ids": [[1]]},
    {"logprobs": "x"}, {"logprobs": {"tokens": None, "text_offset": [1]}}, {"index": [0]},
]  # fmt: skip


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_stream_of_a_server_that_writes_otherwise_than_vllm_has_an_end(
    odd: dict[str, Any], seed: int | None
) -> None:
    status, data, _ = asked(
        streaming(chunk(), chunk(**odd), is_cut=True), streaming(chunk(), chunk(), DONE), seed=seed
    )

    assert status == 200
    assert data.endswith(b"\n\n" + DONE)
    assert data.count(b'{"error"') == 1


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(
        st.sampled_from(["tokens", "content", "text_offset", "text", "role", "total_tokens",
                         "prompt_tokens", "completion_tokens"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
CHOICES = st.dictionaries(
    st.sampled_from(["index", "text", "delta", "token_ids", "logprobs", "finish_reason",
                     "prompt_token_ids"]), VALUES,
)  # fmt: skip
CHUNKS = st.dictionaries(st.sampled_from(["id", "usage", "prompt_token_ids"]), VALUES).flatmap(
    lambda rest: st.lists(CHOICES, max_size=2).map(lambda choices: {**rest, "choices": choices})
) | st.dictionaries(st.sampled_from(["id", "choices", "usage"]), VALUES)


@given(
    st.lists(CHUNKS, min_size=1, max_size=4), st.lists(CHUNKS, max_size=3),
    st.sampled_from([PATH, "/v1/chat/completions"]), st.sampled_from([None, 3]),
)  # fmt: skip
def test_whatever_servers_write_going_on_elsewhere_is_decided(
    before: list[dict[str, Any]], after: list[dict[str, Any]], path: str, seed: int | None
) -> None:
    body = {"stream": True, "temperature": 0, "prompt": "p", "seed": seed}
    out = Outgoing(Call("POST", path, CIMultiDict(), b"", body, "r", 0.0), None)  # type: ignore[arg-type]
    good = chunk(prompt_token_ids=[1])
    out.taken([good, *(b"data: " + json.dumps(each).encode() + b"\n\n" for each in before)])
    asked = Asked(path, body)

    sent = out.sent()
    plan: Plan | list[bytes] | None = ending(asked, sent)
    found = ways(asked, sent)
    if plan is None and found.can_continue and sent.choices[0].num_told is not None:
        plan = continuation(asked, sent, sent.choices[0].num_told, 16)
    if plan is None and found.can_replay:
        plan = replay(asked, sent)

    if isinstance(plan, Plan):
        out.rewrite = plan.rewrite
        with contextlib.suppress(DivergedError):
            out.taken([b"data: " + json.dumps(each).encode() + b"\n\n" for each in after])


class Failing:
    """A server that answers with an error until it is mended."""

    def __init__(self, status: int = 500) -> None:
        self.status, self.num_asked = status, 0

    async def __call__(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        return web.json_response({}, status=self.status)


def test_a_server_that_only_fails_is_asked_now_and_then_until_it_answers() -> None:
    failing, good = Failing(), Failing(200)

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(upstream(each)) for each in (failing, good)]
            gateway = Gateway(RoundRobin(), replace(QUICK, avoid_s=0.3))
            gateway.sync({f"r{i}": url for i, url in enumerate(urls)})
            url = await stack.enter_async_context(serving(gateway.app(), gateway.front))
            session = await stack.enter_async_context(ClientSession())

            async def ask_often(num: int) -> None:
                for _ in range(num):
                    async with session.post(url + PATH, json={"prompt": "p"}) as reply:
                        assert reply.status == 200

            await ask_often(40)
            assert failing.num_asked <= 12

            failing.status = 200
            await asyncio.sleep(0.35)
            before = failing.num_asked
            await ask_often(20)
            assert failing.num_asked >= before + 8

    run(test)


def test_requests_that_fail_everywhere_keep_nobody_waiting() -> None:
    failing = [Failing(), Failing()]

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(upstream(each)) for each in failing]
            gateway = Gateway(RoundRobin(), replace(QUICK, avoid_s=30.0, patience_s=30.0))
            gateway.sync({f"r{i}": url for i, url in enumerate(urls)})
            url = await stack.enter_async_context(serving(gateway.app(), gateway.front))
            session = await stack.enter_async_context(ClientSession())
            for _ in range(5):
                async with session.post(url + PATH, json={"prompt": "p"}) as reply:
                    assert reply.status == 500

    run(test, limit_s=10.0)
