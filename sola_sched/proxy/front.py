"""The application that stands before a proxy's own work: paths, keys, bodies, and who is idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from sola_sched.proxy.answers import Answer, ClientGoneError
from sola_sched.proxy.bodies import Bodies
from sola_sched.proxy.errors import RefusedError, error_body
from sola_sched.proxy.headers import for_pages
from sola_sched.proxy.keys import Keys
from sola_sched.proxy.limits import Limits
from sola_sched.proxy.paths import Passage, find

logger = logging.getLogger(__name__)

#: What a proxy does with a request that has passed, and its body.
Serve = Callable[[web.Request, Passage, bytes], Awaitable[web.StreamResponse]]
_LOOK_S = 1.0
#: The rest of a body whose request was refused is read for so long, so that the client, which is
#: sending it, sees the answer.
_LINGER_S = 5.0
HEALTH = "/health"
#: Of a request's head, bytes of a line and lines; a browser's cookies or a token may be long.
_LONGEST_HEADER, _MOST_HEADERS = 2**14, 64


class LateError(Exception):
    """An answer has not begun, or not ended, in time."""


class Front:
    """What every client's request goes through first.

    Args:
        serve: Answers those that pass.
        limits: Of what clients may take.
        keys: That they must have; not for `GET /health`, which balancers ask.

    Attributes:
        bodies: Of the requests that are there.
    """

    def __init__(self, serve: Serve, limits: Limits, keys: Keys) -> None:
        self.limits = limits
        self.bodies = Bodies(limits)
        self._serve, self._keys = serve, keys
        self._idle: OrderedDict[web.RequestHandler, None] = OrderedDict()
        self._without_transport: set[web.RequestHandler] = set()  # at the last look
        self._answers: dict[int, Answer] = {}  # by the identity of their requests

    def app(self, health: Handler) -> web.Application:
        """As aiohttp serves it; run it with `handler_cancellation=True`, so that aborts are heard.

        Args:
            health: Answers `GET /health`.
        """
        app = web.Application(
            middlewares=[self._watched],
            handler_args={
                "auto_decompress": False,  # `bodies` does, within limits
                "keepalive_timeout": self.limits.head_s,
                "lingering_time": _LINGER_S,
                "logger": _server_logger(),
                "max_field_size": _LONGEST_HEADER,
                "max_line_size": _LONGEST_HEADER,
                "max_headers": _MOST_HEADERS,
            },
        )
        app.cleanup_ctx.append(self._looking)
        app.on_shutdown.append(self._end)
        app.router.add_get(HEALTH, health)
        app.router.add_route("*", "/{path:.*}", self._pass)
        return app

    def answer(self, request: web.Request) -> Answer:
        """The answer to a request; a client that does not read it is left."""
        return self._answers[id(request)]

    @contextlib.asynccontextmanager
    async def in_time(self, answer: Answer) -> AsyncIterator[None]:
        """While an answer is made; ends it when its beginning or its end is late.

        Raises:
            LateError: It is late.
        """
        limits = self.limits
        end_s = asyncio.get_running_loop().time() + limits.whole_s
        try:
            async with asyncio.timeout(min(limits.first_byte_s, limits.whole_s)) as limit:
                answer.on_begin = lambda: limit.reschedule(end_s)
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            answer.on_begin = None
            verb, most_s = "begin", limits.first_byte_s
            if answer.has_begun:
                verb, most_s = "end", limits.whole_s
            raise LateError(
                f"an answer must {verb} within {most_s:g} s (it did not); ask for fewer tokens"
            ) from None

    def opened(self, connection: web.RequestHandler) -> None:
        """There is a new connection; it has its transport soon."""
        self._idle[connection] = None

    def make_room(self) -> bool:
        """Close the connection that has had no request for longest; whether there is one."""
        for _ in range(len(self._idle)):
            connection, _ = self._idle.popitem(last=False)
            if connection.transport is not None:
                connection.transport.abort()
                return True
            self._idle[connection] = None  # it has gone, or has no transport yet
        return False

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        # Browsers ask without a key what they may send, and send no body with that.
        if request.method != "OPTIONS" or request.body_exists:
            self._keys.check(request.headers)
        passage = find(request.method, request.path, self.limits.pass_paths)
        async with self.bodies.of(request) as data:
            return await self._serve(request, passage, data)

    @web.middleware
    async def _watched(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        self._idle.pop(connection, None)
        answer = self._answers[id(request)] = Answer(request)
        try:
            try:
                response = await handler(request)
            except RefusedError as error:
                body = error_body(request.path, str(error), error.status)
                headers = error.headers | for_pages(request.headers)
                response = web.json_response(body, status=error.status, headers=headers)
            if not response.prepared:
                with contextlib.suppress(ClientGoneError):
                    await answer.whole(response)
            return response
        finally:
            del self._answers[id(request)]
            self._idle[connection] = None

    async def _looking(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._look())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _look(self) -> None:
        """Leave clients that do not read, and forget connections that have gone."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            before_s = loop.time() - self.limits.write_s
            for answer in list(self._answers.values()):
                if answer.has_not_read_since(before_s):
                    logger.warning("a client has read nothing for %g s: left", self.limits.write_s)
                    answer.abort()
            self._forget_gone()

    def _forget_gone(self) -> None:
        """Forget connections that have gone: a new one has its transport by the second look."""
        found = {each for each in self._idle if each.transport is None}
        for connection in found & self._without_transport:
            del self._idle[connection]
        self._without_transport = found

    async def _end(self, _: web.Application) -> None:
        self.bodies.end()


async def is_up(_: web.Request) -> web.Response:
    """The answer of a server that is always up."""
    return web.Response(status=HTTPStatus.OK)


def _server_logger() -> logging.Logger:
    """For aiohttp: what a client sends that is no HTTP is answered, and not worth a traceback."""
    server = logging.getLogger(f"{__name__}.server")
    server.addFilter(_is_of_server)
    return server


def _is_of_server(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)
