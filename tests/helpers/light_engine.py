"""The deployment of an engine with a server that computes nothing, for tests of what Serve does."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sola_sched.serving.arrivals import ArrivalsMiddleware
from sola_sched.serving.ray_app import Engine, IngressEngine


class LightServer:
    """Answers as `EngineServer` is asked.

    Args:
        host: Address to listen on.
        answer_s: Time that each answer takes.
    """

    def __init__(self, host: str, answer_s: float) -> None:
        self._answer_s = answer_s
        self.app = Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])
        self.app.add_middleware(ArrivalsMiddleware)
        listening = socket.socket()
        listening.bind((host, 0))
        self.url = f"http://{host}:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning"))
        self._serving = asyncio.create_task(self._server._serve(sockets=[listening]))

    async def _complete(self, request: Request) -> JSONResponse:
        size = len(await request.body())
        await asyncio.sleep(self._answer_s)
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return JSONResponse({"choices": [choice], "server": self.url, "body_bytes": size})

    async def check(self) -> None:
        """It is well."""

    async def stop(self) -> None:
        """End at once, with all that is there."""
        self._server.should_exit = self._server.force_exit = True
        await self._serving


class LightEngine(Engine):
    """An `Engine` that differs in its server alone; the option `answer_s` is that of it."""

    async def _start(self, host: str) -> Any:
        return LightServer(host, float(self._options["answer_s"]))


class LightIngressEngine(IngressEngine):
    """The same behind Serve's own proxy."""

    async def _start(self, host: str) -> Any:
        return LightServer(host, float(self._options["answer_s"]))
