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
    #: Without these bytes nothing tells that a request was given up; to look for them is cheap.
    #: Within a text a quote follows a backslash.
    _abort_sign = b'"abort"'

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

    def is_aborted(self, event: bytes) -> bool:
        """Whether the server gives the request up with this event, as vLLM does when it ends."""
        return self._abort_sign in event and self._tells_of_abort(events.parse(event) or {})

    def is_aborted_whole(self, body: bytes) -> bool:
        """Whether the server has given the request up, by an answer in one piece."""
        return self._abort_sign in body and self._tells_of_abort(events.parse_data(body) or {})

    def _tells_of_abort(self, value: dict[str, Any]) -> bool:
        choices = value.get("choices")
        return isinstance(choices, list) and any(
            isinstance(each, dict) and each.get("finish_reason") == "abort" for each in choices
        )


class Messages(Protocol):
    """Anthropic's API."""

    endings = frozenset(("message_stop", "error"))
    _abort_sign = b'"message'

    def last_events(self, message: str, status: HTTPStatus, _: bytes) -> bytes:
        """See `Protocol`."""
        return events.write(anthropic_error(message, status), "error")

    def _tells_of_abort(self, value: dict[str, Any]) -> bool:
        """See `Protocol`; vLLM has no name for it here, and leaves the reason out."""
        kind, delta = value.get("type"), value.get("delta")
        if kind == "message_delta":
            return isinstance(delta, dict) and delta.get("stop_reason", "") is None
        return kind == "message" and value.get("stop_reason") is None


class Responses(Protocol):
    """OpenAI's newer API."""

    endings = frozenset(("response.completed", "response.failed", "response.incomplete", "error"))
    _abort_sign = b'"cancelled"'

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

    def _tells_of_abort(self, value: dict[str, Any]) -> bool:
        """See `Protocol`; vLLM says so of some models, and of others that it is complete."""
        response = value.get("response") if value.get("type") in self.endings else value
        return isinstance(response, dict) and response.get("status") == "cancelled"


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
