"""Fields of forms, as clients' libraries write them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.proxy.form import MOST_PARTS, fields, value_of, with_value

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

    other = with_value(data, kind, "vllm_xargs", b"[8]")
    more = with_value(data, kind, "none", b"new")

    assert (value_of(data, kind, "model"), value_of(other, kind, "model")) == (b"m", b"m")
    assert value_of(other, kind, "vllm_xargs") == b"[8]"
    assert value_of(other, kind, "none") is None
    assert value_of(other, kind, "file") == b"RIFF\0\r\n--"
    assert (value_of(more, kind, "none"), more.endswith(data)) == (b"new", True)
    assert [field.name for field in fields(more, kind)] == ["none", "file", "model", "vllm_xargs"]


KIND = "multipart/form-data; boundary=x"


def part(name: str, *more: str, value: str = "1") -> bytes:
    """A part with further lines in its head."""
    lines = (f'Content-Disposition: form-data; name="{name}"', *more)
    return "".join(["--x\r\n", *(f"{line}\r\n" for line in lines), f"\r\n{value}\r\n"]).encode()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"--x\r\n\r\n\r\n--x--", "multipart/form-data"),
        (b"", "multipart/form-data; boundary=x"),
        (b"nothing", "multipart/form-data; boundary=x"),
        (b"--x\r\nno end", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nno end of the form\r\n--x", "multipart/form-data; boundary=x"),
        (b"before it\r\n" + part("a") + b"--x--", KIND),
        (part("a") + b"--xy\r\n" + part("b") + b"--x--", KIND),
        (part("a") * (MOST_PARTS + 1) + b"--x--", KIND),
    ],
)
def test_what_is_no_form_is_refused(data: bytes, kind: str) -> None:
    with pytest.raises(ValueError, match="must"):
        list(fields(data, kind))


#: Heads of parts that parsers read in different ways, or that raise in Python's `email`.
_ODD = [
    'Content-Disposition: form-data; name="a"\r\nContent-Disposition: form-data; name="b"',
    'Content-Disposition: form-data; name="a"; name="b"',
    'Content-Disposition: form-data; name="a"; filename="\\\\"; name="b"; x="\\""',
    'Content-Disposition: form-data; name="a"; name*=b',
    "Content-Disposition: form-data; name*=utf-8''a",
    "Content-Disposition: form-data; name*=x; name*0=y",
    "Content-Disposition: form-data; name*=none''%ff",
    'Content-Disposition: form-data; filename="f"',
    'Content-Disposition: attachment; name="a"',
    'Content-Disposition: form-data;\r\n name="a"',
    'Content-Disposition : form-data; name="a"',
    'Content-Disposition: form-data; name="a\\"b"',
    'Content-Disposition: form-data; name="a',
    "Content-Type: text/plain",
    'Content-Disposition: form-data; name="a"\nX: y',
]


@pytest.mark.parametrize("head", _ODD)
def test_a_part_that_may_have_another_name_elsewhere_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match="must have one name"):
        list(fields(f"--x\r\n{head}\r\n\r\n1\r\n--x--".encode(), KIND))


@pytest.mark.parametrize(
    "kind",
    ["multipart/form-data", f"{KIND}; boundary=y", f"{KIND}; boundary*=y",
     f"{KIND}; charset=utf-16",
     "multipart/form-data; charset=utf-7; boundary=x", "multipart/form-datax; boundary=x",
     'multipart/form-data; a="; boundary=x', "multipart/form-data; boundary="],
)  # fmt: skip
def test_a_form_has_one_boundary_and_is_in_utf_8(kind: str) -> None:
    with pytest.raises(ValueError, match="the Content-Type of a form must be"):
        list(fields(part("a") + b"--x--", kind))


@pytest.mark.parametrize(
    "kind",
    ["multipart/form-data;boundary=x", 'Multipart/Form-Data; Boundary="x"',
     f"{KIND}; charset=UTF-8", 'multipart/form-data; charset="utf-8"; boundary=x'],
)  # fmt: skip
@pytest.mark.parametrize(
    "rest",
    [
        "",
        '; filename="a.wav"',
        '; filename="a;b \\" c.wav"; filename*=UTF-8\'\'%c3%a4.wav',
        "; size=5",
    ],
)
def test_what_clients_write_is_taken(kind: str, rest: str) -> None:
    heads = (f'form-data; name="a"{rest}', f"form-data; name=a{rest}")
    data = b"".join(
        f"--x\r\ncontent-disposition: {head}\r\nContent-Type: audio/wav\r\n\r\n\xe4\r\n".encode()
        for head in heads
    )

    found = [(field.name, data[field.start : field.end]) for field in fields(data + b"--x--", kind)]

    assert found == [("a", "\xe4".encode())] * 2


def test_a_field_that_is_there_twice_is_refused_where_it_counts() -> None:
    with pytest.raises(ValueError, match="must have 'a' once"):
        value_of(part("a") + part("a") + b"--x--", KIND, "a")


def test_as_many_parts_as_are_taken_cost_little() -> None:
    longest = part("a", *("X-Some: " + "; name" * 600,) * 2)
    data = longest * (MOST_PARTS - 1) + part("a", value="\r\n-" * 2**22) + b"--x--"

    begin_s = time.process_time()
    num = len(list(fields(data, KIND)))

    assert (num, time.process_time() - begin_s < 0.25) == (MOST_PARTS, True)


_PIECES = st.sampled_from([
    b"\r\n--x\r\n", b"\r\n--x\r\n", b"\r\n--x", b"\r\n", b"\r\n\r\n", b"\r\n\r\n", b"--", b"-",
    b"x", b"\n", b"\r", b" ", b"\t", b";", b"--x", part("h").removesuffix(b"1\r\n"),
    b'Content-Disposition: form-data; name="a"', b'Content-Disposition: form-data; name="b"',
    b"Content-Disposition: form-data; name=c", b'; name="d"', b"; name*=e", b'; filename="f"', b'"',
    b"\\", b"Content-Type: text/plain", b"=", b":", b"1", b"\xa0", part("g"),
])  # fmt: skip


@settings(max_examples=1500)
@given(st.lists(_PIECES, max_size=16).map(b"".join), st.booleans())
def test_what_is_taken_is_what_the_server_reads(middle: bytes, is_ended: bool) -> None:
    starlette = pytest.importorskip("starlette.formparsers")
    pytest.importorskip("python_multipart")
    headers = pytest.importorskip("starlette.datastructures").Headers({"content-type": KIND})
    data = part("first") + middle + b"\r\n--x--" * is_ended
    try:
        taken = [(field.name, data[field.start : field.end]) for field in fields(data, KIND)]
    except ValueError:
        return

    async def read() -> list[tuple[str, bytes]]:
        async def stream() -> AsyncIterator[bytes]:
            yield data

        form = await starlette.MultiPartParser(headers, stream()).parse()
        return [
            (name, value.encode(errors="replace") if isinstance(value, str) else await value.read())
            for name, value in form.multi_items()
        ]

    found = asyncio.run(read())

    assert [name for name, _ in found] == [name for name, _ in taken]
    assert [v for _, v in found if b"\xa0" not in data] == [
        v for _, v in taken if b"\xa0" not in data
    ]
