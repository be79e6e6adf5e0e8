"""Targets that a client sends where nothing reads them: said once in the log of vLLM's server.

SLO headers are read by a gateway, or by a middleware that an operator adds. Keys at the top of a
request's body, where clients' `extra_body` puts them, vLLM ignores. Requests are answered as they
would be without this, and no byte of them is changed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from vllm.logger import init_logger

from sola_sched.config.slo import GATEWAY_KEYS, meant_keys
from sola_sched.front_end import server_args
from sola_sched.front_end.json_answers import Message, Send

#: The middleware that reads headers.
READS_HEADERS = "sola_sched.serving.slo_middleware.SloHeaders"
_HEADER = re.compile(rb"x-(llm-d-)?slo-[a-z0-9-]+|x-gateway-inference-objective")
#: Of a body: longer ones are not looked at.
_LONGEST = 65_536
#: Seconds between two bodies that are read.
_PAUSE_S = 1.0
#: Clients choose what is told.
_MOST_TOLD = 20

logger = init_logger("vllm.sola_sched")

_Receive = Callable[[], Awaitable[Message]]


class HintsMiddleware:
    """Looks at requests as they pass.

    Args:
        app: The ASGI application.
    """

    reads_headers = False

    def __init__(self, app: Any) -> None:
        self.app = app
        self._told: set[str] = set()
        self._looks_again_s = 0.0

    async def __call__(self, scope: Any, receive: _Receive, send: Send) -> None:
        """Pass one connection on."""
        if scope["type"] == "http" and scope["method"] == "POST":
            self._look_at_headers(scope)
            if time.monotonic() >= self._looks_again_s:
                receive = self._looking(receive)
        await self.app(scope, receive, send)

    def _looking(self, receive: _Receive) -> _Receive:
        async def looking() -> Message:
            message = await receive()
            body = message.get("body", b"")
            if b"slo" in body and len(body) <= _LONGEST and not message.get("more_body"):
                self._look_at_body(body)
            return message

        return looking

    def _look_at_headers(self, scope: Any) -> None:
        for name, _ in scope["headers"]:
            if not self.reads_headers and _HEADER.fullmatch(name.lower()):
                shown = name.lower().decode()
                self._tell(
                    f"nothing reads the header '{shown}': start the server with "
                    f"`--middleware {READS_HEADERS}`, or send 'vllm_xargs' in the body"
                )

    def _look_at_body(self, body: bytes) -> None:
        self._looks_again_s = time.monotonic() + _PAUSE_S
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return
        for key, meant in meant_keys(content if isinstance(content, dict) else ()):
            if meant not in GATEWAY_KEYS:
                self._tell(
                    f"nothing reads {key!r} at the top of a request: write "
                    f'"vllm_xargs": {{"{meant}": ...}} in the body'
                )

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(text)
            logger.warning("sola_sched: %s. This is said once.", text)


class HintsBesideHeaders(HintsMiddleware):
    """The same on a server whose headers are read."""

    reads_headers = True


def add_middleware(args: Any) -> None:
    """Add this to a server whose engine has a scheduler of this package.

    Args:
        args: The server's arguments.
    """
    has_reader = READS_HEADERS in (getattr(args, "middleware", None) or ())
    kind = HintsBesideHeaders if has_reader else HintsMiddleware
    server_args.add_middleware(args, f"{kind.__module__}.{kind.__name__}")
