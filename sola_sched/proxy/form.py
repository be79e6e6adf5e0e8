"""Fields of a `multipart/form-data` body, found where they stand; files are not looked into.

A form passes only where every parser reads the same fields in it: what Python's `email`, Starlette
and others take in different ways, such as two names of one part, is refused. So is a form of more
parts than any real one has, as each costs time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

MULTIPART = "multipart/form-data"
#: All fields of a form of vLLM's are some forty; its server takes a thousand.
MOST_PARTS = 256
_LINE = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_LONGEST_HEAD = 2**13
_CHARSET = r"(?:\s*;\s*charset=\"?utf-8\"?)?"
_CONTENT_TYPE = re.compile(
    rf"{MULTIPART}{_CHARSET}\s*;\s*boundary=(\"?)([\w'()+,./:=?-]{{1,70}})\1{_CHARSET}\s*",
    re.ASCII | re.IGNORECASE,
)
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*)")
_DISPOSITION = b"content-disposition"
_NAMED = re.compile(rb'form-data[ \t]*;[ \t]*name=(?:"([^"\\]*)"|([\w.[\]-]+))[ \t]*(?:;.*)?', re.I)
#: What a parser may take for the name of a part, also within quotes.
_ANY_NAME = re.compile(rb";[^\w;=]*name[^\w;=]*[*=]", re.I)


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
    mark = b"--" + boundary_of(content_type)
    if not data.startswith(mark):
        raise ValueError("a form must begin with its boundary")
    num_parts = data.count(_LINE + mark)
    if num_parts > MOST_PARTS:
        raise ValueError(f"a form must have {MOST_PARTS} parts at most (it has {num_parts:,})")
    position = len(mark)
    while not data.startswith(b"--", position):
        head_end = data.find(_HEAD_END, position, position + _LONGEST_HEAD)
        end = data.find(_LINE + mark, position)
        if not 0 <= head_end <= end - len(_HEAD_END) or not data.startswith(_LINE, position):
            raise ValueError("each part of a form must have a head and an end")
        start = head_end + len(_HEAD_END)
        yield Field(_name_in(data[position + len(_LINE) : head_end]), start, end)
        position = end + len(_LINE + mark)


def boundary_of(content_type: str) -> bytes:
    """What stands between the parts.

    Raises:
        ValueError: The value of `Content-Type` names none, or more than that.
    """
    found = _CONTENT_TYPE.fullmatch(content_type)
    if found is None:
        raise ValueError(
            f"the Content-Type of a form must be '{MULTIPART}; boundary=...', with nothing else "
            f"but charset=utf-8 (it is {content_type[:100]!r})"
        )
    return found[2].encode()


def _name_in(head: bytes) -> str:
    headers = [_HEADER.fullmatch(line) for line in head.split(_LINE)]
    named = [h[2] for h in headers if h is not None and h[1].lower() == _DISPOSITION]
    found = _NAMED.fullmatch(named[0]) if len(named) == 1 and None not in headers else None
    if found is None or len(_ANY_NAME.findall(named[0])) != 1:
        raise ValueError(
            'each part of a form must have one name, as in Content-Disposition: form-data; name="n"'
        )
    return (found[1] or found[2] or b"").decode()


def value_of(data: bytes, content_type: str, name: str) -> bytes | None:
    """The value of a field; None where there is none.

    Raises:
        ValueError: The body is no form, or has the field twice.
    """
    field = _one(data, content_type, name)
    return None if field is None else data[field.start : field.end]


def with_value(data: bytes, content_type: str, name: str, value: bytes) -> bytes:
    """The body with another value of a field, or with the field.

    Raises:
        ValueError: The body is no form, or has the field twice.
    """
    field = _one(data, content_type, name)
    if field is not None:
        return b"".join((data[: field.start], value, data[field.end :]))
    head = f'Content-Disposition: form-data; name="{name}"'.encode()
    first = _LINE.join((b"--" + boundary_of(content_type), head, b"", value, b""))
    return first + data


def _one(data: bytes, content_type: str, name: str) -> Field | None:
    found = [field for field in fields(data, content_type) if field.name == name]
    if len(found) > 1:
        raise ValueError(f"a form must have {name!r} once (it has it {len(found)} times)")
    return found[0] if found else None
