"""A server that ends gives its requests up in answers that look whole; they go on elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession, web
from gateway_clients import gateway_to
from listeners import Handler, run

from sola_sched.serving.gateway import Gateway

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def chunk(finish_reason: str | None = None, **choice: Any) -> bytes:
    choice = {"index": 0, "finish_reason": finish_reason, **choice}
    return event({"id": "c", "object": "o", "created": 1, "model": "m", "choices": [choice]})


def told(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


DONE = b"data: [DONE]\n\n"


def answering(whole: dict[str, Any], *events: bytes) -> Handler:
    """A server that gives this to who wants it in one piece, and these events to others."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in events:
            await response.write(each)
        return response

    return answer


def choices(finish_reason: str, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": finish_reason, **choice}]}


#: By path: an answer that was given up, and a whole one.
WHOLE = [
    (COMPLETIONS, choices("abort", text=""), choices("stop", text="all")),
    (CHAT, choices("abort", message={"content": ""}), choices("stop", message={"content": "all"})),
    (GENERATE, choices("abort", token_ids=[]), choices("stop", token_ids=[1])),
    (MESSAGES, {"type": "message", "content": []}, {"type": "message", "stop_reason": "end_turn"}),
    (MESSAGES, {"type": "message", "stop_reason": None},
     {"type": "message", "stop_reason": "max_tokens"}),
    (RESPONSES, {"object": "response", "status": "cancelled"},
     {"object": "response", "status": "completed"}),
]  # fmt: skip
#: By path: the events with which an answer is given up before it has begun, and a whole answer.
BEFORE = [
    (COMPLETIONS, [chunk("abort", text=""), DONE], [chunk("stop", text="all"), DONE]),
    (CHAT, [chunk("abort", delta={"content": ""}), DONE],
     [chunk("stop", delta={"content": "all"}), DONE]),
    (GENERATE, [event(choices("abort", token_ids=[])), DONE],
     [event(choices("stop", token_ids=[1])), DONE]),
    (MESSAGES, [told("message_delta", delta={"stop_reason": None, "stop_sequence": None}),
                told("message_stop")],
     [told("message_delta", delta={"stop_reason": "end_turn"}), told("message_stop")]),
    (RESPONSES, [told("response.completed", response={"status": "cancelled"})],
     [told("response.completed", response={"status": "completed"})]),
]  # fmt: skip


def asked(path: str, *handlers: Handler, **body: Any) -> tuple[int, bytes, Gateway]:
    """Status and body of a request to a gateway before these servers, and the gateway."""
    found: list[tuple[int, bytes, Gateway]] = []

    async def test() -> None:
        async with (
            gateway_to(*handlers) as (url, gateway),
            ClientSession() as session,
            session.post(url + path, json={"prompt": "p", "temperature": 0, **body}) as reply,
        ):
            found.append((reply.status, await reply.read(), gateway))

    run(test)
    return found[0]


@pytest.mark.parametrize(("path", "aborted", "whole"), WHOLE)
def test_a_whole_answer_that_was_given_up_comes_from_another_server(
    path: str, aborted: dict[str, Any], whole: dict[str, Any]
) -> None:
    status, body, gateway = asked(path, answering(aborted), answering(whole))

    assert (status, json.loads(body)) == (200, whole)
    assert (gateway.counts["failed_attempts"], gateway.counts["retried"]) == (1, 1)


@pytest.mark.parametrize(("path", "aborted", "_"), WHOLE)
def test_where_every_server_gives_it_up_the_client_gets_an_error(
    path: str, aborted: dict[str, Any], _: dict[str, Any]
) -> None:
    status, body, gateway = asked(path, answering(aborted))

    assert status == 502
    assert b"the last one: the replica has given it up" in body
    assert gateway.counts["given_up"] == 1


@pytest.mark.parametrize(("path", "aborted", "whole"), BEFORE)
def test_a_stream_that_was_given_up_before_it_began_is_another_servers(
    path: str, aborted: list[bytes], whole: list[bytes]
) -> None:
    status, body, _ = asked(path, answering({}, *aborted), answering({}, *whole), stream=True)

    assert (status, body) == (200, b"".join(whole))


def test_a_stream_that_was_given_up_goes_on_elsewhere() -> None:
    first = [chunk(text="a", token_ids=[5], prompt_token_ids=[1, 2])]
    rest = [chunk(text="b", token_ids=[6]), chunk("length", text="c", token_ids=[7]), DONE]
    aborted = answering({}, *first, chunk("abort", text="", token_ids=[]), DONE)

    status, body, gateway = asked(
        COMPLETIONS, aborted, answering({}, *rest), stream=True, max_tokens=3
    )

    events = [json.loads(each[6:]) for each in body.split(b"\n\n")[:-2]]
    assert status == 200
    assert [each["choices"][0]["text"] for each in events] == ["a", "b", "c"]
    assert [each["choices"][0]["finish_reason"] for each in events] == [None, None, "length"]
    assert gateway.counts["continued"] == 1


def test_a_message_that_was_given_up_after_it_began_ends_with_an_error() -> None:
    begun = told("content_block_delta", index=0, delta={"type": "text_delta", "text": "The "})
    aborted = answering({}, begun, *BEFORE[3][1])

    _, body, _ = asked(MESSAGES, aborted, answering({}, *BEFORE[3][2]), stream=True)

    assert body.startswith(begun + b"event: error\ndata: ")
    assert b"message_stop" not in body


@pytest.mark.parametrize("text", ["abort", '"abort"', '{"finish_reason":"abort"}'])
def test_an_answer_about_aborting_is_not_given_up(text: str) -> None:
    whole = choices("stop", text=text, tool={"finish_reason": "abort"}, stop_reason="abort")
    events = [chunk(text=text, stop_reason="abort"), chunk("stop", text=text), DONE]
    other = answering({"choices": []}, DONE)

    _, body, _ = asked(COMPLETIONS, answering(whole, *events), other)
    _, stream, _ = asked(COMPLETIONS, answering(whole, *events), other, stream=True)

    assert json.loads(body) == whole
    assert stream == b"".join(events)


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/responses/resp_1/cancel"])
def test_a_response_that_its_client_has_cancelled_is_passed_on(path: str) -> None:
    cancelled = {"object": "response", "id": "resp_1", "status": "cancelled"}
    got: list[Any] = []

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(cancelled)

    async def test() -> None:
        async with gateway_to(answer) as (url, _), ClientSession() as session:
            method = "POST" if path.endswith("cancel") else "GET"
            async with session.request(method, url + path) as reply:
                got.append(await reply.json())

    run(test)
    assert got == [cancelled]
