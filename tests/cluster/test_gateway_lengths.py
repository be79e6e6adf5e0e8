"""What a gateway learns of lengths from answers, and what a replica is too small for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession, web
from cluster_views import make_view
from gateway_clients import gateway_to, until
from listeners import run
from multidict import CIMultiDict

from sola_sched.serving.answering.answers import Answer
from sola_sched.serving.call import Call, Lengths
from sola_sched.serving.gateway import Gateway

PATH = "/v1/completions"
#: Characters of a token, as in Chinese.
CHARS = 1.5
#: Tokens that are 10,000 with that, and taken for 3,750 at first.
LONG = 15_000 * "x"
SAID = [
    "This model's maximum context length is 8192 tokens. However, you requested 16 output tokens "
    "and your prompt contains at least 8177 input tokens.",
    "Input length (10000) exceeds model's maximum context length (8192).",
    "The decoder prompt (length 10000) is longer than the maximum model length of 8192.",
    "The engine prompt length 10000 exceeds the max_model_len 8192. Please reduce prompt.",
]


class Server:
    """Takes prompts up to a length."""

    def __init__(self, most: int, said: str = SAID[0], status: int = 400) -> None:
        self.most, self.num_asked = most, 0
        self._said, self._status = said, status

    async def __call__(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        num_tokens = round(len(json.loads(await request.read())["prompt"]) / CHARS)
        if num_tokens >= self.most:
            error = {"message": self._said, "code": self._status}
            return web.json_response({"error": error}, status=self._status)
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 1}
        return web.json_response({"choices": [{"text": "y"}], "usage": usage})


def know(gateway: Gateway, *servers: Server | None) -> None:
    """The gateway has had a report of each but those that are None."""
    for replica, server in zip(gateway.replicas, servers, strict=True):
        if server is not None:
            gateway.replicas.reported(replica, make_view(max_model_len=server.most))


async def answers(session: ClientSession, url: str, number: int = 1) -> list[tuple[int, Any]]:
    """Statuses and bodies of so many requests with a long prompt."""
    found = []
    for _ in range(number):
        async with session.post(url + PATH, json={"prompt": LONG, "max_tokens": 1}) as reply:
            found.append((reply.status, await reply.json()))
    return found


@pytest.mark.parametrize("said", SAID)
def test_a_request_that_is_too_long_for_a_replica_goes_to_one_that_takes_longer_ones(
    said: str,
) -> None:
    small, other, large = Server(8192, said), Server(8192, said), Server(32768)

    async def test() -> None:
        async with (
            gateway_to(small, other, large) as (url, gateway),
            ClientSession() as session,
        ):
            know(gateway, small, other, large)
            found = await answers(session, url, 60)

            assert {status for status, _ in found} == {200}
            assert gateway.counts["failed_attempts"] == 0
            assert gateway.counts["retried"] == small.num_asked + other.num_asked > 0

    run(test)
    assert small.num_asked + other.num_asked < 30  # the length is learned
    assert large.num_asked == 60


@pytest.mark.parametrize(
    ("most", "status", "said", "is_known"),
    [(8192, 400, SAID[0], True), (32768, 400, SAID[0], False), (32768, 422, SAID[0], True),
     (32768, 400, "temperature must be non-negative", True)],
)  # fmt: skip
def test_what_no_other_replica_is_known_to_take_is_answered_as_the_first_one_does(
    most: int, status: int, said: str, is_known: bool
) -> None:
    small, other = Server(8192, said, status), Server(most)

    async def test() -> None:
        async with gateway_to(small, other) as (url, gateway), ClientSession() as session:
            know(gateway, small, other if is_known else None)
            ((got, body),) = await answers(session, url)

            assert (got, body["error"]["message"]) == (status, said)
            assert (small.num_asked, other.num_asked) == (1, 0)

    run(test)


def test_where_the_larger_one_refuses_too_the_client_is_told_why() -> None:
    small, large = Server(8192, SAID[0]), Server(9000, SAID[1])

    async def test() -> None:
        async with gateway_to(small, large) as (url, gateway), ClientSession() as session:
            know(gateway, small, large)
            found = await answers(session, url, 4)

            assert {status for status, _ in found} == {400}
            assert {body["error"]["message"] for _, body in found} <= {SAID[0], SAID[1]}
            assert large.num_asked == 4

    run(test)


def test_one_that_has_told_no_limits_may_be_too_small() -> None:
    small, large = Server(8192), Server(32768)

    async def test() -> None:
        async with gateway_to(small, large) as (url, gateway), ClientSession() as session:
            know(gateway, None, large)
            found = await answers(session, url, 6)

            assert {status for status, _ in found} == {200}

    run(test)
    assert small.num_asked > 0


@pytest.mark.parametrize("is_first", [True, False])
def test_where_the_larger_one_has_no_room_the_client_may_come_back(is_first: bool) -> None:
    """It is not told that its prompt is too long for all."""
    small, large = Server(8192), Server(1, "full", 503)

    async def test() -> None:
        servers = (large, small) if is_first else (small, large)
        async with gateway_to(*servers) as (url, gateway), ClientSession() as session:
            for replica, server in zip(gateway.replicas, servers, strict=True):
                most = 8192 if server is small else 32768
                gateway.replicas.reported(replica, make_view(max_model_len=most))
            ((status, body),) = await answers(session, url)

            assert (status, body["error"]["message"]) == (503, "full")
            assert (small.num_asked, large.num_asked) == (1, 1)

    run(test)


@pytest.mark.parametrize("comes_back", [True, False])
def test_where_the_larger_one_has_died_it_is_waited_for(comes_back: bool) -> None:
    small, large = Server(8192), Server(32768)

    async def test() -> None:
        async with gateway_to(small, large) as (url, gateway), ClientSession() as session:
            know(gateway, small, large)
            _, replica = gateway.replicas
            gateway.replicas.failed(replica, 0.2 if comes_back else 30.0)
            ((status, _),) = await answers(session, url)

            assert status == (200 if comes_back else 503)
            assert (small.num_asked, large.num_asked) == (1, int(comes_back))

    run(test)


def test_what_is_too_long_is_said_where_the_larger_one_has_left() -> None:
    small, large = Server(8192), Server(32768)

    async def test() -> None:
        async with gateway_to(small, large) as (url, gateway), ClientSession() as session:
            know(gateway, small, large)
            here, replica = gateway.replicas
            gateway.replicas.failed(replica, 30.0)
            asking = asyncio.create_task(answers(session, url))
            await until(lambda: small.num_asked)
            gateway.sync({here.name: here.url})
            ((status, body),) = await asking

            assert (status, body["error"]["message"]) == (400, SAID[0])

    run(test)


def call_of(text: str) -> Call:
    body = json.dumps({"prompt": text}).encode()
    return Call.of("POST", PATH, CIMultiDict(), body, request_id="r", arrival_s=0.0)


def test_what_a_chats_template_adds_to_short_prompts_makes_no_long_ones_longer() -> None:
    lengths, short, long = Lengths(), call_of("hi"), call_of("x" * 40_000)

    for _ in range(50):
        lengths.learn_prompt(short, 30)
        lengths.learn_prompt(long, 10_000)

    assert lengths.prompt_tokens(long) == pytest.approx(10_000, rel=0.02)


def test_what_goes_on_from_a_stored_response_tells_nothing_of_the_length_of_its_text() -> None:
    lengths = Lengths()
    body = json.dumps({"previous_response_id": "resp_1", "input": "and then?"}).encode()
    call = Call.of("POST", "/v1/responses", CIMultiDict(), body, request_id="r", arrival_s=0.0)
    long = call_of("x" * 4000)

    for _ in range(60):
        lengths.learn_prompt(long, 1000)
        lengths.learn_prompt(call, 10_000)

    assert lengths.prompt_tokens(long) == 1000


@pytest.mark.parametrize(
    ("body", "expected"),
    [({"usage": {"prompt_tokens": 7}}, 7),
     ({"usage": {"input_tokens": 0, "cache_read_input_tokens": 5,
                 "cache_creation_input_tokens": 3}}, 8),
     ({"usage": {"input_tokens": 2, "cache_read_input_tokens": None}}, 2),
     ({"usage": {"input_tokens": 8, "output_tokens": 1}}, 8),
     ({"choices": [{"text": '"usage": {"prompt_tokens": 9}'}]}, None), ({"usage": None}, None),
     ({"usage": {"prompt_tokens": "many"}}, None), ({"usage": {"tokens": {"input_tokens": 3}}},
     None), ([], None), ("text", None)],
)  # fmt: skip
def test_an_answer_tells_the_tokens_of_its_prompt(body: Any, expected: int | None) -> None:
    data = json.dumps(body).encode()

    assert Answer(200, CIMultiDict(), data).prompt_tokens == expected
    assert Answer(400, CIMultiDict(), data).prompt_tokens is None
    assert Answer(200, CIMultiDict(), data[:-1]).prompt_tokens is None
    assert Answer(200, CIMultiDict(), b"\xff" + data).prompt_tokens is None
