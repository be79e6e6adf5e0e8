"""What a client is told when its request goes no further."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

#: What vLLM calls errors by their status; others are `ServiceUnavailableError`.
_KINDS = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "BadRequestError",
    HTTPStatus.REQUEST_TIMEOUT: "BadRequestError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "BadRequestError",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "BadRequestError",
}


class RefusedError(Exception):
    """A request is answered with an error.

    Args:
        status: Of HTTP.
        message: What must hold, what was given, what to do.
        headers: Of the answer.
    """

    def __init__(
        self, status: HTTPStatus, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


def openai_error(message: str, status: HTTPStatus) -> dict[str, Any]:
    """An error as vLLM writes them."""
    kind = _KINDS.get(status, "ServiceUnavailableError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status.value}}
