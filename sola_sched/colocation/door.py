"""One address before services that sleep: `python -m sola_sched.colocation door`.

A request goes to the service that its body names as `model`, and waits while that is woken. Each
service is a vLLM server with `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web

from sola_sched.colocation.sleeping import Dormitory, SleepOptions, WakeError
from sola_sched.proxy.answers import Answer, ClientGoneError
from sola_sched.proxy.errors import RefusedError
from sola_sched.proxy.form import is_form, value_of
from sola_sched.proxy.front import HEALTH, Front, LateError, is_up
from sola_sched.proxy.headers import FORWARDED_FOR, forwarded_for, passed_back, passed_on
from sola_sched.proxy.json_object import JsonObject
from sola_sched.proxy.keys import Keys
from sola_sched.proxy.limits import Limits
from sola_sched.proxy.owners import Owners, of_response, response_id
from sola_sched.proxy.paths import RESPONSES, Passage, target
from sola_sched.proxy.upstream import Upstream, reason

logger = logging.getLogger(__name__)

#: Headers that are the door's, on the way to a server.
_NOT_PASSED_ON = frozenset(
    ("content-encoding", "content-length", "expect", "host", "x-forwarded-for")
)
_CONNECT_S = 10.0
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
        limits: Of what clients may take.
        keys: That they must have.

    Attributes:
        front: Before its own work.
        dormitory: The services, while the application runs.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        options: SleepOptions,
        *,
        limits: Limits | None = None,
        keys: Keys | None = None,
    ) -> None:
        self._urls = {name: url.rstrip("/") for name, url in urls.items()}
        self._options = options
        self._owners: Owners[str] = Owners()
        self.front = Front(self._serve, limits or Limits(), keys or Keys())
        self.dormitory: Dormitory

    def app(self) -> web.Application:
        """What clients reach; see `Front.app`."""
        app = self.front.app(is_up)
        app.cleanup_ctx.append(self._running)
        return app

    def admin_app(self) -> web.Application:
        """What the operator reaches, on an address that clients do not."""
        app = web.Application()
        app.router.add_get(HEALTH, is_up)
        app.router.add_get("/services", self._services)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        async with Upstream(_CONNECT_S) as self._upstream:
            session = self._upstream.session
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

    async def _serve(
        self, request: web.Request, passage: Passage, data: bytes
    ) -> web.StreamResponse:
        if passage.path == "/v1/models" and request.method in ("GET", "HEAD"):
            names = [{"id": name, "object": "model"} for name in self._urls]
            return web.json_response({"object": "list", "data": names})
        answer = self.front.answer(request)
        try:
            async with self.front.in_time(answer):
                if request.method != "POST" and passage.response_id is None:
                    # Any of them answers it, also in its sleep.
                    await self._ask(answer, passage, data, next(iter(self._urls)))
                else:
                    name = self._service_of(request, passage, data)
                    async with self.dormitory.awake(name):
                        await self._ask(answer, passage, data, name)
        except WakeError as error:
            why = reason(error.failure, self._urls[error.name])
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{error.name!r} could not be woken: {why}",
                {"Retry-After": "10"},
            ) from error
        except LateError as error:
            if answer.has_begun:
                answer.abort()
            else:
                raise RefusedError(HTTPStatus.GATEWAY_TIMEOUT, str(error)) from error
        except ClientGoneError:
            pass
        return await answer.end()

    def _service_of(self, request: web.Request, passage: Passage, data: bytes) -> str:
        """The service that a request is for.

        Raises:
            RefusedError: It names none that there is.
        """
        if passage.response_id is not None:
            name = self._owners.of(of_response(passage.response_id))
            if name is None and len(self._urls) > 1:
                raise RefusedError(
                    HTTPStatus.NOT_FOUND,
                    f"the response must have been stored through this door since its start (got "
                    f"{passage.response_id[:100]!r}).",
                )
            return name or next(iter(self._urls))
        try:
            if passage.takes_form and is_form(request.headers):
                value = value_of(data, request.headers["Content-Type"], "model")
                model: Any = None if value is None else value.decode()
            else:
                model = JsonObject(data).get("model")
        except (ValueError, RecursionError) as error:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST,
                f"the body must be a JSON object in UTF-8{' or a form' * passage.takes_form} "
                f"(got: {error}).",
            ) from error
        if not isinstance(model, str) or model not in self._urls:
            known = ", ".join(map(repr, self._urls))
            raise RefusedError(
                HTTPStatus.NOT_FOUND, f"'model' must be one of {known} (got {str(model)[:100]!r})."
            )
        return model

    async def _ask(self, answer: Answer, passage: Passage, data: bytes, name: str) -> None:
        """Pass a request on to a service, and its answer back."""
        request, url = answer.request, self._urls[name]
        headers = passed_on(request.headers, _NOT_PASSED_ON)
        headers[FORWARDED_FOR] = forwarded_for(request.headers, request.remote)
        may_store = request.method == "POST" and passage.path == RESPONSES
        async with contextlib.AsyncExitStack() as stack:
            try:
                reply = await stack.enter_async_context(
                    self._upstream.request(
                        request.method,
                        url + target(request, passage),
                        headers=headers,
                        data=data,
                        is_repeatable=passage.is_repeatable,
                    )
                )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.warning("the server of %s cannot be reached: %r", name, error)
                is_late = isinstance(error, TimeoutError)
                raise RefusedError(
                    HTTPStatus.GATEWAY_TIMEOUT if is_late else HTTPStatus.BAD_GATEWAY,
                    f"the server of {name!r} cannot be reached: {reason(error)}",
                ) from error
            await answer.start(reply.status, passed_back(reply.headers, url, keeps_length=True))
            try:
                async for piece in reply.content.iter_any():
                    if may_store and (stored := response_id(piece)) is not None:
                        self._owners.learn(of_response(stored), name)
                        may_store = False
                    await answer.write(piece)
            except (aiohttp.ClientError, OSError) as error:  # so does the client's
                logger.warning("the answer of %s has broken off: %r", name, error)
                answer.abort()
