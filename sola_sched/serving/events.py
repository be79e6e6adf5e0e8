"""Server-sent events as vLLM writes them: `data: ` and JSON on one line, then an empty one."""

from __future__ import annotations

import json
import re
from typing import Any

DONE = b"data: [DONE]\n\n"
_PREFIX = b"data: "
#: The ids of tokens, as a key: in a string its quotes would follow a backslash.
_TOKEN_IDS = re.compile(rb'(?<=[{, ])"(prompt_token_ids|token_ids)": ?\[[\d, ]*\]')
_NO_IDS = rb'"\1":null'
_ERROR = re.compile(rb'data: ?\{\s*"error"')


class EventSplitter:
    """Cuts a byte stream into events; what is not whole yet is kept back."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now, each with the empty line that ends it."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return [event + b"\n\n" for event in events]


def without_token_ids(event: bytes) -> bytes:
    """The event as vLLM writes it when nobody has asked for token ids."""
    return _TOKEN_IDS.sub(_NO_IDS, event)


def is_error(event: bytes) -> bool:
    """Whether it tells of an error instead of tokens."""
    return _ERROR.match(event) is not None


def is_of_client(event: bytes) -> bool:
    """Whether an error is the request's own fault, so that another replica finds it too."""
    error = (parse(event) or {}).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return isinstance(code, int) and 400 <= code < 500


def parse(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None for any other event."""
    if not event.startswith(_PREFIX) or event == DONE:
        return None
    try:
        value = json.loads(event[len(_PREFIX) :])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write(value: dict[str, Any]) -> bytes:
    """An event of this object."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return _PREFIX + text.encode() + b"\n\n"
