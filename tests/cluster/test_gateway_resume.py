"""Streams whose replica is lost go on elsewhere: continued from their tokens, or repeated."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("aiohttp")

import fake_replica
from aiohttp import web
from fake_replica import FakeReplica, _Events, output_of
from gateway_clients import Client, run

from sola_sched.serving.resuming import events
from sola_sched.serving.resuming.asked import Asked
from sola_sched.serving.resuming.plans import replay
from sola_sched.serving.resuming.transcript import Transcript

WHOLE = output_of("hello", 12)


@pytest.fixture(autouse=True, params=["when it is lost", "as it goes"])
def when_a_stream_is_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short streams are read when they are lost, of long ones most as they go."""
    if request.param == "as it goes":
        monkeypatch.setattr("sola_sched.serving.answering.outgoing._MOST_UNREAD", 0)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0}, {}])
def test_a_stream_whose_replica_dies_goes_on_elsewhere_from_its_tokens(options: dict) -> None:
    dying, other = FakeReplica(die_after=5), FakeReplica()

    async def test(client: Client) -> None:
        got = await client.complete(**options)

        assert (got.text, got.is_ended) == (WHOLE, True)
        assert {chunk["id"] for chunk in got.chunks} == {got.chunks[0]["id"]}
        assert client.gateway.counts["continued"] == 1
        (rest,) = other.bodies
        assert rest["prompt"] == [ord(x) for x in "hello" + WHOLE[:5]]
        assert rest["max_tokens"] == 7

    run(test, dying, other)


def test_a_chat_goes_on_as_a_completion_and_stays_a_chat() -> None:
    async def test(client: Client) -> None:
        got = await client.post(
            {
                "messages": [{"role": "user", "content": "hello"}],
                "max_completion_tokens": 12,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            "/v1/chat/completions",
        )

        assert (got.text, got.is_ended) == (WHOLE, True)
        *parts, usage = got.chunks
        assert {chunk["object"] for chunk in got.chunks} == {"chat.completion.chunk"}
        assert [part["choices"][0]["delta"].get("role") for part in parts].count("assistant") == 1
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["usage"] == {
            "prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17
        }  # fmt: skip

    run(test, FakeReplica(cut_after=5), FakeReplica())


@pytest.mark.parametrize("per_event", [1, 4])
@pytest.mark.parametrize("extra", [{"stop": ["zz"]}, {"presence_penalty": 0.5}, {"echo": False}])
def test_what_more_than_tokens_decides_is_repeated_and_what_was_sent_is_left_out(
    extra: dict, per_event: int
) -> None:
    dying, other = FakeReplica(cut_after=5), FakeReplica(per_event=per_event)

    async def test(client: Client) -> None:
        got = await client.complete(temperature=0, return_token_ids=True, **extra)

        ids = [i for chunk in got.chunks for i in chunk["choices"][0]["token_ids"]]
        assert (got.text, got.is_ended) == (WHOLE, True)
        assert "".join(map(chr, ids)) == WHOLE
        is_replay = "echo" not in extra
        assert client.gateway.counts["replayed" if is_replay else "continued"] == 1

    run(test, dying, other)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "reason"),
    [("another", 12, "could not be repeated"), ("hello", 3, "text ended before")],
)
def test_a_repetition_that_comes_out_otherwise_ends_with_an_error(
    prompt: str, num_tokens: int, reason: str
) -> None:
    class Other(FakeReplica):
        async def _stream(self, request, body, _, __, is_chat):  # type: ignore[no-untyped-def]
            return await super()._stream(request, body, prompt, num_tokens, is_chat)

    async def test(client: Client) -> None:
        got = await client.complete(temperature=0, stop=["zz"])

        assert got.text == WHOLE[:5]
        assert reason in got.chunks[-1]["error"]["message"]

    run(test, FakeReplica(cut_after=5), Other())


@pytest.mark.parametrize("state", [{"bad_words": ["no"]}, {"repetition_detection": {"x": 1}}])
def test_what_looks_back_at_the_output_is_repeated(state: dict) -> None:
    async def test(client: Client) -> None:
        got = await client.complete(temperature=0, **state)

        assert (got.text, got.is_ended) == (WHOLE, True)
        assert client.gateway.counts["replayed"] == 1

    run(test, FakeReplica(cut_after=5), FakeReplica())


