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
#: What Anthropic's API calls them; others are `invalid_request_error` or `api_error`.
_ANTHROPIC_KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
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


def error_body(path: str, message: str, status: HTTPStatus) -> dict[str, Any]:
    """An error as the API writes it that a path belongs to, so that its clients' packages read it.

    Args:
        path: May have a query.
    """
    path = path.partition("?")[0].rstrip("/") + "/"
    if path.startswith("/v1/messages/"):
        return anthropic_error(message, status)
    if path.startswith("/cohere/"):
        return {"message": message}
    return openai_error(message, status)


def openai_error(message: str, status: HTTPStatus) -> dict[str, Any]:
    """An error as vLLM writes them."""
    kind = _KINDS.get(status, "ServiceUnavailableError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status.value}}


def anthropic_error(message: str, status: HTTPStatus) -> dict[str, Any]:
    """An error of Anthropic's API."""
    kind = _ANTHROPIC_KINDS.get(status)
    if kind is None:
        is_client = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
        kind = "invalid_request_error" if is_client else "api_error"
    return {"type": "error", "error": {"type": kind, "message": message}}
