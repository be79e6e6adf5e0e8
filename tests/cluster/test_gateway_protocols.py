"""A stream that is lost is told in its own API's form, and its clients' packages raise it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("anthropic")
pytest.importorskip("openai")

import aiohttp
import anthropic
import openai
from aiohttp import web
from aiohttp.test_utils import TestServer
from gateway_clients import QUICK

from sola_sched.cluster.routers import RoundRobin
from sola_sched.serving.gateway import Gateway


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


_MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m",
            "stop_reason": None, "usage": {"input_tokens": 3, "output_tokens": 0}}  # fmt: skip
MESSAGES = [
    _event("message_start", message=_MESSAGE),
    _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    _event("content_block_delta", index=0, delta={"type": "text_delta", "text": "The "}),
]
RESPONSES = [
    _event("response.output_text.delta", sequence_number=4, item_id="i", output_index=0,
           content_index=0, delta="The ", logprobs=[]),
]  # fmt: skip
HALVES = [b"", b'event: content_block_delta\ndata: {"type": "content_bl']


async def _raw(path: str, sent: bytes, *, is_cut: bool) -> tuple[bytes, Exception | None]:
    """What the client has got of a stream that ends after these bytes, and what it raised."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sent)
        if is_cut:
            await asyncio.sleep(0.01)
            assert request.transport is not None
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post(path, answer)
    gateway = Gateway(RoundRobin(), QUICK)
    raised: Exception | None = None
    async with TestServer(app, host="127.0.0.1") as server:
        gateway.sync({"r0": str(server.make_url("")).rstrip("/")})
        async with TestServer(gateway.app(), host="127.0.0.1") as own:
            url = str(own.make_url("")).rstrip("/")
            try:
                if (ask := _CLIENTS.get(path)) is not None:
                    await ask(url)
            except (anthropic.APIError, openai.APIError) as error:
                raised = error
            async with aiohttp.ClientSession() as session, session.post(
                url + path, json={"stream": True, "stop": ["x"]}
            ) as reply:  # fmt: skip
                return await reply.read(), raised


async def _read(stream: AsyncIterator[object]) -> list[object]:
    """All events; what its package raises at an error goes on."""
    return [event async for event in stream]


async def _claude(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
        asked = [{"role": "user", "content": "hi"}]
        async with client.messages.stream(model="m", max_tokens=9, messages=asked) as stream:
            await _read(stream)


async def _responses(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        await _read(await client.responses.create(model="m", input="hi", stream=True))


async def _chat(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        asked = [{"role": "user", "content": "hi"}]
        # With a stop string and without a seed it cannot come from another replica.
        await _read(await client.chat.completions.create(
            model="m", messages=asked, stream=True, stop=["x"]
        ))  # fmt: skip


async def _completion(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        await _read(await client.completions.create(
            model="m", prompt="hi", stream=True, stop=["x"]
        ))  # fmt: skip


_CLIENTS = {
    "/v1/messages": _claude,
    "/v1/responses": _responses,
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
}


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("path", "events"), [("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)]
)
def test_a_lost_stream_raises_in_its_clients_package_and_ends_with_whole_events(
    path: str, events: list[bytes], half: bytes, is_cut: bool
) -> None:
    whole = b"".join(events)

    raw, raised = asyncio.run(_raw(path, whole + half, is_cut=is_cut))

    assert raised is not None
    assert raw.startswith(whole + b"event: error\ndata: {")
    last = json.loads(raw.removeprefix(whole + b"event: error\ndata: "))
    assert last["type"] == "error"
    assert last["error"]["message"].startswith("the replica was lost within its answer: ")
    if path == "/v1/responses":
        assert last["sequence_number"] == 5


def _chunk(**choice: Any) -> bytes:
    chunk = {"id": "c", "object": "o", "created": 1, "model": "m",
             "choices": [{"index": 0, "finish_reason": None, **choice}]}  # fmt: skip
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("half", [b"", b'data: {"id": "c", "cho'])
@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/chat/completions", _chunk(delta={"content": "The "})),
        ("/v1/completions", _chunk(text="The ")),
    ],
)
def test_a_lost_stream_of_tokens_raises_in_its_clients_package_and_has_its_end(
    path: str, event: bytes, half: bytes, is_cut: bool
) -> None:
    raw, raised = asyncio.run(_raw(path, event + half, is_cut=is_cut))

    assert isinstance(raised, openai.APIError)
    assert "the rest of this answer cannot come from another one" in raised.message
    assert raw.startswith(event + b'data: {"error":')
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert raw.count(b"data: ") == 3


COHERE = [b'data: {"type":"content-delta","index":0,"delta":{}}\n\n']
ENDS = [
    ("/v1/messages", MESSAGES, _event("message_stop")),
    ("/v1/responses", RESPONSES, _event("response.completed", sequence_number=5)),
    ("/cohere/v2/chat", COHERE, b'data: {"type":"message-end"}\n\n'),
]


@pytest.mark.parametrize(("path", "events", "end"), ENDS)
def test_a_stream_whose_last_event_was_there_is_whole_however_its_connection_ends(
    path: str, events: list[bytes], end: bytes
) -> None:
    whole = b"".join([*events, end])

    raw, _ = asyncio.run(_raw(path, whole, is_cut=True))

    assert raw == whole


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_lost_stream_of_coheres_api_ends_with_an_error(is_cut: bool) -> None:
    whole = b"".join(COHERE)

    raw, _ = asyncio.run(_raw("/cohere/v2/chat", whole, is_cut=is_cut))

    assert raw.startswith(whole + b"data: {")
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    last = json.loads(raw.removeprefix(whole + b"data: ").partition(b"\n")[0])
    assert last["type"] == "message-end"
    assert last["delta"]["finish_reason"] == "ERROR"
    assert last["delta"]["error"]


def test_without_a_replica_each_api_is_told_in_its_own_form() -> None:
    raised: list[Exception] = []

    async def ask_all() -> None:
        gateway = Gateway(RoundRobin(), QUICK)
        async with TestServer(gateway.app(), host="127.0.0.1") as own:
            for ask in (_claude, _responses):
                try:
                    await ask(str(own.make_url("")).rstrip("/"))
                except (anthropic.APIStatusError, openai.APIStatusError) as error:
                    raised.append(error)

    asyncio.run(ask_all())

    of_anthropic, of_openai = raised
    assert isinstance(of_anthropic, anthropic.APIStatusError)
    assert isinstance(of_openai, openai.APIStatusError)
    assert of_anthropic.status_code == of_openai.status_code == 503
    assert isinstance(of_anthropic.body, dict)
    assert of_anthropic.body["type"] == "error"
    assert of_anthropic.body["error"]["type"] == "overloaded_error"
    assert of_openai.type == "ServiceUnavailableError"
