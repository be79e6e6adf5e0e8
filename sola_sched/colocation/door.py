"""One address before services that sleep: `python -m sola_sched.colocation door`.

A request goes to the service that its body names as `model`, and waits while that is woken. Each
service is a vLLM server with `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from sola_sched.colocation.sleeping import Dormitory, SleepOptions, WakeError
from sola_sched.config.http_headers import OF_CONNECTION

#: Paths of vLLM's besides /v1/ that are for clients; others put it to sleep or run code in it.
_PASSED_ON = frozenset(
    ("/classify", "/detokenize", "/pooling", "/rerank", "/score", "/tokenize", "/v2/rerank")
)
#: Headers that both servers write themselves.
_NOT_PASSED_ON = OF_CONNECTION | {"content-length", "expect", "host"}
_CONTROL_S = 600.0


class VllmServer:
    """A vLLM server, as `sleeping.Sleeper`.

    Args:
        url: Without a path.
        session: For its requests.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def sleep(self) -> None:
        # Level 1: nothing would load the weights that level 2 drops.
        # `wait`: vLLM's own default would end requests that the door does not know of.
        await self._post("/sleep?level=1&mode=wait")
        if not await self.is_sleeping():
            raise RuntimeError(f"{self.url} does not sleep although it was told to")

    async def wake_up(self) -> None:
        await self._post("/wake_up")
        if await self.is_sleeping():
            raise RuntimeError(f"{self.url} sleeps although it was woken")

    async def is_sleeping(self) -> bool:
        async with self._session.get(f"{self.url}/is_sleeping", timeout=_limit()) as answer:
            await _check(answer, self.url)
            return bool((await answer.json())["is_sleeping"])

    async def _post(self, path: str) -> None:
        async with self._session.post(self.url + path, timeout=_limit()) as answer:
            await _check(answer, self.url)


def _limit() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=_CONTROL_S)


async def _check(answer: aiohttp.ClientResponse, url: str) -> None:
    if answer.status == 404:
        raise RuntimeError(
            f"{url} must offer {answer.url.path} (it does not): start vLLM with "
            "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode, which needs a GPU."
        )
    if answer.status >= 400:
        raise RuntimeError(f"{url}{answer.url.path} answered {answer.status}: "
                           f"{(await answer.text())[:200]}")  # fmt: skip


class Door:
    """The web application.

    Args:
        urls: Of the services, by the name that requests give as `model`.
        options: When they sleep.
    """

    def __init__(self, urls: Mapping[str, str], options: SleepOptions) -> None:
        self._urls, self._options = dict(urls), options
        self.dormitory: Dormitory

    def app(self) -> web.Application:
        """As aiohttp serves it."""
        app = web.Application(client_max_size=1 << 30)
        app.cleanup_ctx.append(self._running)
        app.router.add_get("/services", self._services)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            servers = {name: VllmServer(url, session) for name, url in self._urls.items()}
            self.dormitory = Dormitory(servers, self._options)
            try:
                await self.dormitory.start()
            except (OSError, UnicodeError) as error:  # not of the door's own address
                raise RuntimeError(str(error) or type(error).__name__) from error
            task = asyncio.create_task(self.dormitory.run())
            yield
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _services(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                name: {
                    "is_awake": service.is_awake,
                    "num_in_flight": service.num_in_flight,
                    "num_waiting": service.num_waiting,
                }
                for name, service in self.dormitory.services.items()
            }
        )

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            names = [{"id": name, "object": "model"} for name in self._urls]
            return web.json_response({"object": "list", "data": names})
        path = posixpath.normpath(request.path)  # as the connection to the server will have it
        if not path.startswith("/v1/") and path not in _PASSED_ON:
            return _error(404, f"the path must be /v1/... or one of {sorted(_PASSED_ON)}.")
        data = await request.read()
        name = _model(data)
        if not isinstance(name, str) or name not in self._urls:
            known = ", ".join(map(repr, self._urls))
            return _error(404, f"'model' must be one of {known} (got {name!r}).")
        try:
            async with self.dormitory.awake(name):
                return await self._answer(request, data, name)
        except WakeError as error:
            return _error(503, str(error), {"Retry-After": "10"})

    async def _answer(self, request: web.Request, data: bytes, name: str) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED_ON}
        target = self._urls[name].rstrip("/") + request.path_qs
        try:
            answer = await self._session.request(
                request.method, target, data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            status = 504 if isinstance(error, TimeoutError) else 502
            reason = str(error) or type(error).__name__
            return _error(status, f"the server of {name!r} cannot be reached: {reason}")
        async with answer:  # an error from here on cuts the client's connection
            passed = {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_PASSED_ON}
            passed.pop("Content-Encoding", None)  # the client has decoded it
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


def _model(data: bytes) -> Any:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body.get("model") if isinstance(body, dict) else None


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": "sola_sched", "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)
