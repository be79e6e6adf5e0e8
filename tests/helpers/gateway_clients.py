"""A gateway before fake replicas, in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import listeners
from aiohttp import web
from fake_replica import FakeReplica
from listeners import Handler, serving, upstream

from sola_sched.cluster.routers import RoundRobin
from sola_sched.cluster.view import Router
from sola_sched.proxy.listener import Listener, listening
from sola_sched.serving.gateway import Gateway
from sola_sched.serving.options import GatewayOptions

#: Waits of tests: long against what an event loop needs, short against a test's patience.
QUICK = GatewayOptions(stall_s=0.4, patience_s=0.6, avoid_s=0.05, connect_s=1.0)


@dataclass
class Got:
    """What a client has received.

    Attributes:
        status: Of HTTP.
        headers: Of the answer, names in lower case.
        chunks: Of a stream.
        is_ended: Whether the stream has had its `[DONE]`.
        num_comments: Of the stream.
        raw: The whole body.
    """

    status: int
    headers: dict[str, str]
    chunks: list[dict[str, Any]] = field(default_factory=list)
    is_ended: bool = False
    num_comments: int = 0
    raw: bytes = b""

    @property
    def text(self) -> str:
        """All text of the stream."""
        parts = [choice for chunk in self.chunks for choice in chunk.get("choices") or ()]
        return "".join(
            part.get("text") or part.get("delta", {}).get("content", "") for part in parts
        )

    @property
    def json(self) -> dict[str, Any]:
        """The body as an object."""
        value: dict[str, Any] = json.loads(self.raw)
        return value


@dataclass
class Client:
    """Sends requests to the gateway."""

    gateway: Gateway
    url: str
    admin_url: str
    session: aiohttp.ClientSession

    async def post(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> Got:
        """One request and its whole answer; `_` in names of headers is `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, json=body, headers=named) as reply:
            raw = await reply.read()
            got = Got(reply.status, {k.lower(): v for k, v in reply.headers.items()}, raw=raw)
        if reply.content_type == "text/event-stream":
            for event in raw.decode().split("\n\n")[:-1]:
                data = event.removeprefix("data: ")
                if data.startswith(":"):
                    got.num_comments += 1
                    continue
                got.is_ended |= data == "[DONE]"
                if data != "[DONE]":
                    got.chunks.append(json.loads(data))
        return got

    async def complete(self, num_tokens: int = 12, prompt: Any = "hello", **options: Any) -> Got:
        """A streamed completion."""
        body = {"model": "fake", "prompt": prompt, "max_tokens": num_tokens, "stream": True}
        return await self.post(body | options)


@asynccontextmanager
async def gateway_before(
    *fakes: FakeReplica,
    options: GatewayOptions = QUICK,
    router: Router | None = None,
    **more: Any,
) -> AsyncIterator[Client]:
    """A gateway that knows these replicas, in that order; round robin unless told otherwise.

    Args:
        more: Of the gateway.
    """
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake.running())
        gateway = Gateway(router or RoundRobin(), options, **more)
        gateway.sync({f"r{i}": fake.url for i, fake in enumerate(fakes)})
        here = ("127.0.0.1", 0)
        url, admin_url = await stack.enter_async_context(
            listening(
                (Listener(gateway.app(), gateway.front), here),
                (Listener(gateway.admin_app()), here),
            )
        )
        await until(lambda: all(r.has_feed is not None for r in gateway.replicas))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Client(gateway, url, admin_url, session)


@asynccontextmanager
async def gateway_at(*servers: str, **more: Any) -> AsyncIterator[tuple[str, Gateway]]:
    """A gateway before servers with these URLs: its own, and itself; round robin.

    Args:
        more: Of the gateway.
    """
    gateway = Gateway(RoundRobin(), QUICK, **more)
    gateway.sync({f"r{i}": url for i, url in enumerate(servers)})
    async with serving(gateway.app(), gateway.front) as url:
        await until(lambda: all(r.has_feed is not None for r in gateway.replicas))
        yield url, gateway


@asynccontextmanager
async def gateway_to(*handlers: Handler, **more: Any) -> AsyncIterator[tuple[str, Gateway]]:
    """As `gateway_at`, before servers that answer so."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(upstream(handler)) for handler in handlers]
        yield await stack.enter_async_context(gateway_at(*servers, **more))


class Echo:
    """Answers with nothing in particular, and keeps what has come."""

    def __init__(self, **answer: Any) -> None:
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self._answer = answer

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.bodies.append(await request.read())
        return web.Response(**({"text": "{}"} | self._answer))

    @property
    def xargs(self) -> Any:
        """Free arguments of the last body."""
        return json.loads(self.bodies[-1]).get("vllm_xargs")


def echoed(*requests: bytes, echo: Echo, **more: Any) -> list[bytes]:
    """The answers to requests, one after another, through a gateway before one server."""
    answers: list[bytes] = []

    async def test() -> None:
        async with gateway_to(echo, **more) as (url, _):
            answers.extend([await listeners.ask(url, each) for each in requests])

    listeners.run(test)
    return answers


async def until(condition: Any, limit_s: float = 5.0) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[Client], Awaitable[None]], *fakes: FakeReplica) -> None:
    """Run a test in an event loop of its own, with a gateway before these replicas."""

    async def whole() -> None:
        async with asyncio.timeout(20), gateway_before(*fakes) as client:
            await test(client)

    asyncio.run(whole())
