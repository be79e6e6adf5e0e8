"""What a gateway passes on of a request and back of an answer, and what it does not."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web
from gateway_clients import Echo, gateway_at, gateway_to
from gateway_clients import echoed as asked
from listeners import ask, post, run, status_of
from multidict import CIMultiDict
from yarl import URL

from sola_sched.proxy.json_object import JsonObject
from sola_sched.proxy.limits import Limits
from sola_sched.serving.call import Call, Lengths
from sola_sched.serving.slo_headers import ClientRules

PATH = "/v1/completions"


def test_headers_go_on_as_often_as_they_came_and_those_of_the_connection_stay() -> None:
    echo = Echo()
    lines = (
        "X-Twice: 1", "x-twice: 2", "Cookie: a=1", "Authorization: Bearer k", "api-key: q",
        "Connection: close, X-Hop", "X-Hop: secret", "Proxy-Authorization: Basic x", "TE: gzip",
        "Keep-Alive: 5", "X-Forwarded-For: 1.1.1.1", "X-Forwarded-For: 2.2.2.2, 3.3.3.3",
        "X-Name: J\xfcrgen", "Expect: 100-continue", "X-Sola-Attempt: 3",
    )  # fmt: skip

    asked(post(PATH, b"{}", *lines), echo=echo)

    (request,) = echo.requests
    assert request.headers.getall("X-Twice") == ["1", "2"]
    assert request.headers["X-Forwarded-For"] == "1.1.1.1, 2.2.2.2, 3.3.3.3, 127.0.0.1"
    assert len(request.headers.getall("X-Forwarded-For")) == 1
    assert request.headers["X-Name"] == "J\xfcrgen"
    assert (request.headers["Authorization"], request.headers["api-key"]) == ("Bearer k", "q")
    assert request.headers["Content-Type"] == "application/json"
    dropped = {"X-Hop", "Proxy-Authorization", "TE", "Keep-Alive", "Expect", "X-Sola-Attempt"}
    assert not dropped & set(request.headers)


def test_headers_of_an_answer_come_back_as_often_as_they_were_sent() -> None:
    headers = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Hop", "x"), ("X-Name", "J\xfcr"),
               ("Content-Encoding", "br"), ("Connection", "keep-alive, X-Hop")]  # fmt: skip
    echo = Echo(body=b"\x0b\x02\x80hello\x03", text=None, headers=headers)

    (answer,) = asked(post(PATH, b"{}"), echo=echo)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert (head.count(b"Set-Cookie: "), body) == (2, b"\x0b\x02\x80hello\x03")
    assert b"Content-Encoding: br" in head
    assert b"Content-Length: 9" in head
    assert "X-Name: J\xfcr".encode() in head
    assert b"X-Hop" not in head


def test_a_body_goes_on_without_the_coding_in_which_it_came() -> None:
    echo = Echo()
    text = b'{"prompt":   "as it was", "x": 1.50}'

    answers = asked(
        post(PATH, gzip.compress(text), "Content-Encoding: gzip"), post(PATH, text), echo=echo
    )

    assert [status_of(answer) for answer in answers] == [200, 200]
    assert echo.bodies == [text, text]
    assert all("Content-Encoding" not in request.headers for request in echo.requests)


@pytest.mark.parametrize("path", ["/sleep", "/v1/load_lora_adapter", "/v1/../sleep", "//sleep",
                                  "/replicas", "/metrics", "/v1/%2e%2e/sleep"])  # fmt: skip
def test_paths_that_do_not_pass_reach_no_replica(path: str) -> None:
    echo = Echo()

    (answer,) = asked(post(path, b"{}"), echo=echo)

    assert (status_of(answer), echo.requests) == (404, [])


def test_a_slash_at_the_end_and_a_redirection_lead_to_no_replica() -> None:
    async def test() -> None:
        place = ""

        async def answer(request: web.Request) -> web.Response:
            assert request.path == "/v1/models"
            return web.Response(status=307, headers={"Location": place})

        async with gateway_to(answer) as (url, gateway), aiohttp.ClientSession() as session:
            (replica,) = gateway.replicas
            place = f"{replica.url}/v1/models?a=b"
            target = f"{url}/v1/models/?x=%20y"
            async with session.get(target, allow_redirects=False) as reply:
                assert (reply.status, reply.headers["Location"]) == (307, "/v1/models?a=b")

    run(test)


@pytest.mark.parametrize("value", ["abc", [1], -1, 1e308, True, None, {"a": 1}])
@pytest.mark.parametrize("key", ["waited_ms", "resumed_tokens", "began_ms"])
def test_clients_do_not_say_how_long_they_have_waited(key: str, value: Any) -> None:
    echo = Echo()
    body = json.dumps({"prompt": "p", "vllm_xargs": {key: value, "ttft_slo_ms": 5}}).encode()

    (answer,) = asked(post(PATH, body), echo=echo)

    assert (status_of(answer), echo.xargs) == (200, {"ttft_slo_ms": 5})


def test_neither_in_a_form_nor_twice_nor_escaped() -> None:
    echo = Echo()
    xargs = '{"waited_ms": 5, "resumed_tokens": 3, "other": 1}'
    form = (
        f'--b\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{xargs}\r\n--b--\r\n'
    ).encode()
    twice = b'{"vllm_xargs": {}, "vllm_xargs": {"w\\u0061ited_ms": 5}, "vllm\\u005fxargs": null}'
    again = b'{"vllm_xargs": null, "vllm\\u005fxargs": {"waited_m\\u0073": 5}}'

    answers = asked(
        post("/v1/audio/transcriptions", form, "Content-Type: multipart/form-data; boundary=b"),
        post(PATH, twice),
        post(PATH, again, "Content-Type: text/plain"),
        echo=echo,
    )

    assert [status_of(answer) for answer in answers] == [200] * 3
    assert b'{"other": 1}' in echo.bodies[0]
    assert all(b"waited_ms" not in body and b"resumed" not in body for body in echo.bodies[:1])
    assert [json.loads(body)["vllm_xargs"] or {} for body in echo.bodies[1:]] == [{}, {}]


def test_nor_where_tokens_are_sent_and_headers_have_their_effect_there() -> None:
    echo, path = Echo(), "/inference/v1/generate"
    own = '{"token_ids":[1,2],"sampling_params":{"n":1,"extra_args":%s}, "vllm_xargs": {"a": 1}}'
    clock = own % '{"waited_ms": 5, "x": 1}'
    twice = clock.removesuffix("}") + ', "sampling_params": {"extra_args": {"began_m\\u0073": 3}}}'
    bare = b'{"token_ids": [1]}'

    answers = asked(
        post(path, clock.encode(), "x-slo-ttft-ms: 200"), post(path, twice.encode()),
        post(path, (own % "{}").encode()), post(path, bare, "x-slo-tpot-ms: 5"),
        post(path, (own % "[1]").encode()), post(path, b'{"sampling_params": [1]}'),
        post(path, (own % '{"waited_ms": "soon"}').encode()), echo=echo,
    )  # fmt: skip

    assert [status_of(answer) for answer in answers] == [200] * 4 + [400] * 2 + [200]
    bodies = [json.loads(body) for body in echo.bodies]
    sampling = [body["sampling_params"] for body in bodies]
    assert sampling[0] == {"n": 1, "extra_args": {"x": 1, "ttft_slo_ms": 200.0}}
    assert sampling[1:4] == [
        {"extra_args": {}}, {"n": 1, "extra_args": {}}, {"extra_args": {"tpot_slo_ms": 5.0}},
    ]  # fmt: skip
    assert bodies[0]["vllm_xargs"] == {"a": 1}
    assert echo.bodies[2] == (own % "{}").encode()


def test_the_router_is_told_of_tokens_that_are_sent_as_they_are() -> None:
    body = b'{"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 7, "ignore_eos": true, ' \
        b'"extra_args": {"ttft_slo_ms": 500}}}'  # fmt: skip

    call = Call.of("POST", "/inference/v1/generate?a=b", CIMultiDict(), body,
                   request_id="r", arrival_s=0.0)  # fmt: skip
    told = Lengths().routed(call, "r", None, frozenset())

    assert (told.prompt_tokens, told.slo.ttft_s) == (3, 0.5)
    assert told.length.quantiles.tolist() == [7.0] * 10


@pytest.mark.parametrize(
    ("xargs", "ttft_s"),
    [({"ttft_slo_ms": 500}, 0.5), ({"slo_class": "chat", "ttft_slo_ms": 500}, 0.5),
     ({"slo_class": "chat"}, math.inf), ({"ttft_slo_ms": "soon"}, math.inf)],
)  # fmt: skip
def test_the_router_is_told_the_targets_that_a_request_names(xargs: Any, ttft_s: float) -> None:
    body = json.dumps({"prompt": "p", "vllm_xargs": xargs}).encode()

    call = Call.of("POST", PATH, CIMultiDict(), body, request_id="r", arrival_s=0.0)

    assert Lengths().routed(call, "r", None, frozenset()).slo.ttft_s == ttft_s


def test_gateways_before_a_gateway_say_how_long_a_request_has_waited() -> None:
    echo, rules = Echo(), ClientRules(is_behind_gateway=True)
    good = b'{"vllm_xargs": {"waited_ms": 5.5, "resumed_tokens": 3}}'

    answers = asked(
        post(PATH, good), post(PATH, b'{"vllm_xargs": {"waited_ms": "abc"}}'),
        post(PATH, b'{"vllm_xargs": {"resumed_tokens": 1%s}}' % (b"0" * 400)), echo=echo,
        rules=rules,
    )  # fmt: skip

    assert [status_of(answer) for answer in answers] == [200, 400, 400]
    assert echo.xargs == {"waited_ms": 5.5, "resumed_tokens": 3}


def test_targets_and_classes_of_clients_are_dropped_where_the_operator_says_so() -> None:
    echo = Echo()
    body = b'{"vllm_xargs": {"ttft_slo_ms": 1, "slo_class": "gold", "e2e_slo_ms": 2, "x": 3}}'

    asked(post(PATH, body, "x-slo-tpot-ms: 5"), echo=echo, rules=ClientRules(drops_targets=True))

    assert echo.xargs == {"x": 3}
    assert "x-slo-tpot-ms" not in echo.requests[0].headers


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 200), (b"{}", 200), (b"[1]", 400), (b"{", 400), (b'{"a": NaN}', 400), (b"\xff", 400),
     (b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", 200),
     (b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
     (b'{"max_tokens": 1' + b"0" * 400 + b"}", 200),
     (b'{"max_tokens": 1' + b"0" * 5000 + b"}", 400),
     (b'{"n": 1' + b"0" * 5000 + b"}", 200), (b'{"max_tokens": "1' + b"0" * 400 + b'"}', 200),
     (b'{"prompt": [1' + b"0" * 5000 + b"]}", 200),
     (b'{"prompt": "\xff"}', 400), (b'{"vllm_xargs": [1]}', 400)],
)  # fmt: skip
def test_what_no_server_could_read_is_refused(body: bytes, status: int) -> None:
    (answer,) = asked(post(PATH, body), echo=Echo())

    assert status_of(answer) == status


def test_an_answer_to_head_has_no_body_whoever_makes_it() -> None:
    async def cut(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def test() -> None:
        for handler in (cut, Echo(body=b"long", text=None)):
            async with gateway_to(handler) as (url, _), asyncio.timeout(10):
                address = URL(url)
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
                writer.close()

    run(test)


def test_only_what_may_be_repeated_is_tried_again() -> None:
    counts: Counter[str] = Counter()

    async def failing(request: web.Request) -> web.Response:
        counts[request.path] += 1
        if (await request.read()).startswith(b'{"cut"'):
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"error": "x"}, status=500)

    async def test() -> None:
        async with gateway_to(failing, failing) as (url, _), aiohttp.ClientSession() as session:
            for path, body, expected in (
                ("/v1/completions", {}, 4),
                ("/v1/responses", {}, 4),
                ("/v1/responses", {"background": True}, 1),
                ("/v1/responses/r/cancel", {}, 1),
                ("/v1/responses/r/cancel", {"cut": 1}, 1),
            ):
                counts.clear()
                async with session.post(url + path, json=body) as reply:
                    assert reply.status == (502 if "cut" in body else 500)
                assert counts[path] == expected, path

    run(test)


def test_a_connection_that_closes_as_it_is_used_is_opened_anew_at_once() -> None:
    num_connections = 0

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the first request, and closes without a word when the second one comes."""
        nonlocal num_connections
        num_connections += 1
        for i in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = 2 if b"content-length: 2" in head.lower() else 0
            await reader.readexactly(length)
            if i == 0:
                status = b"404 No" if b"/sola/load" in head else b"200 OK"
                writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        writer.transport.abort()

    async def test() -> None:
        server = await asyncio.start_server(closing, "127.0.0.1", 0)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with gateway_at(address) as (url, gateway), aiohttp.ClientSession() as session:
            for _ in range(10):
                async with session.post(url + PATH, json={}) as reply:
                    assert reply.status == 200
        assert gateway.counts["failed_attempts"] == 0
        server.close()

    run(test)
    assert num_connections > 5


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_answer_that_is_late_ends_with_an_error(has_begun: bool) -> None:
    limits = Limits(first_byte_s=0.3, whole_s=0.6)

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if has_begun:
            await response.prepare(request)
            await response.write(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n')
        await asyncio.sleep(30)
        return response

    async def test() -> None:
        async with gateway_to(slow, limits=limits) as (url, _):
            answer = await ask(url, post(PATH, b'{"stream": true}'))

        assert status_of(answer) == (200 if has_begun else 504)
        assert f"must {'end' if has_begun else 'begin'} within".encode() in answer
        assert (b"data: [DONE]\n\n" in answer) == has_begun

    run(test)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_no_objects_are_made_of_a_long_prompt(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(JsonObject, "_all", lambda _: made.append("of the whole") or {})
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: made.append(len(text)) or loads(text))
    echo = Echo()
    numbers = b"1," * 300_000 + b"1]"
    bodies = [
        b'{"' + name + b'": ' + start + numbers + end + b', "stream": ' + stream + b"}"
        for name in (b"prompt", b"messages", b"input", b"other")
        for start, end in ((b"[", b""), (b"[[", b"]"))
        for stream in (b"true", b"false")
    ]

    answers = asked(*(post(path, body, "x-slo-ttft-ms: 5") for body in bodies), echo=echo)

    assert {status_of(answer) for answer in answers} == {200}
    assert all(isinstance(each, int) and each < 1000 for each in made)


def test_a_long_prompt_is_counted_and_reaches_the_replica_as_it_was() -> None:
    echo = Echo()
    ids = b"[" + b"1," * 300_000 + b"1]"
    bodies = [b'{"prompt": ' + ids + b', "stream": false}', b'{"prompt": "' + b"x" * 10**6 + b'"}']
    seen: list[int] = []

    async def test() -> None:
        async with gateway_to(echo) as (url, gateway):
            choose = gateway.replicas.choose

            def noted(request: Any, *args: Any) -> Any:
                seen.append(request.prompt_tokens)
                return choose(request, *args)

            gateway.replicas.choose = noted  # type: ignore[method-assign]
            for body in bodies:
                assert status_of(await ask(url, post(PATH, body))) == 200

    run(test)
    assert echo.bodies == bodies
    assert seen == [300_001, 250_000]
