"""A JSON object of which only a few values are looked at, however long it is.

Making Python objects of 16 MiB of JSON stops an event loop for seconds. Here the text stays as it
came. It is checked once, which takes a tenth of a second, and what is changed is written behind the
rest: of a name that comes twice, vLLM, as all of Python, takes the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

#: Bytes of a value that is made an object of without a thought; most of one that should be short.
LONGEST_VALUE = 2**16
#: Digits of a whole number that is made one: making one of thousands takes long.
_MOST_DIGITS = 100
#: Elements, at most, of a longer one that is: a text or an image has few, a list of ids many.
_FEW = 50_000
#: Values that a proxy looks at; looking at others makes objects of the whole.
_LOOKED_AT = (
    "background", "echo", "extra_args", "ignore_eos", "input", "max_completion_tokens",
    "max_tokens", "messages", "model", "previous_response_id", "prompt", "prompt_embeds",
    "return_token_ids", "sampling_params", "session_id", "stream", "token_ids", "vllm_xargs",
)  # fmt: skip
#: Of these, the ones that may be long.
_MAY_BE_LONG = frozenset(
    ("input", "messages", "prompt", "prompt_embeds", "sampling_params", "token_ids")
)
_ABSENT = msgspec.Raw()
_Texts = msgspec.defstruct(
    "_Texts", [(name, msgspec.Raw, msgspec.field(default=_ABSENT)) for name in _LOOKED_AT]
)
_DECODER = msgspec.json.Decoder(_Texts)


class JsonObject(Mapping[str, Any]):
    """A JSON object; behaves like the dictionary that `json.loads` makes.

    Args:
        data: Its text.

    Raises:
        ValueError: It is none in UTF-8, or has a long value where a short one belongs.
        RecursionError: It nests too deeply.
    """

    __slots__ = ("_changes", "_data", "_values", "_whole")

    def __init__(self, data: bytes) -> None:
        texts = _DECODER.decode(data)
        self._data = data
        self._changes: dict[str, Any] = {}
        self._whole: dict[str, Any] | None = None
        self._values: dict[str, Any] = {
            name: text for name in _LOOKED_AT if (text := getattr(texts, name)) is not _ABSENT
        }
        for name in self._values.keys() - _MAY_BE_LONG:
            text = self._values[name]
            if len(memoryview(text)) > LONGEST_VALUE:
                raise ValueError(f"{name!r} is longer than {LONGEST_VALUE} bytes")
            self._values[name] = json.loads(bytes(text))

    def __getitem__(self, name: str) -> Any:
        if name not in self._changes and name not in _LOOKED_AT:
            return self._all()[name]
        value = self._changes[name] if name in self._changes else self._values[name]
        if isinstance(value, JsonObject):
            return json.loads(value.encoded())
        if isinstance(value, msgspec.Raw):
            value = self._values[name] = json.loads(bytes(value), parse_int=_whole)
        return value

    def __contains__(self, name: object) -> bool:
        known = self._values if name in _LOOKED_AT else self._all()
        return name in self._changes or name in known

    def __bool__(self) -> bool:
        """True, also of an empty one: to count its names, objects would be made of the whole."""
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._all() | self._changes)

    def __len__(self) -> int:
        return len(self._all() | self._changes)

    def _all(self) -> dict[str, Any]:
        if self._whole is None:
            self._whole = json.loads(self._data)
        return self._whole

    def inner(self, name: str) -> Any:
        """A value that is looked at; of an object again only a few are."""
        if name in self._changes:
            return self._changes[name]
        value = self._values.get(name)
        if isinstance(value, msgspec.Raw) and bytes(value).startswith(b"{"):
            value = self._values[name] = JsonObject(bytes(value))
        return self.get(name) if isinstance(value, msgspec.Raw) else value

    def text(self, name: str) -> bytes | None:
        """The text of a value of which objects had better not be made; None for any other."""
        value = None if name in self._changes else self._values.get(name)
        if not isinstance(value, msgspec.Raw):
            return None
        text = bytes(value)
        is_short = len(text) <= LONGEST_VALUE or sum(map(text.count, (b",", b"[", b"{"))) <= _FEW
        return None if is_short else text

    def replaced(self, /, **values: Any) -> JsonObject:
        """The same with other values, none of them long."""
        other = object.__new__(JsonObject)
        other._data, other._values, other._whole = self._data, self._values, self._whole
        other._changes = self._changes | values
        return other

    def encoded(self) -> bytes:
        """Its text."""
        if not self._changes:
            return self._data
        before = self._data.rstrip()[:-1].rstrip()
        more = b",".join(
            b"%s:%s" % (json.dumps(name).encode(), _text(value))
            for name, value in self._changes.items()
        )
        return b"".join((before, b"" if before.endswith(b"{") else b",", more, b"}"))


def _whole(text: str) -> float:
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


def _text(value: Any) -> bytes:
    if isinstance(value, JsonObject):
        return value.encoded()
    return json.dumps(value, separators=(",", ":")).encode()


def replaced(value: Mapping[str, Any], /, **values: Any) -> Mapping[str, Any]:
    """The object with other values."""
    return value.replaced(**values) if isinstance(value, JsonObject) else {**value, **values}


def inner(value: Mapping[str, Any], name: str) -> Any:
    """A value of an object, see `JsonObject.inner`."""
    return value.inner(name) if isinstance(value, JsonObject) else value.get(name)


def encoded(value: Mapping[str, Any]) -> bytes:
    """The text of an object."""
    return value.encoded() if isinstance(value, JsonObject) else json.dumps(value).encode()
