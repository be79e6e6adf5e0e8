"""Fields of forms, as clients' libraries write them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.proxy.form import changed, fields, value_of

_VALUES = st.one_of(
    st.binary(max_size=60), st.sampled_from([b"--", b"\r\n", b"\r\n--", b"--boundary\r\n", b""])
)


async def _written(parts: list[tuple[str, Any]]) -> tuple[bytes, str]:
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in parts:
        if isinstance(value, bytes):
            form.add_field(name, value, filename="a.wav", content_type="audio/wav")
        else:
            form.add_field(name, value)
    payload = form()
    return await payload.as_bytes(), payload.headers["Content-Type"]


def written(*parts: tuple[str, Any]) -> tuple[bytes, str]:
    """A body and its Content-Type."""
    return asyncio.run(_written(list(parts)))


@given(st.lists(st.tuples(st.sampled_from(["file", "model", "n"]), _VALUES), min_size=1))
def test_every_field_is_found_with_its_value(parts: list[tuple[str, bytes]]) -> None:
    data, kind = written(*parts)

    found = [(field.name, data[field.start : field.end]) for field in fields(data, kind)]

    assert found == parts


def test_a_value_is_found_and_changed_and_the_rest_is_as_it_was() -> None:
    data, kind = written(("file", b"RIFF\0\r\n--"), ("model", "m"), ("vllm_xargs", '{"a": 1}'))

    other = changed(data, kind, "vllm_xargs", lambda value: json.dumps([len(value)]).encode())

    assert (value_of(data, kind, "model"), value_of(other, kind, "model")) == ("m", "m")
    assert value_of(other, kind, "vllm_xargs") == "[8]"
    assert value_of(other, kind, "none") is None
    assert [other[f.start : f.end] for f in fields(other, kind) if f.name == "file"] == [
        b"RIFF\0\r\n--"
    ]
    assert changed(data, kind, "none", lambda _: b"") == data


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"--x\r\n\r\n\r\n--x--", "multipart/form-data"),
        (b"", "multipart/form-data; boundary=x"),
        (b"nothing", "multipart/form-data; boundary=x"),
        (b"--x\r\nno end", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nno end of the form\r\n--x", "multipart/form-data; boundary=x"),
    ],
)
def test_what_is_no_form_is_refused(data: bytes, kind: str) -> None:
    with pytest.raises(ValueError, match="must"):
        list(fields(data, kind))
