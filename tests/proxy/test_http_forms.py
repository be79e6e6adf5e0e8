"""Requests and answers in forms of HTTP that clients and proxies really use."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from gateway_clients import gateway_to
from listeners import RawClient, run

PATH = "/v1/completions"
BODY = b'{"prompt": "p"}'
STREAM = b'{"prompt": "p", "stream": true}'
EVENT = b'data: {"id":"c","choices":[{"index":0,"text":"a","token_ids":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"GET /version?last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Server:
    """Streams to who asks for it, says how long other bodies are, and keeps what has come."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.method, request.path_qs, body))
        if b'"stream": true' in body:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in (EVENT, EVENT, DONE):
                await response.write(event)
                await asyncio.sleep(0.01)
            return response
        return web.Response(status=int(request.query.get("status", 200)), text=f"{len(body)} bytes")


def answered(*pieces: bytes) -> tuple[bytes, Server]:
    """What comes back until the connection is closed, and the server behind the gateway."""
    server, answers = Server(), [b""]

    async def test() -> None:
        async with gateway_to(server) as (url, _):
            client = await RawClient.to(url)
            for piece in pieces:
                await client.send(piece)
                await asyncio.sleep(0.1)
            answers[0] = await client.rest()

    run(test)
    return answers[0], server


def head(line: str, *lines: str) -> bytes:
    return "\r\n".join([line, *lines, "", ""]).encode()


def of_length(line: str, body: bytes, *lines: str) -> bytes:
    return head(line, *lines, f"Content-Length: {len(body)}") + body


def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    """nginx asks so, unless it is told otherwise."""
    answer, _ = answered(of_length(f"POST {PATH} HTTP/1.0", STREAM))

    answer_head, _, body = answer.partition(b"\r\n\r\n")
    assert answer_head.startswith(b"HTTP/1.0 200 ")
    assert b"chunked" not in answer_head.lower()
    assert body == EVENT + EVENT + DONE


def test_requests_that_are_sent_at_once_are_answered_one_after_another() -> None:
    one = of_length(f"POST {PATH} HTTP/1.1", BODY, "Host: x")

    answer, server = answered(one + one + LAST)

    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert [body for _, _, body in server.asked] == [BODY, BODY, b""]


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_a_request_that_offers_another_protocol_is_answered_in_this_one(protocol: str) -> None:
    """Java's client offers HTTP/2 with its first request, which may have a body."""
    offer = ("Host: x", "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}",
             "HTTP2-Settings: AAMAAABkAAQAAP__")  # fmt: skip

    answer, server = answered(of_length(f"POST {PATH} HTTP/1.1", BODY, *offer), LAST)

    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert [body for _, _, body in server.asked] == [BODY, b""]


def test_a_client_that_asks_before_it_sends_its_body_is_told_to() -> None:
    asked = of_length(f"POST {PATH} HTTP/1.1", BODY, "Host: x", "Expect: 100-continue")

    answer, server = answered(asked[: -len(BODY)], BODY + LAST)

    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    assert server.asked[0][2] == BODY


def test_a_chunked_body_may_have_extensions_and_trailers() -> None:
    chunked = head(f"POST {PATH} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", "Trailer: T")
    body = b"%x;name=value\r\n" % len(BODY) + BODY + b"\r\n0\r\nT: 1\r\n\r\n"

    answer, server = answered(chunked + body + LAST)

    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert server.asked[0][2] == BODY


@pytest.mark.parametrize(
    "line",
    ["HEAD /version HTTP/1.1", "GET /version?status=204 HTTP/1.1",
     "GET /version?status=304 HTTP/1.1"],
)  # fmt: skip
def test_an_answer_without_a_body_leaves_the_connection_in_order(line: str) -> None:
    answer, _ = answered(head(line, "Host: x"), LAST)

    first, _, rest = answer.partition(b"\r\n\r\n")
    assert first.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 204 ", b"HTTP/1.1 304 "))
    assert b"chunked" not in first.lower()
    assert rest.startswith(b"HTTP/1.1 200 ")
    assert rest.endswith(b"\r\n\r\n0 bytes")


@pytest.mark.parametrize("target", ["http://elsewhere:1/v1/completions", "/v1%2Fcompletions"])
def test_whatever_a_client_calls_the_place_its_request_goes_to_the_replica(target: str) -> None:
    answer, server = answered(of_length(f"POST {target} HTTP/1.1", BODY, "Host: x") + LAST)

    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert server.asked[0] == ("POST", PATH, BODY)


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 15", "Content-Length: 3"), ("Content-Length: +15",),
        ("Content-Length: 15", "Transfer-Encoding: chunked"), ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked, identity",), ("Transfer-Encoding : chunked",),
        ("Content-Length: 15", "X-A: a\0b"), ("Content-Length: 15", " folded: x"),
    ],
    ids=str,
)  # fmt: skip
def test_requests_whose_end_could_be_read_in_two_ways_reach_no_replica(lines: tuple[str]) -> None:
    answer, server = answered(head(f"POST {PATH} HTTP/1.1", "Host: x", *lines) + BODY)

    assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    assert server.asked == []
