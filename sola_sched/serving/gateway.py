"""The gateway: an HTTP server before several vLLM servers; see `docs/cluster.md`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from http import HTTPStatus

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sola_sched.cluster.view import Router
from sola_sched.errors import SloError
from sola_sched.serving.call import Call, Lengths
from sola_sched.serving.delivery import Delivery, GatewayOptions
from sola_sched.serving.feed import LOAD_PATH, follow
from sola_sched.serving.protocols import openai_error
from sola_sched.serving.replicas import Replica, Replicas

#: What is counted, and shown as `sola_gateway_NAME_total`.
COUNTS = {
    "requests": "Requests that have come.",
    "failed_attempts": "Attempts on a replica that have failed.",
    "retried": "Requests that began anew on another replica.",
    "continued": "Streams that went on elsewhere from their tokens.",
    "replayed": "Streams that were repeated elsewhere, without what had been sent.",
    "refused": "Times that a replica has refused a request (HTTP 503).",
    "given_up": "Requests that were answered with an error of the gateway.",
    "stalls": "Times that a replica has stalled.",
}
_MOST_BYTES = 256 * 2**20
_STALL_LOOKS = 8


class Gateway:
    """Routes, retries and resumes.

    Args:
        router: Decides where requests go.
        options: Waits and limits.
        lengths: Estimates of lengths, and default targets.

    Attributes:
        replicas: Those that it knows.
        counts: Of `COUNTS`.
    """

    def __init__(
        self,
        router: Router,
        options: GatewayOptions | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self.options = options or GatewayOptions()
        self.replicas = Replicas(router, time.monotonic)
        self.counts: Counter[str] = Counter()
        self._lengths = lengths or Lengths()
        self._followers: dict[Replica, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The server; run it with `handler_cancellation=True`, so that aborts reach the engine."""
        app = web.Application(client_max_size=_MOST_BYTES)
        app.cleanup_ctx.append(self._running)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/replicas", self._show_replicas)
        app.router.add_get(LOAD_PATH, self._no_load)
        app.router.add_route("*", "/{path:.*}", self._serve)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.options.connect_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            watch = asyncio.create_task(self._watch())
            for replica in self.replicas:
                self._follow(replica)
            yield
            for task in (watch, *self._followers.values()):
                task.cancel()
            await asyncio.gather(watch, *self._followers.values(), return_exceptions=True)

    def sync(self, urls: Mapping[str, str]) -> None:
        """Make these, names to URLs, the replicas that there are; on the gateway's loop."""
        new, left = self.replicas.sync(urls)
        for replica in left:
            if (task := self._followers.pop(replica, None)) is not None:
                task.cancel()
        if self._session is not None:
            for replica in new:
                self._follow(replica)

    def _follow(self, replica: Replica) -> None:
        assert self._session is not None
        self._followers[replica] = asyncio.create_task(
            follow(replica, self.replicas, self._session, self.options.stall_s)
        )

    async def _watch(self) -> None:
        """Look for replicas that have stalled."""
        while True:
            await asyncio.sleep(self.options.stall_s / _STALL_LOOKS)
            self.counts["stalls"] += len(self.replicas.end_stalled(self.options.stall_s))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        arrival_s = self.replicas.clock()
        self.counts["requests"] += 1
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        data = await request.read()
        try:
            call = Call.of(
                request.method,
                request.path_qs,
                request.headers,
                data,
                request_id=request_id,
                arrival_s=arrival_s,
            )
        except SloError as error:
            status = HTTPStatus.BAD_REQUEST
            return web.json_response(openai_error(str(error), status), status=status)
        client = _Client(request)
        assert self._session is not None
        delivery = Delivery(
            call,
            client,
            replicas=self.replicas,
            session=self._session,
            lengths=self._lengths,
            options=self.options,
            counts=self.counts,
        )
        with contextlib.suppress(ClientGoneError):
            await delivery.run()
        return await client.end()

    async def _health(self, _: web.Request) -> web.Response:
        is_up = any(map(self.replicas.is_usable, self.replicas))
        return web.Response(status=HTTPStatus.OK if is_up else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _show_replicas(self, _: web.Request) -> web.Response:
        shown = self.replicas.shown()
        return web.json_response(shown, dumps=lambda value: json.dumps(value, allow_nan=False))

    async def _no_load(self, _: web.Request) -> web.Response:
        """A feed is one engine's and does not end; 404 is what a server without one answers."""
        status = HTTPStatus.NOT_FOUND
        message = (
            f"{LOAD_PATH} must be asked for at an engine's own URL (this is a gateway); "
            "GET /replicas lists the URLs, and the load of each engine."
        )
        return web.json_response(openai_error(message, status), status=status)

    async def _metrics(self, _: web.Request) -> web.Response:
        registry = CollectorRegistry()
        registry.register(self)
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    def collect(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        """For Prometheus."""
        ignored = self.replicas.reports.num_ignored
        usable = sum(map(self.replicas.is_usable, self.replicas))
        running = sum(len(replica.attempts) for replica in self.replicas)
        return [
            *(
                CounterMetricFamily(f"sola_gateway_{name}", text, value=self.counts[name])
                for name, text in COUNTS.items()
            ),
            CounterMetricFamily(
                "sola_gateway_ignored_reports", "Reports that could not be true.", value=ignored
            ),
            GaugeMetricFamily("sola_gateway_usable_replicas", "Replicas in use.", value=usable),
            GaugeMetricFamily("sola_gateway_in_flight", "Requests on replicas.", value=running),
        ]


class ClientGoneError(Exception):
    """Who has sent the request does not read any more."""


class _Client:
    """The answer to one HTTP request."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Client.start`."""
        self._response = web.StreamResponse(status=status, headers=headers)
        await self._do(self._response.prepare(self._request))

    async def write(self, data: bytes) -> None:
        """See `Client.write`."""
        assert self._response is not None
        await self._do(self._response.write(data))

    async def _do(self, writing: Awaitable[object]) -> None:
        try:
            await writing
        except (ConnectionError, aiohttp.ClientConnectionResetError) as error:
            raise ClientGoneError from error

    async def end(self) -> web.StreamResponse:
        """The whole response."""
        if self._response is None:
            return web.Response(status=HTTPStatus.BAD_GATEWAY)
        with contextlib.suppress(ConnectionError):
            await self._response.write_eof()
        return self._response
