"""The requests that come to one engine's server, counted at its door.

A load report (`load_text.py`) says what is there and not what came: a short request may come and
go between two of them. What is counted here is exact, whichever scheduler the engine has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sola_sched.proxy.paths import GENERATING, PASSED

#: Names under which a replica tells Ray Serve: requests since its start, and those there now.
ARRIVED, IN_FLIGHT = "sola_arrived", "sola_in_flight"
#: Sent by the gateway with a request that has been counted at another replica.
ATTEMPT_HEADER = "x-sola-attempt"
MIDDLEWARE = "sola_sched.serving.arrivals.ArrivalsMiddleware"
#: How the paths of all POST requests that pass end. A server with a root path has that in front of
#: them, so only their ends are compared.
_ANSWERED = tuple(path.rpartition("}")[2] for path, method in PASSED.items() if method == "POST")
_LOOK_S = 0.05


class Arrivals:
    """Counts of one server; belongs to its event loop.

    Attributes:
        num_arrived: Requests since the start for which the engine generates tokens; what was tried
            elsewhere before is not among them.
        num_in_flight: Requests, of any kind, that have not had their whole answer, tried before or
            not.
    """

    def __init__(self) -> None:
        self.num_arrived = self.num_in_flight = 0

    def stats(self) -> dict[str, int]:
        """What a replica's `record_autoscaling_stats` returns."""
        return {ARRIVED: self.num_arrived, IN_FLIGHT: self.num_in_flight}

    async def drain(self, limit_s: float) -> None:
        """Wait until no request is there, `limit_s` seconds at most."""
        end_s = asyncio.get_running_loop().time() + limit_s
        while self.num_in_flight and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(_LOOK_S)


#: Of this process' server: vLLM makes a middleware by its path, with nothing but the application.
ARRIVALS = Arrivals()


class ArrivalsMiddleware:
    """Counts what passes.

    Args:
        app: The ASGI application.
        arrivals: The counts.
    """

    def __init__(self, app: Any, arrivals: Arrivals = ARRIVALS) -> None:
        self.app, self.arrivals = app, arrivals

    async def __call__(
        self,
        scope: Any,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer one connection."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        if not path.endswith(_ANSWERED):
            await self.app(scope, receive, send)
            return
        if path.endswith(GENERATING):
            names = {name.lower() for name, _ in scope["headers"]}
            self.arrivals.num_arrived += ATTEMPT_HEADER.encode() not in names
        self.arrivals.num_in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.arrivals.num_in_flight -= 1
