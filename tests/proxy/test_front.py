"""What stands before gateway and door, and clients that mean no good."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
import zlib
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from listeners import HERE, RawClient, ask, post, run, serving, status_of
from multidict import CIMultiDict

from sola_sched.proxy.answers import Answer
from sola_sched.proxy.bodies import Bodies
from sola_sched.proxy.errors import RefusedError
from sola_sched.proxy.front import Front, is_up
from sola_sched.proxy.keys import Keys
from sola_sched.proxy.limits import Limits
from sola_sched.proxy.listener import Listener, warn_of
from sola_sched.proxy.paths import Passage

#: Limits of tests: short, but long against what an event loop needs.
QUICK = Limits(max_body_bytes=100_000, head_s=0.5, body_s=0.5, write_s=0.5)
PATH = "/v1/completions"


async def _echo(request: web.Request, passage: Passage, data: bytes) -> web.StreamResponse:
    return web.json_response({"path": passage.path, "length": len(data)})


def front_of(
    limits: Limits = QUICK,
    keys: Keys | None = None,
    serve: Callable[..., Awaitable[web.StreamResponse]] = _echo,
) -> Front:
    return Front(serve, limits, keys or Keys())


def body_of(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def answered(*requests: bytes, limits: Limits = QUICK, keys: Keys | None = None) -> list[bytes]:
    """What comes back for each of these."""
    answers: list[bytes] = []

    async def test() -> None:
        front = front_of(limits, keys)
        async with serving(front.app(is_up), front) as url:
            answers.extend(await asyncio.gather(*(ask(url, each) for each in requests)))
        assert front.bodies.num_bytes == 0

    run(test)
    return answers


def test_a_body_that_is_longer_than_it_may_be_is_refused_however_it_comes() -> None:
    long = b"x" * (QUICK.max_body_bytes + 1)
    chunks = b"".join(b"8000\r\n" + b"x" * 0x8000 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n"
    packed = gzip.compress(b"x" * 50_000_000)

    answers = answered(
        post(PATH, long),
        post(PATH, b"{", "Content-Length: 5000000000"),
        post(PATH, chunks, "Transfer-Encoding: chunked"),
        post(PATH, packed, "Content-Encoding: gzip"),
        post(PATH, gzip.compress(b"x" * 60_000) * 2, "Content-Encoding: gzip"),
        post(PATH, zlib.compress(b"x" * 50_000_000), "Content-Encoding: deflate"),
    )

    assert [status_of(answer) for answer in answers] == [413] * 6
    assert "must not be longer than 100000 bytes" in body_of(answers[0])["error"]["message"]


def test_compressed_bodies_are_inflated_and_broken_or_unknown_ones_refused() -> None:
    body, packed = b'{"a": 1}', gzip.compress(b'{"a": 1}')

    answers = answered(
        post(PATH, packed, "Content-Encoding: gzip"),
        post(PATH, packed + packed, "Content-Encoding: x-gzip"),
        post(PATH, zlib.compress(body), "Content-Encoding: deflate"),
        post(PATH, body, "Content-Encoding: identity"),
        post(PATH, b"", "Content-Encoding: gzip"),
        post(PATH, packed[:-3], "Content-Encoding: gzip"),
        post(PATH, b"no gzip", "Content-Encoding: gzip"),
        post(PATH, packed + b"more", "Content-Encoding: gzip"),
        post(PATH, body, "Content-Encoding: br"),
        post(PATH, packed, "Content-Encoding: gzip, gzip"),
    )

    assert [status_of(answer) for answer in answers] == [200] * 5 + [400] * 3 + [415] * 2
    lengths = [body_of(answer)["length"] for answer in answers[:5]]
    assert lengths == [len(body), 2 * len(body), len(body), len(body), 0]
    assert b"Accept-Encoding: gzip, deflate\r\n" in answers[-1]


def test_a_body_of_many_compressed_parts_is_read_and_one_of_very_many_refused_at_once() -> None:
    lines = [gzip.compress(b"x" * 90 + b"%9d\n" % i) for i in range(1000)]
    bodies = Bodies(Limits())

    begin_s = time.process_time()
    whole = bodies._inflated(b"".join(lines))
    with pytest.raises(RefusedError, match="1000 members at most"):
        bodies._inflated(gzip.compress(b"") * 800_000)

    assert (len(whole), whole[-4:]) == (100_000, b"999\n")
    assert time.process_time() - begin_s < 1.0


def test_a_connection_that_has_no_transport_yet_is_not_taken_for_one_that_has_gone() -> None:
    class Connection:
        transport: Any = None

    front, aborted, new, gone = front_of(), [], Connection(), Connection()
    front.opened(cast(web.RequestHandler, gone))
    front._forget_gone()
    front.opened(cast(web.RequestHandler, new))

    front._forget_gone()
    assert not front.make_room()
    new.transport = SimpleNamespace(abort=lambda: aborted.append(new))

    assert list(front._idle) == [new]
    assert (front.make_room(), aborted) == (True, [new])


def test_a_body_that_is_not_as_its_headers_say_is_refused() -> None:
    answers = answered(
        post(PATH, b"zz\r\nx\r\n", "Transfer-Encoding: chunked"),
        post(PATH, b"{}", "Content-Length: -1"),
        post(PATH, b"{}", "Content-Length: 2", "Transfer-Encoding: chunked"),
    )

    assert [status_of(answer) for answer in answers] == [400] * 3


def test_bodies_of_all_requests_together_have_a_limit() -> None:
    limits = Limits(max_body_bytes=100_000, max_held_bytes=150_000, body_s=1.0)

    async def test() -> None:
        front = front_of(limits)
        async with serving(front.app(is_up), front) as url:
            slow = await RawClient.to(url)
            await slow.send(post(PATH, b"x" * 90_000, "Content-Length: 90001"))
            while front.bodies.num_bytes < 90_000:
                await asyncio.sleep(0.01)

            assert status_of(await ask(url, post(PATH, b"x" * 70_000))) == 503
            assert status_of(await ask(url, post(PATH, b"x" * 50_000))) == 200
            await slow.send(b"x")
            assert status_of(await slow.rest()) == 200
        assert front.bodies.num_bytes == 0

    run(test)


def test_heads_and_bodies_that_do_not_come_are_waited_for_no_longer_than_their_limits() -> None:
    beginnings = [
        b"", b"POST", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHo",
        post(PATH, b"{", "Content-Length: 1000"),
        post(PATH, b"1000\r\nab", "Transfer-Encoding: chunked"),
    ]  # fmt: skip

    async def test() -> None:
        front = front_of()
        async with serving(front.app(is_up), front) as url:
            clients = [await RawClient.to(url) for _ in beginnings]

            async def drip(client: RawClient, beginning: bytes) -> bytes:
                await client.send(beginning)
                rest = asyncio.create_task(client.rest())
                while len(beginning) > 4 and not rest.done():  # bytes now and then help nobody
                    await asyncio.sleep(0.1)
                    client.writer.write(b"1")
                return await rest

            answers = await asyncio.gather(*map(drip, clients, beginnings))

        assert [status_of(answer) for answer in answers] == [0, 0, 0, 200, 408, 408]
        assert "must be there within 0.5 s" in body_of(answers[4])["error"]["message"]

    run(test)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_client_that_does_not_read_its_answer_is_left(is_whole: bool) -> None:
    ended = asyncio.Event()

    async def serve(request: web.Request, passage: Passage, data: bytes) -> web.StreamResponse:
        if is_whole:
            return web.Response(body=bytes(50_000_000))
        answer: Answer = front.answer(request)
        try:
            await answer.start(200, CIMultiDict())
            while True:
                await answer.write(bytes(100_000))
        finally:
            ended.set()

    front = front_of(serve=serve)

    async def test() -> None:
        async with serving(front.app(is_up), front) as url:
            client = await RawClient.to(url)
            await client.send(post(PATH, b"{}"))
            if not is_whole:
                await ended.wait()
            while front._answers:
                await asyncio.sleep(0.05)
            assert status_of(await ask(url, post("/health", b"").replace(b"POST", b"GET"))) == 200

    run(test)


def test_a_connection_without_a_request_makes_room_for_a_new_one_and_others_stay() -> None:
    go_on = asyncio.Event()

    async def serve(request: web.Request, passage: Passage, data: bytes) -> web.StreamResponse:
        await go_on.wait()
        return web.Response(text="done")

    front = front_of(Limits(max_connections=4), serve=serve)

    async def test() -> None:
        async with serving(front.app(is_up), front) as url:
            busy = [await RawClient.to(url) for _ in range(2)]
            for client in busy:
                await client.send(post(PATH, b"{}"))
            idle = [await RawClient.to(url) for _ in range(20)]
            await idle[-1].send(post(PATH, b"{}"))
            assert [await client.rest() for client in idle[:-2]] == [b""] * 18
            await idle[-2].send(post(PATH, b"{}"))
            await asyncio.sleep(0.2)

            full = await RawClient.to(url)
            assert status_of(await full.rest()) == 503  # all that there are have requests

            go_on.set()
            for client in (*busy, *idle[-2:]):
                assert (await client.rest()).endswith(b"done")

    run(test)


def test_the_end_comes_in_time_whoever_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sola_sched.proxy.listener.END_S", 1.0)
    monkeypatch.setattr("sola_sched.proxy.bodies._END_S", 0.3)

    async def serve(request: web.Request, passage: Passage, data: bytes) -> web.StreamResponse:
        answer = front.answer(request)
        await answer.start(200, CIMultiDict())
        while True:
            await answer.write(bytes(100_000))

    front = front_of(Limits(), serve=serve)

    async def test() -> None:
        listener = Listener(front.app(is_up), front)
        url = await listener.start(*HERE)
        clients = [await RawClient.to(url) for _ in range(40)]
        beginnings = [b"", b"POST /v1", post(PATH, b"{", "Content-Length: 9"), post(PATH, b"{}")]
        for i, client in enumerate(clients):
            await client.send(beginnings[i % 4])
        await asyncio.sleep(0.2)

        began_s = asyncio.get_running_loop().time()
        await listener.stop()

        assert asyncio.get_running_loop().time() - began_s < 3.0
        with pytest.raises(ConnectionRefusedError):
            await RawClient.to(url)

    run(test)


def test_keys_are_asked_for_and_health_is_not_kept() -> None:
    keys = Keys(["one", "two words"])
    get = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    answers = answered(
        post(PATH, b"{}"),
        post(PATH, b"{}", "Authorization: Bearer three"),
        post(PATH, b"{}", "Authorization: Basic one"),
        post(PATH, b"{}", "Authorization: Bearer "),
        post("/sleep", b"{}"),
        post(PATH, b"{}", "Authorization: Bearer one"),
        post(PATH, b"{}", "authorization: bearer two words"),
        post(PATH, b"{}", "X-API-Key: one"),
        get,
        keys=keys,
    )

    assert [status_of(answer) for answer in answers] == [401] * 5 + [200] * 4
    assert b"WWW-Authenticate: Bearer\r\n" in answers[0]
    assert "two words" not in str(body_of(answers[0]))


def test_pages_of_other_origins_may_read_our_errors_and_nobody_elses() -> None:
    origin = "Origin: https://page.example"
    refused, served, without = answered(
        post("/sleep", b"{}", origin), post(PATH, b"{}", origin), post("/sleep", b"{}")
    )
    assert b"Access-Control-Allow-Origin: *\r\n" in refused
    assert status_of(served) == 200
    assert b"Access-Control" not in served  # the server that answers says that
    assert b"Access-Control" not in without


@pytest.mark.parametrize(
    ("status", "kind", "headers"),
    [(401, "authentication_error", []), (415, "invalid_request_error", ["Content-Encoding: br"]),
     (413, "request_too_large", ["Content-Length: 5000000000"])],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/", "/v1/messages/count_tokens?a"])
def test_refusals_on_paths_of_anthropics_api_have_its_form(
    path: str, status: int, kind: str, headers: list[str]
) -> None:
    key = [] if status == 401 else ["x-api-key: one"]

    (answer,) = answered(post(path, b"{}", *headers, *key), keys=Keys(["one"]))

    assert status_of(answer) == status
    body = body_of(answer)
    message = body["error"].pop("message")
    assert "must" in message
    assert body == {"type": "error", "error": {"type": kind}}


def test_refusals_on_paths_of_other_apis_have_their_forms() -> None:
    paths = ["/cohere/v2/chat", "/v1/messages_of_mine", "/v1/responses", PATH]

    answers = answered(*(post(path, b"{}") for path in paths), keys=Keys(["one"]))

    bodies = [body_of(answer) for answer in answers]
    assert [body.keys() for body in bodies] == [{"message"}, {"error"}, {"error"}, {"error"}]
    errors = [body["error"] for body in bodies[1:]]
    assert all(each.keys() == {"message", "type", "param", "code"} for each in errors)


def test_what_is_no_http_is_answered_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.DEBUG))

        answers = answered(b"nonsense\r\n\r\n", b"GET @x HTTP/1.1\r\n\r\n")

    assert [status_of(answer) for answer in answers] == [400, 400]
    assert "Traceback" not in caplog.text


def test_long_headers_within_reason_pass() -> None:
    answers = answered(
        post(PATH, b"{}", "Cookie: " + "c" * 12_000), post(PATH, b"{}", "Cookie: " + "c" * 20_000)
    )

    assert [status_of(answer) for answer in answers] == [200, 400]


@pytest.mark.parametrize(
    ("host", "keys", "is_told"),
    [("127.0.0.1", [], False), ("::1", [], False), ("localhost", [], False), ("0.0.0.0", [], True),
     ("::", [], True), ("10.0.0.9", [], True), ("0.0.0.0", ["k"], False)],
)  # fmt: skip
def test_an_address_that_nothing_protects_is_told(
    host: str, keys: list[str], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of("gateway", host, Keys(keys))

    assert bool(caplog.records) == is_told
    assert all("asks for no key" in record.getMessage() for record in caplog.records)