def test_log_probabilities_of_tokens_that_were_sent_are_left_out_of_a_repetition() -> None:
    def event(text: str) -> bytes:
        ids = [ord(letter) for letter in text]
        choice = {
            "index": 0,
            "text": text,
            "token_ids": ids,
            "logprobs": {"tokens": list(text), "token_logprobs": [-float(i) for i in ids]},
            "finish_reason": None,
        }
        return events.write({"id": "x", "choices": [choice], "usage": {"total_tokens": 1}})

    body = {"temperature": 0, "stop": ["zz"], "logprobs": 1, "stream": True}
    asked = Asked("/v1/completions", body)
    plan = replay(asked, Transcript.of([event("ab"), event("c")]))

    out = [plan.rewrite.feed(event(text)) for text in ("ab", "cde")]

    assert out[0] == b""  # nothing is new, the usage so far neither
    (choice,) = json.loads(out[1].removeprefix(b"data: "))["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("de", ["d", "e"])
    assert choice["logprobs"]["token_logprobs"] == [-float(ord("d")), -float(ord("e"))]


def test_a_sampled_stream_with_state_beside_its_tokens_ends_with_an_error_that_says_why() -> None:
    async def test(client: Client) -> None:
        got = await client.complete(temperature=1.0, stop=["zz"])

        assert got.text == WHOLE[:5]
        assert got.is_ended
        assert "'seed'" in got.chunks[-1]["error"]["message"]

    run(test, FakeReplica(cut_after=5), FakeReplica())


def test_a_stream_cut_between_its_last_token_and_its_end_is_ended_without_a_replica() -> None:
    other = FakeReplica()

    async def test(client: Client) -> None:
        got = await client.complete(stream_options={"include_usage": True})

        assert (got.text, got.is_ended) == (WHOLE, True)
        assert got.chunks[-1]["usage"]["completion_tokens"] == 12
        assert other.bodies == []

    run(test, FakeReplica(cut_after=12), other)


def test_a_stream_may_lose_one_replica_after_the_other() -> None:
    fakes = [FakeReplica(cut_after=3), FakeReplica(cut_after=4), FakeReplica()]

    async def test(client: Client) -> None:
        got = await client.complete()

        assert (got.text, got.is_ended) == (WHOLE, True)
        assert [len(fake.bodies) for fake in fakes] == [1, 1, 1]
        assert fakes[2].bodies[0]["max_tokens"] == 5

    run(test, *fakes)


def test_a_resumed_stream_tells_how_far_it_is() -> None:
    first, second = FakeReplica(cut_after=5, token_s=0.02), FakeReplica()

    async def test(client: Client) -> None:
        await client.complete()

        told = second.bodies[0]["vllm_xargs"]
        assert told["resumed_tokens"] == 5
        assert told["waited_ms"] >= 75.0  # since its first token, after which came four more
        assert 0.0 < told["began_ms"] < 1e4  # that first one, since the arrival

    run(test, first, second)


def test_tokens_that_have_shown_no_text_yet_are_computed_again() -> None:
    class Holding(FakeReplica):
        """Its fourth and fifth token are the beginning of a character."""

        async def _stream(self, request, body, *args):  # type: ignore[no-untyped-def]
            tokens = _Events.tokens

            def held(writer: _Events, count: int, is_last: bool) -> bytes:
                event = tokens(writer, count, is_last)
                if len(writer._ids) - writer._num_prompt in (4, 5):
                    return re.sub(rb'"text":"."', b'"text":""', event)
                return event

            monkeypatch.setattr(_Events, "tokens", held)
            try:
                return await super()._stream(request, body, *args)
            finally:
                monkeypatch.undo()

    other = FakeReplica()

    async def test(client: Client) -> None:
        got = await client.complete()

        assert (got.text, got.is_ended) == (WHOLE, True)
        assert other.bodies[0]["prompt"] == [ord(x) for x in "hello" + WHOLE[:3]]
        assert other.bodies[0]["max_tokens"] == 9
        assert other.bodies[0]["vllm_xargs"]["resumed_tokens"] == 3

    monkeypatch = pytest.MonkeyPatch()
    run(test, Holding(cut_after=5), other)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_tokens": "100"}])
def test_a_chat_ends_at_the_limit_of_its_server_also_when_it_is_resumed(limit: dict) -> None:
    fakes = [FakeReplica(cut_after=5, most_tokens=30), FakeReplica(most_tokens=30)]

    async def test(client: Client) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, **limit}
        got = await client.post(body, "/v1/chat/completions?api-version=1")

        assert got.text == output_of("hello", 30)
        assert fakes[1].bodies[0]["max_tokens"] == 25

    run(test, *fakes)


def _holding(text_of: dict[int, str]) -> type[_Events]:
    """Events in which tokens up to so many have this text, as characters are not whole yet."""

    class Holding(_Events):
        def tokens(self, count: int, is_last: bool) -> bytes:
            event = super().tokens(count, is_last)
            num = len(self._ids) - self._num_prompt
            if num in text_of and self._num_prompt == len("hello"):
                event = re.sub(rb'"text":"[^"]*"', b'"text":"%s"' % text_of[num].encode(), event)
            return event

    return Holding


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"temperature": 1, "logprobs": 1}])
def test_tokens_of_a_character_that_is_not_whole_are_computed_again(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FakeReplica(cut_after=6, per_event=3)
    other = FakeReplica()
    decoded: list[int] = []

    async def detokenize(_: FakeReplica, request):  # type: ignore[no-untyped-def]
        ids = (await request.json())["tokens"]
        decoded.append(len(ids))
        text = "".join(map(chr, ids))
        is_whole = len(ids) != 6
        return web.json_response({"prompt": text if is_whole else text[:5] + "\ufffd"})

    monkeypatch.setattr(FakeReplica, "_detokenize", detokenize)
    monkeypatch.setattr(fake_replica, "_Events", _holding({6: WHOLE[3:5]}))

    async def test(client: Client) -> None:
        got = await client.complete(**options)

        assert decoded == [6, 5]
        if "logprobs" in options:
            assert got.text == WHOLE[:5]
            assert "error" in got.chunks[-1]
            return
        assert (got.text, got.is_ended) == (WHOLE, True)
        assert other.bodies[0]["prompt"] == [ord(x) for x in "hello" + WHOLE[:5]]
        assert other.bodies[0]["max_tokens"] == 7

    run(test, first, other)
