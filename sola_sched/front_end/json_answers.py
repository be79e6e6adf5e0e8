"""JSON answers of the middlewares that answer paths of ours."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


async def send_json(send: Send, status: HTTPStatus, body: Any) -> None:
    """Answer a request wholly.

    Args:
        send: ASGI's.
        status, body: Of the answer.
    """
    text = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(text)).encode()),
    ]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": text})
