"""A byte stream is cut into the same events in whatever pieces it comes."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

from multidict import CIMultiDict

from sola_sched.serving.answering.outgoing import Outgoing
from sola_sched.serving.call import Call
from sola_sched.serving.resuming.asked import Asked
from sola_sched.serving.resuming.events import EventSplitter, parse, without_token_ids
from sola_sched.serving.resuming.plans import replay

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


def test_ids_are_left_out_wherever_they_stand() -> None:
    event = (
        b'data: {"token_ids":[1,2],"text":"\\"token_ids\\":[3]", "prompt_token_ids": [4, 5]}\n\n'
    )

    assert without_token_ids(event) == (
        b'data: {"token_ids":null,"text":"\\"token_ids\\":[3]", "prompt_token_ids":null}\n\n'
    )


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_long_events_hold_nobody_up(end: bytes) -> None:
    event = b'data: {"text":"' + b"a" * 40_000_000 + b'"}' + end
    splitter = EventSplitter()
    began_s = time.process_time()

    found = [
        each for i in range(0, len(event), 2**16) for each in splitter.feed(event[i : i + 2**16])
    ]
    changed = without_token_ids(found[0])

    # Some hundredths of a second where nothing else runs.
    assert time.process_time() - began_s < 0.4
    assert [changed] == found == [event]


def _told(num_events: int) -> Outgoing:
    """A stream of which so many tokens were sent."""
    body = {"stream": True, "prompt": "p"}
    call = Call("POST", "/v1/completions", CIMultiDict(), b"", body, "r", 0.0)
    outgoing = Outgoing(call, None)  # type: ignore[arg-type]
    for number in range(num_events):
        choice = {"index": 0, "text": f"{number} ", "token_ids": [number]}
        event = {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}
        outgoing.taken([b"data: " + json.dumps(event).encode() + b"\n\n"])
    return outgoing


def test_a_long_stream_that_has_to_go_on_elsewhere_holds_nobody_up() -> None:
    outgoing = _told(50_000)
    began_s = time.process_time()

    sent = outgoing.sent()

    # Half a second if all events were read now, and as long for each stream of a lost replica.
    assert time.process_time() - began_s < 0.1
    assert sent.choices[0].token_ids == list(range(50_000))
    assert sent.choices[0].texts == {"text": "".join(f"{number} " for number in range(50_000))}


def test_the_lengths_of_a_stream_are_known_whatever_was_read_of_it() -> None:
    for num_events in (1, 3, 5_000):
        assert _told(num_events).lengths()[1] == pytest.approx(num_events, abs=1)


def test_events_with_numbers_that_json_does_not_have_are_read_as_python_reads_them() -> None:
    found = parse(b'data: {"logprob": -Infinity, "a": "\\ud800"}\n\n')

    assert found == {"logprob": float("-inf"), "a": "\ud800"}
    assert parse(b"data: [1]\n\n") is None
    assert parse(b"data: {\n\n") is None


def _event_of(index: int, text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": index, "text": text, "token_ids": [7], "finish_reason": finish_reason}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}).encode() + b"\n\n"


def test_a_long_repetition_goes_on_also_with_choices_of_which_nothing_had_been_sent() -> None:
    body = {"stream": True, "prompt": "p", "n": 2, "seed": 1}
    call = Call("POST", "/v1/completions", CIMultiDict(), b"", body, "r", 0.0)
    outgoing = Outgoing(call, None)  # type: ignore[arg-type]
    answer = [_event_of(index, f"{i} ") for i in range(1000) for index in (0, 1)]
    answer += [_event_of(index, "", "length") for index in (0, 1)]
    got = outgoing.taken(answer[:1]).data
    outgoing.rewrite = replay(Asked("/v1/completions", body), outgoing.sent()).rewrite

    for event in answer:
        got += outgoing.taken([event]).data

    told: dict[int, str] = {0: "", 1: ""}
    for event in got.split(b"\n\n")[:-1]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            told[choice["index"]] += choice["text"]
    whole = "".join(f"{i} " for i in range(1000))
    assert told == {0: whole, 1: whole}
    assert got.count(b'"length"') == 2
