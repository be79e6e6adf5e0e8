"""SLO headers in front of a vLLM server that has no gateway of ours before it.

`vllm serve MODEL --middleware sola_sched.serving.slo_middleware.SloHeaders`, for instance behind
llm-d's router or Ray Serve's own proxy. Requests without such a header pass untouched.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sola_sched.errors import SloError
from sola_sched.serving.slo_headers import SLO_HEADERS, with_slo_headers

_Message = MutableMapping[str, Any]


class SloHeaders:
    """Writes headers' targets into the body; a wrong one gets HTTP 400.

    Args:
        app: The ASGI application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(
        self,
        scope: Any,
        receive: Callable[[], Awaitable[_Message]],
        send: Callable[[_Message], Awaitable[None]],
    ) -> None:
        """Answer one connection."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        if not SLO_HEADERS & headers.keys():
            await self.app(scope, receive, send)
            return
        pieces: list[bytes] = []
        while True:
            message = await receive()
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        data = b"".join(pieces)
        try:
            body = json.loads(data)
            if isinstance(body, dict):
                data = json.dumps(with_slo_headers(body, headers, scope["path"])).encode()
        except SloError as error:
            await _refuse(send, str(error))
            return
        except (ValueError, RecursionError):  # the server refuses it
            pass
        kept = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
        scope = {**scope, "headers": [*kept, (b"content-length", str(len(data)).encode())]}
        given = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def again() -> _Message:
            return next(given, None) or await receive()

        await self.app(scope, again, send)


async def _refuse(send: Callable[[_Message], Awaitable[None]], message: str) -> None:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    text = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": text})
