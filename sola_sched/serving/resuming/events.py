"""Server-sent events: cut out of a byte stream, read, and written as vLLM writes them."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
#: How vLLM begins a chunk of a completion or a chat; neither an error nor an end does.
CHUNK = b'data: {"id":'
_PREFIX = b"data: "
#: An empty line ends an event; lines may end in each of three ways. Patterns that begin with one
#: certain byte are searched for many times as fast as others.
_EMPTY_LINE = re.compile(rb"\n\r?\n")
_EMPTY_LINE_OF_RETURNS = b"\r\r"
_LINE = re.compile(rb"\r\n|\n|\r")
#: The ids of tokens, as a key: in a string its quotes would follow a backslash.
_TOKEN_IDS = re.compile(rb'"(?<=[{, ]")(prompt_token_ids|token_ids)": ?\[[\d, ]*\]')
_NO_IDS = rb'"\1":null'
_DECODER = msgspec.json.Decoder()
_ERROR = re.compile(rb'(?:event: ?error\r?\n)?data: ?\{\s*"error"')


class EventSplitter:
    """Cuts a byte stream into events; what is not whole yet is kept back."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._tail = b""  # of what is kept, where an end may have begun

    @property
    def rest(self) -> bytes:
        """The part of an event that is kept back."""
        return b"".join(self._kept)

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now, each with the empty line that ends it."""
        is_one = data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2
        if is_one and not self._kept and b"\r" not in data:
            return [data]  # as vLLM writes one
        if data and _end(self._tail + data, 0) is None:
            self._kept.append(data)
            self._tail = (self._tail + data)[-2:]
            return []
        data = b"".join((*self._kept, data))
        events, begin = [], 0
        while (end := _end(data, begin)) is not None:
            events.append(data[begin:end])
            begin = end
        self._kept = [data[begin:]] if begin < len(data) else []
        self._tail = data[begin:][-2:]
        return events


def _end(data: bytes, begin: int) -> int | None:
    """Where the event that begins there ends; None if its end is not there."""
    found = _EMPTY_LINE.search(data, begin)
    most = len(data) if found is None else found.start()
    returns = data.find(_EMPTY_LINE_OF_RETURNS, begin, most)
    if returns >= 0:
        return returns + len(_EMPTY_LINE_OF_RETURNS)
    return None if found is None else found.end()


def data_of(event: bytes) -> bytes:
    """The data of an event, its lines joined; empty for a comment."""
    if event.startswith(_PREFIX) and event.count(b"\n") == 2 and event.endswith(b"\n\n"):
        return event[len(_PREFIX) : -2]
    lines = [line[5:] for line in _LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def is_done(event: bytes) -> bool:
    """Whether it is the end of a stream of completions."""
    return event == DONE or (b"[DONE]" in event and data_of(event) == b"[DONE]")


def is_comment(event: bytes) -> bool:
    """Whether it says nothing of the answer."""
    return event.startswith(b":") and not data_of(event)


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
    return parse_data(data_of(event))


def parse_data(data: bytes) -> dict[str, Any] | None:
    """The JSON object that this is; None if it is none."""
    try:
        value = _DECODER.decode(data)
    except (ValueError, RecursionError):  # it may be what `json` reads, as an infinite number
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def write(value: dict[str, Any], name: str | None = None) -> bytes:
    """An event of this object, with a name if it has one."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    named = b"" if name is None else b"event: " + name.encode() + b"\n"
    return named + _PREFIX + text.encode() + b"\n\n"
