"""The APIs that clients speak: how a stream of each ends, also where the rest of it is lost.

An error of the gateway looks like one of the server itself: the client's own package raises it.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from sola_sched.proxy.errors import anthropic_error, openai_error
from sola_sched.proxy.paths import RESPONSES
from sola_sched.serving.resuming import events
from sola_sched.serving.resuming.asked import without_query


class Protocol:
    """Completions, chats, and whatever has no form of its own."""

    #: Types of the last event of a stream; empty where an end is not told by an event's type.
    endings: frozenset[str] = frozenset()

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

    def is_error(self, event: bytes) -> bool:
        """Whether it tells of an error, where that is told by an event's type."""
        return "error" in self.endings and (events.parse(event) or {}).get("type") == "error"


class Messages(Protocol):
    """Anthropic's API."""

    endings = frozenset(("message_stop", "error"))

    def last_events(self, message: str, status: HTTPStatus, _: bytes) -> bytes:
        """See `Protocol`."""
        return events.write(anthropic_error(message, status), "error")


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


class Cohere(Protocol):
    """Cohere's second API, whose streams say how they ended in their last event but `[DONE]`."""

    endings = frozenset(("message-end",))

    def last_events(self, message: str, status: HTTPStatus, _: bytes) -> bytes:
        """See `Protocol`."""
        delta = {"error": message, "finish_reason": "ERROR"}
        return events.write({"type": "message-end", "delta": delta}) + events.DONE


_OTHERS = Protocol()
_BY_PATH = {"/cohere/v2/chat": Cohere(), "/v1/messages": Messages(), RESPONSES: Responses()}


def protocol_of(path: str) -> Protocol:
    """That of a path, which may have a query."""
    return _BY_PATH.get(without_query(path).rstrip("/"), _OTHERS)


def as_json(value: dict[str, Any]) -> bytes:
    """The body of an answer."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
