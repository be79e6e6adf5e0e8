"""The load of the engine, pushed to routers: `GET /sola/load` on vLLM's own server.

Asked for with the option `load_interval_s`. The answer ends with the server. Each report of the
scheduler is a line: its age in seconds and the load (`load_text.py`), or `!` where the scheduler
does not follow the engine. A line each second is empty, so that silence means something too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from sola_sched.config.sola_config import SolaConfig
from sola_sched.front_end import server_args

LOAD_PATH = "/sola/load"
MIDDLEWARE = "sola_sched.front_end.load_feed.LoadFeedMiddleware"
_SIGN_OF_LIFE_S = 1.0

logger = logging.getLogger("vllm.sola_sched")

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_Receive = Callable[[], Awaitable[_Message]]


class LoadFeed:
    """The last report of this process' engine, and who waits for the next one.

    Belongs to the event loop of the server, in which vLLM's loggers run too.
    """

    def __init__(self) -> None:
        self._line: str | None = None
        self._made_s = 0.0
        self._changed = asyncio.Event()

    def publish(self, load: str | None) -> None:
        """A report has come, without a load where that is not known."""
        self._line, self._made_s = load or "!", time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()

    async def lines(self) -> AsyncIterator[bytes]:
        """The last report and all after it, while they come faster than they are sent the last."""
        told_s = 0.0
        while True:
            changed, line = self._changed, self._line
            if line is None or self._made_s == told_s:
                yield b"\n"
            else:
                told_s = self._made_s
                age_s = time.monotonic() - told_s
                yield f"{line}\n".encode() if line == "!" else f"{age_s:.4f} {line}\n".encode()
            try:
                await asyncio.wait_for(changed.wait(), _SIGN_OF_LIFE_S)
            except TimeoutError:
                continue


FEED = LoadFeed()


class LoadFeedMiddleware:
    """Answers the one path.

    Args:
        app: The ASGI application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
        """Answer one connection."""
        if scope["type"] != "http" or scope["path"] != LOAD_PATH or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        state = getattr(scope.get("app"), "state", None)
        sending = asyncio.create_task(_send_lines(send, state))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            sending.cancel()
            leaving.cancel()


async def _until_gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_lines(send: _Send, state: Any) -> None:
    """Send all reports, until the server ends: it waits for its last answer."""
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for line in FEED.lines():
        if _is_ending(state):
            break
        await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_ending(state: Any) -> bool:
    """Whether vLLM's server with this state has been told to end, or its engine has ended.

    The server itself is told only once its requests have ended or `--shutdown-timeout` is over;
    the engine's client lets go of its finalizer as soon as it is told. Some releases lack it.
    """
    client = getattr(state, "engine_client", None)
    finalizer = getattr(getattr(client, "engine_core", None), "_finalizer", None)
    should_exit = getattr(getattr(state, "server", None), "should_exit", False)
    is_told = should_exit or not getattr(finalizer, "alive", True)
    return bool(is_told or getattr(client, "errored", False))


def add_middleware(args: Any, engine_args: Any) -> None:
    """Add the feed to a server whose engine reports its load.

    Args:
        args: The server's arguments.
        engine_args: Those of its engine, with a scheduler of this package.
    """
    config = SolaConfig.from_additional(engine_args.additional_config)
    if config.load_interval_s is None:
        return
    if reason := _why_not(args, engine_args):
        logger.warning("sola_sched: no %s, although load_interval_s is set: %s", LOAD_PATH, reason)
        return
    server_args.add_middleware(args, MIDDLEWARE)


def _why_not(args: Any, engine_args: Any) -> str | None:
    """Why a server cannot tell its load, None if it can."""
    if getattr(engine_args, "disable_log_stats", False):
        return "--disable-log-stats is given"
    if getattr(engine_args, "data_parallel_size", 1) > 1:
        return "the server has several engines"
    if (getattr(args, "api_server_count", None) or 1) > 1:
        return "the server has several API processes"
    return None
