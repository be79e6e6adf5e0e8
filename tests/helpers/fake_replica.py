"""A server that answers as vLLM does, computes nothing, and fails when it is told to.

Each output token is a function of all tokens before it, so a stream that goes on from prompt and
output ids has to be the very stream that an uninterrupted one would have been.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def ids_of(prompt: str | list[int]) -> list[int]:
    """One token for each character."""
    return list(prompt) if isinstance(prompt, list) else [ord(letter) for letter in prompt]


def next_id(ids: list[int]) -> int:
    """The token after these."""
    value = 7
    for each in ids:
        value = (value * 31 + each) % 1_000_003
    return ord(_LETTERS[value % len(_LETTERS)])


def output_of(prompt: str | list[int], num_tokens: int) -> str:
    """The text of an uninterrupted run."""
    ids = ids_of(prompt)
    for _ in range(num_tokens):
        ids.append(next_id(ids))
    return "".join(map(chr, ids[len(ids) - num_tokens :]))


@dataclass
class FakeReplica:
    """One fake server.

    Attributes:
        token_s: Time of each token.
        die_after: Cuts its connections after so many tokens of a stream, and refuses new ones.
        cut_after: Cuts a stream after so many tokens, once; -1 before the answer begins.
        stall_after: Sends nothing more after so many tokens of a stream.
        comment_s: Seconds between comments that it sends while it stalls; None for none.
        refuse_s: Answers 503 with this `Retry-After`.
        status: Answers every request with this status, if it is not 200.
        error_after: Sends an error instead of a token, once.
        load: Lines of the load feed to send; None for a server without one.
        ends_feeds: Ends its feeds in order, as one does that has been told to end; new ones have
            no line.
        per_event: Tokens in one event.
        shows_steps: Whether its metrics change; None for a server without any.
        most_tokens: Most output tokens, also of a request without a limit.
        bodies: Of the requests that have come.
        headers: Of the requests that have come.
        num_gone: Requests that the other side has ended.
        num_looks: Times that its metrics were asked for.
        num_feeds: Times that its load was asked for.
    """

    token_s: float = 0.0
    die_after: int | None = None
    cut_after: int | None = None
    stall_after: int | None = None
    comment_s: float | None = None
    refuse_s: float | None = None
    status: int = 200
    error_after: int | None = None
    load: list[bytes] | None = None
    ends_feeds: bool = False
    per_event: int = 1
    shows_steps: bool | None = None
    most_tokens: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_gone: int = 0
    num_looks: int = 0
    num_feeds: int = 0
    url: str = ""
    _is_dead: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeReplica]:
        """Serve on a free port of this machine."""
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/sola/load", self._feed)
        async with TestServer(app, host="127.0.0.1") as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield self
            self._is_dead = True

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 4096}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.num_looks += 1
        if self.shows_steps is None:
            return web.Response(status=404)
        num_tokens = self.num_looks if self.shows_steps else 7
        return web.Response(text=f"vllm:generation_tokens_total {num_tokens}\n")

    async def _detokenize(self, request: web.Request) -> web.Response:
        ids = (await request.json())["tokens"]
        return web.json_response({"prompt": "".join(map(chr, ids))})

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        if self.load is None or self._is_dead:
            response: web.StreamResponse = web.Response(status=404)
            response.force_close()  # a connection that breaks later is a new one
            return response
        self.num_feeds += 1
        response = web.StreamResponse()
        await response.prepare(request)
        num_sent = num_looks = 0
        while not self._is_dead:
            if self.ends_feeds:
                return response
            for line in self.load[num_sent:]:
                await response.write(line + b"\n")
                num_sent += 1
            num_looks += 1
            if num_looks % 100 == 0:
                await response.write(b"\n")
            await asyncio.sleep(0.005)
        _cut(request)
        return response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        limit = min(_limit(body) or self.most_tokens or 16, self.most_tokens or 10**6)
        if int(body.get("min_tokens") or 0) > limit:
            message = f"min_tokens must be less than or equal to max_tokens={limit}, got more."
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        self.bodies.append(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        if self._is_dead or self.cut_after == -1:
            self.cut_after = None
            _cut(request)
            return web.Response()
        if self.refuse_s is not None:
            headers = {"Retry-After": f"{self.refuse_s:g}"}
            return web.json_response({"error": {"message": "full"}}, status=503, headers=headers)
        if self.status != HTTPStatus.OK:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        is_chat = request.path.endswith("chat/completions")
        prompt = _prompt(body, is_chat)
        num_tokens = limit
        try:
            if not body.get("stream"):
                await self._wait(num_tokens)
                text = output_of(prompt, num_tokens)
                part = {"message": {"content": text}} if is_chat else {"text": text}
                choice = {"index": 0, **part, "finish_reason": "length"}
                return web.json_response({"choices": [choice]})
            return await self._stream(request, body, prompt, num_tokens, is_chat)
        except (asyncio.CancelledError, ConnectionError):
            self.num_gone += 1
            raise

    async def _wait(self, num_tokens: int) -> None:
        if self.stall_after is not None:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.token_s * num_tokens)

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompt: str | list[int],
        num_tokens: int,
        is_chat: bool,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        writer = _Events(body, ids_of(prompt), is_chat, request.headers["X-Request-Id"])
        if is_chat:
            await response.write(writer.role())
        done = 0
        while done < num_tokens:
            await asyncio.sleep(self.token_s)
            while done == self.stall_after:
                await asyncio.sleep(self.comment_s or 3600)
                await response.write(b": keep-alive\n\n")
            if done == self.error_after:
                self.error_after = None
                await response.write(b'data: {"error": {"message": "boom", "code": 500}}\n\n')
                await response.write(b"data: [DONE]\n\n")
                return response
            if self._is_dead or done in (self.die_after, self.cut_after):
                self._is_dead |= done == self.die_after
                self.cut_after = None
                # Half of an event is in the client's hands when it happens.
                await response.write(b'data: {"id": "half')
                _cut(request)
                return response
            count = min(self.per_event, num_tokens - done)
            done += count
            await response.write(writer.tokens(count, is_last=done == num_tokens))
        if self.cut_after == num_tokens:
            self.cut_after = None
            _cut(request)
            return response
        await response.write(writer.end())
        return response


def _limit(body: dict[str, Any]) -> int | None:
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return int(limit) if limit else None


def _cut(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


def _prompt(body: dict[str, Any], is_chat: bool) -> str | list[int]:
    if is_chat:
        return "".join(message["content"] for message in body["messages"])
    prompt: str | list[int] = body["prompt"]
    return prompt


class _Events:
    """Writes events as vLLM 0.32 does."""

    def __init__(self, body: dict[str, Any], ids: list[int], is_chat: bool, name: str) -> None:
        self._body, self._ids, self._is_chat = body, ids, is_chat
        self._num_prompt = len(ids)
        self._head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + name,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": 1700000000,
            "model": body.get("model", "fake"),
        }
        self._shows_ids = bool(body.get("return_token_ids"))
        self._has_shown_prompt = False

    def role(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        prompt = {"prompt_token_ids": self._ids if self._shows_ids else None}
        self._has_shown_prompt = True
        return _event({**self._head, "choices": [choice], **prompt})

    def tokens(self, count: int, is_last: bool) -> bytes:
        new: list[int] = []
        prompt = self._ids[: self._num_prompt]
        for _ in range(count):
            new.append(next_id(self._ids))
            self._ids.append(new[-1])
        text = "".join(map(chr, new))
        choice: dict[str, Any] = {
            "index": 0,
            **({"delta": {"content": text}} if self._is_chat else {"text": text}),
            "logprobs": None,
            "finish_reason": "length" if is_last else None,
            "stop_reason": None,
            "token_ids": new if self._shows_ids else None,
        }
        if not self._is_chat:
            is_first = self._shows_ids and not self._has_shown_prompt
            choice["prompt_token_ids"] = prompt if is_first else None
            self._has_shown_prompt = True
        return _event({**self._head, "choices": [choice]})

    def end(self) -> bytes:
        data = b""
        if (self._body.get("stream_options") or {}).get("include_usage"):
            num_output = len(self._ids) - self._num_prompt
            usage = {
                "prompt_tokens": self._num_prompt,
                "total_tokens": len(self._ids),
                "completion_tokens": num_output,
            }
            data += _event({**self._head, "choices": [], "usage": usage})
        return data + b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
