"""The APIs that clients speak: how each is told that its answer is lost, and how its streams end.

An error of the gateway looks like one of the server itself: the client's own package raises it.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from sola_sched.proxy.errors import openai_error
from sola_sched.serving import events
from sola_sched.serving.asked import without_query


class Protocol:
    """Completions, chats, and whatever has no form of its own."""

    #: Types of the last event of a stream; empty where an end is not told by an event's type.
    endings: frozenset[str] = frozenset()

    def whole(self, message: str, status: HTTPStatus) -> dict[str, Any]:
        """An answer that is an error."""
        return openai_error(message, status)

    def last_events(self, message: str, status: HTTPStatus, _: bytes) -> bytes:
        """The end of a stream that has begun and cannot go on.

        Args:
            message: Why.
            status: What its status would be.
            _: The last event that was sent.
        """
        return events.write(openai_error(message, status)) + events.DONE

    def is_end(self, event: bytes) -> bool:
        """Whether a stream is complete with this event."""
        return (events.parse(event) or {}).get("type") in self.endings


class Messages(Protocol):
    """Anthropic's API."""

    endings = frozenset(("message_stop", "error"))

    def whole(self, message: str, status: HTTPStatus) -> dict[str, Any]:
        """See `Protocol`."""
        is_busy = status == HTTPStatus.SERVICE_UNAVAILABLE
        kind = "overloaded_error" if is_busy else "api_error"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def last_events(self, message: str, status: HTTPStatus, _: bytes) -> bytes:
        """See `Protocol`."""
        return events.write(self.whole(message, status), "error")


class Responses(Protocol):
    """OpenAI's newer API."""

    endings = frozenset(("response.completed", "response.failed", "response.incomplete", "error"))

    def last_events(self, message: str, status: HTTPStatus, last: bytes) -> bytes:
        """See `Protocol`; the fields twice, as clients look for them in either place."""
        error = {"code": "server_error", "message": message, "param": None}
        number = (events.parse(last) or {}).get("sequence_number")
        event = {
            "type": "error",
            "sequence_number": number + 1 if isinstance(number, int) else 0,
            **error,
            "error": {"type": "server_error", **error},
        }
        return events.write(event, "error")


_OTHERS = Protocol()
_BY_PATH = {"/v1/messages": Messages(), "/v1/responses": Responses()}


def protocol_of(path: str) -> Protocol:
    """That of a path, which may have a query."""
    return _BY_PATH.get(without_query(path).rstrip("/"), _OTHERS)


def as_json(value: dict[str, Any]) -> bytes:
    """The body of an answer."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
