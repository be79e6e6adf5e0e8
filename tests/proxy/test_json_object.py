"""A JSON object that is looked at here and there, beside what `json` makes of the same text."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

pytest.importorskip("msgspec")

from hypothesis import example, given
from hypothesis import strategies as st

from sola_sched.proxy.json_object import JsonObject, encoded, replaced

_names = st.one_of(
    st.sampled_from(["prompt", "messages", "stream", "vllm_xargs", "model", "echo", "n"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
_objects = st.dictionaries(_names, _values, max_size=8)


@given(_objects, st.sampled_from([None, 1]), st.booleans())
def test_it_is_the_dictionary_that_json_makes(
    value: dict[str, Any], indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode()

    found = JsonObject(text)

    assert dict(found) == value
    assert all(name in found and found[name] == each for name, each in value.items())
    assert found.get("no such name") is None
    assert encoded(found) == text


@given(_objects, _objects)
@example({}, {"self": None, "value": 1})
def test_what_is_changed_is_changed_in_the_text_and_the_rest_is_as_it_was(
    value: dict[str, Any], changes: dict[str, Any]
) -> None:
    before = JsonObject(f" {json.dumps(value)}\n".encode())

    after = before.replaced(**changes)

    assert dict(after) == value | changes
    assert json.loads(encoded(after)) == value | changes
    assert json.loads(encoded(replaced(after, model="m"))) == value | changes | {"model": "m"}
    assert dict(before) == value


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[1]", b'{"a": 1', b'{"a": 1} x', b'{"a": NaN}', b'{"a": "\\ud800"}',
     b"\xef\xbb\xbf{}", '{"a": 1}'.encode("utf-16"), b'{"model": "\xff"}', b'{"a":01}'],
)  # fmt: skip
def test_what_is_no_object_in_utf_8_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the words are msgspec's
        JsonObject(text)


@pytest.mark.parametrize("depth", [2_000, 1_000_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(RecursionError):
        JsonObject(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


def test_a_long_value_where_a_short_one_belongs_is_refused() -> None:
    with pytest.raises(ValueError, match="'stream' is longer than"):
        JsonObject(b'{"stream": "' + b"x" * 2**17 + b'"}')


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt": [' + b"1," * 5_000_000 + b"1]}",
        b'{"a": [' + b"[]," * 5_000_000 + b"1]}",
        b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}",
        b'{"model": "m"' + b',"model":"m"' * 1_000_000 + b"}",
    ],
    ids=["numbers", "lists", "names", "one name again and again"],
)
def test_long_texts_hold_nobody_up(text: bytes) -> None:
    began_s = time.process_time()
    found = JsonObject(text)
    encoded(found.replaced(vllm_xargs={}))

    # A tenth of a second where nothing else runs; `json` takes up to seven seconds.
    assert time.process_time() - began_s < 1.0


def test_ids_by_the_million_stay_text_and_a_long_text_or_a_short_list_need_not() -> None:
    assert JsonObject(b'{"prompt": [' + b"1," * 100_000 + b"1]}").text("prompt") is not None
    assert JsonObject(b'{"prompt": "' + b"x" * 10**6 + b'"}').text("prompt") is None
    assert JsonObject(b'{"prompt": [1, 2]}').text("prompt") is None
    assert JsonObject(b"{}").text("prompt") is None


def test_numbers_of_thousands_of_digits_cost_little() -> None:
    text = b'{"messages": ["a"' + (b"," + b"9" * 4299) * 3000 + b"]}"
    begin_s = time.process_time()

    found = JsonObject(text)["messages"]

    assert (found[:2], time.process_time() - begin_s < 0.2) == (["a", math.inf], True)


def test_an_object_within_is_looked_at_as_one_and_read_as_all_others() -> None:
    text = b'{"sampling_params": {"a": [1, 2], "max_tokens": 3}, "x": 1}'
    body = JsonObject(text)

    found = body.inner("sampling_params")
    other = body.replaced(sampling_params=found.replaced(extra_args={"b": 1}))

    assert (found["max_tokens"], found["a"]) == (3, [1, 2])
    assert dict(body) == json.loads(text)
    assert dict(other) == {"sampling_params": {**found, "extra_args": {"b": 1}}, "x": 1}
    assert json.loads(other.encoded()) == dict(other)
    assert JsonObject(b'{"sampling_params": [1]}').inner("sampling_params") == [1]
    assert JsonObject(b"{}").inner("sampling_params") is None
