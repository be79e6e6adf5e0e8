"""A byte stream is cut into the same events in whatever pieces it comes."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from sola_sched.serving.resuming.events import EventSplitter

PARTS = [b"data: a", b": ", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r\r", b"\r", b""]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.lists(st.integers(0, 60), max_size=8))
@example([b"data: a", b"\n\n", b"\n"], [])
@example([b"data: a", b"\n\n", b"data: a", b"\n\n"], [])
@example([b"data: a", b"\n\n", b"data: a", b"\n\n"], [9])
@example([b"\n\n", b"data: a", b"\n\n"], list(range(20)))
def test_pieces_make_no_difference(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    begins = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    whole, pieces = EventSplitter(), EventSplitter()

    expected = whole.feed(b"data: b" + data)
    found = pieces.feed(b"data: b")
    for begin, end in itertools.pairwise(begins):
        found += pieces.feed(data[begin:end])

    assert found == expected
    assert pieces.rest == whole.rest
    assert b"".join([*expected, whole.rest]) == b"data: b" + data


def test_an_event_ends_with_its_empty_line() -> None:
    assert EventSplitter().feed(b"data: a\n\n\ndata: b\n\n") == [b"data: a\n\n", b"\ndata: b\n\n"]
    assert EventSplitter().feed(b"data: a\n\n") == [b"data: a\n\n"]
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\n\n") == [b"data: a\n\n"]
    assert splitter.rest == b"\n"
