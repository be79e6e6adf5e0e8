"""The gateway loses no request: replicas that die, stall, refuse or talk nonsense."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp")

from fake_replica import FakeReplica, output_of
from gateway_clients import Client, gateway_before, run, until

from sola_sched.cluster.routers import RoundRobin
from sola_sched.serving.call import Call, Lengths
from sola_sched.serving.replicas import Attempt, Replicas

WHOLE = output_of("hello", 12)


def test_a_stream_passes_as_it_is_and_without_the_ids_that_nobody_asked_for() -> None:
    async def test(client: Client) -> None:
        got = await client.complete(temperature=0)

        assert (got.status, got.text, got.is_ended) == (200, WHOLE, True)
        assert got.headers["content-type"].startswith("text/event-stream")
        assert len(got.chunks) == 12
        assert all(chunk["choices"][0]["token_ids"] is None for chunk in got.chunks)
        assert got.chunks[0]["choices"][0]["prompt_token_ids"] is None

    run(test, FakeReplica())


def test_ids_that_the_client_asks_for_are_passed_on() -> None:
    async def test(client: Client) -> None:
        got = await client.complete(return_token_ids=True)

        assert got.chunks[0]["choices"][0]["prompt_token_ids"] == [ord(x) for x in "hello"]
        ids = [i for chunk in got.chunks for i in chunk["choices"][0]["token_ids"]]
        assert "".join(map(chr, ids)) == WHOLE

    run(test, FakeReplica())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_replica_dies_before_its_answer_begins_anew_elsewhere(stream: bool) -> None:
    async def test(client: Client) -> None:
        got = await client.complete(stream=stream)

        text = got.text if stream else got.json["choices"][0]["text"]
        assert (got.status, text) == (200, WHOLE)
        assert client.gateway.counts["retried"] == 1

    run(test, FakeReplica(cut_after=-1), FakeReplica())


def test_an_error_event_of_the_server_is_a_cut() -> None:
    async def test(client: Client) -> None:
        got = await client.complete()

        assert (got.text, got.is_ended) == (WHOLE, True)
        assert not any("error" in chunk for chunk in got.chunks)

    run(test, FakeReplica(error_after=5), FakeReplica())


def test_a_stalled_stream_goes_on_elsewhere() -> None:
    stalled, other = FakeReplica(stall_after=5), FakeReplica()

    async def test(client: Client) -> None:
        got = await client.complete()

        assert (got.text, got.is_ended) == (WHOLE, True)
        assert client.gateway.counts["stalls"] == 1
        # The engine that stalled is told to let go.
        await until(lambda: stalled.num_gone == 1)
        assert (await client.complete()).text == WHOLE
        assert len(stalled.bodies) == 1

    run(test, stalled, other)


def test_a_stream_of_which_only_comments_come_has_stalled_and_goes_on_elsewhere() -> None:
    async def test(client: Client) -> None:
        got = await client.complete()

        assert (got.text, got.is_ended) == (WHOLE, True)
        assert got.num_comments > 1
        assert client.gateway.counts["stalls"] == 1

    run(test, FakeReplica(stall_after=5, comment_s=0.05), FakeReplica())


def test_an_attempt_may_be_ended_twice() -> None:
    async def whole() -> None:
        async with asyncio.timeout(None) as limit:
            attempt = Attempt(limit)
            attempt.end()
            try:
                await asyncio.sleep(10)
            finally:
                attempt.end()

    with pytest.raises(TimeoutError):
        asyncio.run(whole())


def test_ids_that_a_client_asks_for_beside_echo_reach_it() -> None:
    async def test(client: Client) -> None:
        got = await client.complete(echo=True, return_token_ids=True)

        assert all(choice["token_ids"] for chunk in got.chunks for choice in chunk["choices"])
        assert (await client.complete(echo=True)).chunks[0]["choices"][0].get("token_ids") is None

    run(test, FakeReplica())


def test_a_server_without_feed_that_answers_but_does_not_compute_has_stalled() -> None:
    now_s = 0.0
    replicas = Replicas(RoundRobin(), lambda: now_s)
    (hung, _), _ = replicas.sync({"hung": "http://hung", "other": "http://other"})
    request = Lengths().routed(_call(), "one", None, frozenset())

    async def whole() -> None:
        nonlocal now_s
        async with asyncio.timeout(None) as limit:
            with replicas.attempt(hung, request, limit) as attempt:
                attempt.has_begun = True
                while now_s < 20.0:
                    now_s += 10.0
                    replicas.found(hung)  # its answer to who asks for a feed
                assert replicas.end_stalled(15.0) == [hung]
                await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        asyncio.run(whole())


def test_a_stream_on_a_replica_that_has_left_ends_when_nothing_more_comes() -> None:
    async def test(client: Client) -> None:
        sent = asyncio.create_task(client.complete())
        await until(lambda: stalled.bodies)
        other_url = {"r1": next(r.url for r in client.gateway.replicas if r.name == "r1")}
        client.gateway.sync(other_url)

        got = await sent
        assert (got.text, got.is_ended) == (WHOLE, True)

    stalled = FakeReplica(stall_after=5)
    run(test, stalled, FakeReplica())


def test_a_client_that_reads_slowly_gets_its_whole_stream_when_the_replica_is_lost() -> None:
    async def whole() -> None:
        replicas = Replicas(RoundRobin(), lambda: 0.0)
        (lost,), _ = replicas.sync({"lost": "http://lost"})
        request = Lengths().routed(_call(), "one", None, frozenset())
        written = []

        async def attempt() -> None:
            async with asyncio.timeout(None) as limit:
                with replicas.attempt(lost, request, limit) as attempt:
                    attempt.has_begun = True
                    with attempt.writing():
                        assert not replicas.end_stalled(-1.0)
                        replicas.lost(lost)
                        await asyncio.sleep(0.01)  # the client is slow
                        written.append("all")
                    await asyncio.sleep(10)

        with pytest.raises(TimeoutError):
            await attempt()
        assert written == ["all"]

    asyncio.run(whole())


def test_requests_that_their_clients_call_the_same_are_told_apart() -> None:
    names: list[str] = []

    class Recording(RoundRobin):
        def choose(self, request, views, now_s):  # type: ignore[no-untyped-def]
            names.append(request.req_id)
            return super().choose(request, views, now_s)

    async def whole() -> None:
        async with gateway_before(FakeReplica(), router=Recording()) as client:
            body = {"prompt": "hello", "max_tokens": 2, "stream": True}
            await asyncio.gather(*(client.post(body, X_Request_Id="trace") for _ in range(3)))

    asyncio.run(whole())
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    "body",
    [
        {"messages": 5},
        {"messages": [{"content": {"content": 5}}]},
        {"prompt": "hello", "max_tokens": 10**30},
        {"prompt": "hello", "vllm_xargs": {"ttft_slo_ms": 10**400}},
    ],
)
def test_a_body_that_nobody_can_read_is_the_replicas_to_refuse(body: dict) -> None:
    fake = FakeReplica(status=400)

    async def test(client: Client) -> None:
        assert (await client.post(body)).status == 400
        assert len(fake.bodies) == 1

    run(test, fake)


def test_replicas_are_asked_for_answers_that_can_be_read() -> None:
    fake = FakeReplica()

    async def test(client: Client) -> None:
        await client.complete()
        await client.post({"prompt": "hello"}, Accept_Encoding="gzip")

    run(test, fake)
    assert {headers["accept-encoding"] for headers in fake.headers} == {"identity"}


def _call() -> Call:
    return Call("POST", "/v1/completions", {}, b"", {"prompt": "hello"}, "name", 0.0)


def test_a_lone_replica_that_stalls_is_waited_for() -> None:
    slow = FakeReplica(token_s=0.6)

    async def test(client: Client) -> None:
        got = await client.complete(3)

        assert got.text == output_of("hello", 3)
        assert client.gateway.counts["stalls"] == 0

    run(test, slow)


def test_a_refused_request_goes_to_another_replica() -> None:
    fakes = [FakeReplica(refuse_s=3), FakeReplica()]

    async def test(client: Client) -> None:
        assert (await client.complete()).text == WHOLE
        assert client.gateway.counts["refused"] == 1
        assert client.gateway.counts["failed_attempts"] == 0

    run(test, *fakes)


def test_when_all_refuse_the_client_is_told_to_come_back_soonest() -> None:
    fakes = [FakeReplica(refuse_s=9), FakeReplica(refuse_s=2), FakeReplica(refuse_s=5)]

    async def test(client: Client) -> None:
        got = await client.complete()

        assert (got.status, got.headers["retry-after"]) == (503, "2")
        assert [len(fake.bodies) for fake in fakes] == [1, 1, 1]

    run(test, *fakes)


def test_a_refused_rest_of_a_stream_ends_with_an_error() -> None:
    async def test(client: Client) -> None:
        got = await client.complete()

        assert got.text == WHOLE[:5]
        assert "error" in got.chunks[-1]

    run(test, FakeReplica(die_after=5), FakeReplica(refuse_s=1))


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_an_answer_that_is_the_requests_own_fault_is_passed_on(status: int) -> None:
    fakes = [FakeReplica(status=status), FakeReplica()]

    async def test(client: Client) -> None:
        assert (await client.complete()).status == status
        assert fakes[1].bodies == []

    run(test, *fakes)


def test_an_internal_error_is_tried_elsewhere() -> None:
    async def test(client: Client) -> None:
        assert (await client.complete()).text == WHOLE

    run(test, FakeReplica(status=500), FakeReplica())


def test_a_request_that_kills_what_it_comes_to_is_given_up() -> None:
    fakes = [FakeReplica(die_after=0) for _ in range(6)]

    async def test(client: Client) -> None:
        got = await client.complete()

        assert got.status == 502
        assert sum(len(fake.bodies) for fake in fakes) == 4

    run(test, *fakes)


def test_without_any_replica_a_request_waits_and_then_is_told_so() -> None:
    async def test(client: Client) -> None:
        client.gateway.sync({})
        got = await client.complete()

        assert (got.status, got.headers["retry-after"]) == (503, "1")
        assert "no replica" in got.json["error"]["message"]
        assert "access-control-allow-origin" not in got.headers
        body = {"model": "fake", "prompt": "hello"}
        got = await client.post(body, Origin="https://page.example")
        assert (got.status, got.headers["access-control-allow-origin"]) == (503, "*")

    run(test)


def test_a_request_that_waits_goes_to_the_replica_that_joins() -> None:
    late = FakeReplica()

    async def test(client: Client) -> None:
        client.gateway.sync({})
        waiting = asyncio.create_task(client.complete())
        await asyncio.sleep(0.1)
        client.gateway.sync({"late": late.url})

        assert (await waiting).text == WHOLE
        # It has told the engine how long it has waited.
        assert late.bodies[0]["vllm_xargs"]["waited_ms"] >= 90.0

    run(test, late)


def test_an_attempt_after_another_keeps_its_arrival() -> None:
    first, second = FakeReplica(cut_after=-1, token_s=0.0), FakeReplica()

    async def test(client: Client) -> None:
        await client.complete(vllm_xargs={"ttft_slo_ms": 200})

        assert first.bodies[0]["vllm_xargs"] == {"ttft_slo_ms": 200}
        again = second.bodies[0]["vllm_xargs"]
        assert again["ttft_slo_ms"] == 200
        assert again["waited_ms"] > 0.0
        assert "resumed_tokens" not in again

    run(test, first, second)


def test_a_client_that_goes_ends_its_request_on_the_replica() -> None:
    fake = FakeReplica(token_s=0.05)

    async def test(client: Client) -> None:
        asking = asyncio.create_task(client.complete(200))
        await until(lambda: fake.bodies)
        await asyncio.sleep(0.1)
        asking.cancel()

        await until(lambda: fake.num_gone == 1)
        assert all(not replica.attempts for replica in client.gateway.replicas)

    run(test, fake)


def test_other_paths_pass_through() -> None:
    async def test(client: Client) -> None:
        async with client.session.get(client.url + "/v1/models") as reply:
            assert (await reply.json())["data"][0]["id"] == "fake"
        async with client.session.get(client.url + "/health") as reply:
            assert reply.status == 200
        async with client.session.get(client.admin_url + "/metrics") as reply:
            assert "sola_gateway_requests_total" in await reply.text()

    run(test, FakeReplica())


def test_half_of_the_replicas_die_under_load_and_nothing_is_lost() -> None:
    fakes = [FakeReplica(token_s=0.002, die_after=7), FakeReplica(token_s=0.002)]

    async def test(client: Client) -> None:
        prompts = [f"prompt {i}" for i in range(60)]
        answers = await asyncio.gather(*(client.complete(20, prompt) for prompt in prompts))

        for prompt, got in zip(prompts, answers, strict=True):
            assert (got.status, got.text, got.is_ended) == (200, output_of(prompt, 20), True)

    run(test, *fakes)


@pytest.mark.parametrize("is_stream", [True, False])
def test_requests_on_a_server_without_a_feed_that_computes_nothing_are_answered_elsewhere(
    is_stream: bool,
) -> None:
    async def test(client: Client) -> None:
        body = {"prompt": "hello", "max_tokens": 4, "stream": is_stream}
        got = await asyncio.gather(*(client.post(body) for _ in range(8)))

        assert [each.status for each in got] == [200] * 8
        assert client.gateway.counts["stalls"] == 1
        assert client.gateway.counts["failed_attempts"] == 4

    run(test, FakeReplica(stall_after=0, shows_steps=False), FakeReplica())


def test_long_answers_of_a_server_without_a_feed_whose_metrics_change_are_waited_for() -> None:
    slow = FakeReplica(token_s=0.3, shows_steps=True)

    async def test(client: Client) -> None:
        got = await client.post({"prompt": "hello", "max_tokens": 4})

        assert got.status == 200
        assert slow.num_looks >= 3
        assert client.gateway.counts["stalls"] == 0

    run(test, slow, FakeReplica(token_s=0.3, shows_steps=True))


def test_a_server_that_answers_nothing_gets_nothing_until_it_does() -> None:
    replicas = Replicas(RoundRobin(), clock=lambda: 0.0)
    replicas.sync({"r0": "http://a", "r1": "http://b"})
    first, _ = replicas

    replicas.silent(first)
    assert not replicas.is_usable(first)
    replicas.found(first)
    assert replicas.is_usable(first)
