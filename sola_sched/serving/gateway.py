"""The gateway: an HTTP server before several vLLM servers; see `docs/cluster.md`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sola_sched.cluster.view import Router
from sola_sched.errors import SloError
from sola_sched.proxy.answers import ClientGoneError
from sola_sched.proxy.errors import RefusedError
from sola_sched.proxy.front import HEALTH, Front, LateError
from sola_sched.proxy.keys import Keys
from sola_sched.proxy.limits import Limits
from sola_sched.proxy.owners import Owners
from sola_sched.proxy.paths import Passage, target
from sola_sched.proxy.upstream import Upstream
from sola_sched.serving.call import Call, Lengths, request_id_of
from sola_sched.serving.delivery import Delivery
from sola_sched.serving.feed import follow
from sola_sched.serving.options import GatewayOptions
from sola_sched.serving.replicas import Replica, Replicas
from sola_sched.serving.slo_headers import ClientRules

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
_STALL_LOOKS = 8


class Gateway:
    """Routes, retries and resumes.

    Args:
        router: Decides where requests go.
        options: Waits and limits.
        limits: Of what clients may take.
        keys: That they must have.
        rules: What they may say of their requests.

    Attributes:
        replicas: Those that it knows.
        counts: Of `COUNTS`.
        front: Before its own work.
    """

    def __init__(
        self,
        router: Router,
        options: GatewayOptions | None = None,
        *,
        limits: Limits | None = None,
        keys: Keys | None = None,
        rules: ClientRules | None = None,
    ) -> None:
        self.options = options or GatewayOptions()
        self.replicas = Replicas(router, time.monotonic)
        self.counts: Counter[str] = Counter()
        self.front = Front(self._serve, limits or Limits(), keys or Keys())
        self._lengths, self._rules = Lengths(), rules or ClientRules()
        self._owners: Owners[Replica] = Owners()
        self._followers: dict[Replica, asyncio.Task[None]] = {}
        self._upstream: Upstream | None = None

    def app(self) -> web.Application:
        """What clients reach; see `Front.app`."""
        app = self.front.app(self._health)
        app.cleanup_ctx.append(self._running)
        return app

    def admin_app(self) -> web.Application:
        """What the operator reaches, on an address that clients do not."""
        app = web.Application()
        app.router.add_get(HEALTH, self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/replicas", self._show_replicas)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        async with Upstream(self.options.connect_s) as self._upstream:
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
        if self._upstream is not None:
            for replica in new:
                self._follow(replica)

    def _follow(self, replica: Replica) -> None:
        assert self._upstream is not None
        self._followers[replica] = asyncio.create_task(
            follow(replica, self.replicas, self._upstream.session, self.options.stall_s)
        )

    async def _watch(self) -> None:
        """Look for replicas that have stalled."""
        while True:
            await asyncio.sleep(self.options.stall_s / _STALL_LOOKS)
            self.counts["stalls"] += len(self.replicas.end_stalled(self.options.stall_s))

    async def _serve(
        self, request: web.Request, passage: Passage, data: bytes
    ) -> web.StreamResponse:
        arrival_s = self.replicas.clock()
        self.counts["requests"] += 1
        try:
            call = Call.of(
                request.method,
                target(request, passage),
                request.headers,
                data,
                request_id=request_id_of(request.headers),
                arrival_s=arrival_s,
                peer=request.remote,
                passage=passage,
                rules=self._rules,
            )
        except SloError as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from error
        answer = self.front.answer(request)
        assert self._upstream is not None
        delivery = Delivery(
            call,
            answer,
            replicas=self.replicas,
            upstream=self._upstream,
            owners=self._owners,
            lengths=self._lengths,
            options=self.options,
            counts=self.counts,
        )
        with contextlib.suppress(ClientGoneError):
            try:
                async with self.front.in_time(answer):
                    await delivery.run()
            except LateError as error:
                await delivery.give_up(str(error), HTTPStatus.GATEWAY_TIMEOUT)
        return await answer.end()

    async def _health(self, _: web.Request) -> web.Response:
        is_up = any(map(self.replicas.is_usable, self.replicas))
        return web.Response(status=HTTPStatus.OK if is_up else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _show_replicas(self, _: web.Request) -> web.Response:
        shown = self.replicas.shown()
        return web.json_response(shown, dumps=lambda value: json.dumps(value, allow_nan=False))

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
