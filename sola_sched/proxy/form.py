"""Fields of a `multipart/form-data` body, found where they stand; files are not looked into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from email.parser import BytesHeaderParser
from typing import NamedTuple

MULTIPART = "multipart/form-data"
_LINE = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_LONGEST_HEAD = 2**14


class Field(NamedTuple):
    """One field.

    Attributes:
        name: As its head says.
        start, end: Where its value stands in the body.
    """

    name: str
    start: int
    end: int


def is_form(headers: Mapping[str, str]) -> bool:
    """Whether the body of a request is a form."""
    return headers.get("Content-Type", "").lower().startswith(MULTIPART)


def fields(data: bytes, content_type: str) -> Iterator[Field]:
    """All fields.

    Raises:
        ValueError: The body is no such form.
    """
    kind = Message()
    kind["Content-Type"] = content_type
    boundary = kind.get_boundary()
    if not boundary:
        raise ValueError("its Content-Type must name a boundary")
    mark = b"--" + boundary.encode("latin-1")
    position = 0 if data.startswith(mark) else data.find(_LINE + mark) + len(_LINE)
    if not data.startswith(mark, position):
        raise ValueError("its boundary must occur in it")
    while not data.startswith(b"--", position + len(mark)):
        head_end = data.find(_HEAD_END, position, position + _LONGEST_HEAD)
        end = data.find(_LINE + mark, position + len(mark))
        if not 0 <= head_end < end + len(_HEAD_END):
            raise ValueError("each of its parts must have a head and an end")
        head = BytesHeaderParser().parsebytes(data[position + len(mark) + len(_LINE) : head_end])
        name = head.get_param("name", header="Content-Disposition")
        start = min(head_end + len(_HEAD_END), end)
        yield Field(name if isinstance(name, str) else "", start, end)
        position = end + len(_LINE)


def value_of(data: bytes, content_type: str, name: str) -> str | None:
    """The last value of a field; None where there is none.

    Raises:
        ValueError: The body is no form, or the value no text.
    """
    found = [each for each in fields(data, content_type) if each.name == name]
    return data[found[-1].start : found[-1].end].decode() if found else None


def changed(data: bytes, content_type: str, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """The body with another value for each field of a name.

    Raises:
        ValueError: The body is no form.
    """
    parts, position = [], 0
    for field in fields(data, content_type):
        if field.name == name:
            parts += [data[position : field.start], change(data[field.start : field.end])]
            position = field.end
    return b"".join([*parts, data[position:]])
