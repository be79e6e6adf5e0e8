"""Replicas push their load to the gateway; what cannot be true is ignored and counted."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from aiohttp.test_utils import TestServer
from fake_engine import STEPS, line
from fake_replica import FakeReplica
from gateway_clients import QUICK, Client, gateway_before, until

from sola_sched.cluster.routers import JoinShortestQueue, LeastPredictedTtft, RoundRobin
from sola_sched.serving.feed import LOAD_PATH, SILENT_S
from sola_sched.serving.gateway import Gateway


def test_reports_reach_the_router() -> None:
    busy, idle = FakeReplica(load=[line(waiting=3, running=2)]), FakeReplica(load=[line()])

    async def whole() -> None:
        async with gateway_before(busy, idle, router=JoinShortestQueue()) as client:
            views = client.gateway.replicas.reports.views
            await until(lambda: views[0].num_waiting == 3)
            for _ in range(4):
                await client.complete(1)

        assert views[0].num_running == 2
        assert (len(busy.bodies), len(idle.bodies)) == (0, 4)

    asyncio.run(whole())


def test_the_router_predicts_from_the_step_times_that_an_engine_reports() -> None:
    slow = FakeReplica(load=[line(running=1, step_coefficients=[x * 50 for x in STEPS])])
    fast = FakeReplica(load=[line(running=1)])

    async def whole() -> None:
        async with gateway_before(slow, fast, router=LeastPredictedTtft()) as client:
            views = client.gateway.replicas.reports.views
            await until(lambda: views[0].num_running + views[1].num_running == 2)
            for _ in range(4):
                await client.complete(1)

        assert (len(slow.bodies), len(fast.bodies)) == (0, 4)

    asyncio.run(whole())


@pytest.mark.parametrize(
    "nonsense",
    [
        b"not a report",
        b"0.0",
        b"0.0 []",
        b'0.0 {"kv_capacity_tokens": 3}',
        line(kv_used_tokens=-1),
        line(kv_used_tokens=20_000),
        line(num_gpus=0),
        line(running=1, running_ctx=np.array([math.nan])),
        line(running=2, running_ctx=np.array([1.0])),
        line(age_s=-50.0),
        line(step_coefficients=[-1.0] * 8),
        line(step_coefficients=[1e308] * 8),
        line(max_num_batched_tokens=10**400),
        line(waiting=2, num_waiting_lost=1.5),
        line(waiting=2, num_waiting_lost=None),
        b"0.0 " + b"[" * 200_000,
    ],
)
def test_nonsense_is_ignored_and_counted_and_the_replica_keeps_serving(nonsense: bytes) -> None:
    fake = FakeReplica(load=[line(waiting=2), nonsense])

    async def whole() -> None:
        async with gateway_before(fake) as client:
            await until(lambda: client.gateway.replicas.reports.num_ignored == 1)
            assert client.gateway.replicas.reports.views[0].num_waiting == 2

            assert (await client.complete(3)).is_ended
            async with client.session.get(client.admin_url + "/metrics") as reply:
                assert "sola_gateway_ignored_reports_total 1.0" in await reply.text()

    asyncio.run(whole())


def test_the_end_of_a_feed_keeps_new_requests_away_at_once() -> None:
    dying, other = FakeReplica(load=[line()]), FakeReplica(load=[line()])

    async def whole() -> None:
        async with gateway_before(dying, other) as client:
            replica = next(iter(client.gateway.replicas))
            dying._is_dead = True
            await until(lambda: not client.gateway.replicas.is_usable(replica))
            for _ in range(4):
                assert (await client.complete(1)).status == 200

        assert len(dying.bodies) == 0

    asyncio.run(whole())


def test_a_feed_that_ends_in_order_keeps_new_requests_away_too() -> None:
    ending, other = FakeReplica(load=[line(waiting=3)]), FakeReplica(load=[line()])

    async def whole() -> None:
        async with gateway_before(ending, other) as client:
            replica = next(iter(client.gateway.replicas))
            await until(lambda: replica.has_reported)
            ending.ends_feeds = True
            await until(lambda: not client.gateway.replicas.is_usable(replica))
            for _ in range(4):
                assert (await client.complete(1)).status == 200
            await until(lambda: not replica.has_reported)  # what it had told is not known to hold
            num_feeds = ending.num_feeds
            await asyncio.sleep(0.7)

            assert ending.num_feeds == num_feeds
            assert not client.gateway.replicas.is_usable(replica)
            ending.ends_feeds = False
            await until(lambda: client.gateway.replicas.is_usable(replica))
            assert replica.has_reported

        assert len(ending.bodies) == 0

    asyncio.run(whole())


@pytest.mark.parametrize("has_feed", [True, False])
def test_what_is_started_again_within_a_moment_has_nothing_of_what_was_told(has_feed: bool) -> None:
    fake = FakeReplica(load=[line(waiting=3)])

    async def whole() -> None:
        async with gateway_before(fake) as client:
            (replica,) = client.gateway.replicas
            await until(lambda: replica.has_reported)
            fake._is_dead = True
            await asyncio.sleep(0.05)
            fake._is_dead, fake.load = False, [b""] if has_feed else None

            await until(lambda: not replica.has_reported)
            assert client.gateway.replicas.reports.views[replica.position].num_waiting == 0
            assert not replica.is_gone

    asyncio.run(whole())


def test_the_gateway_has_no_feed_and_says_where_there_is_one() -> None:
    fake = FakeReplica(load=[line(waiting=2)])

    async def whole() -> None:
        async with gateway_before(fake) as client, asyncio.timeout(5):
            async with client.session.get(client.url + LOAD_PATH) as reply:
                status, error = reply.status, (await reply.json())["error"]
            async with client.session.get(client.admin_url + "/replicas") as reply:
                shown = await reply.json()

        assert (status, error["code"], error["type"]) == (404, 404, "NotFoundError")
        assert "at a server's own address" in error["message"]
        assert shown[0]["url"] == fake.url

    asyncio.run(whole())


def test_a_gateway_before_a_gateway_sends_it_requests() -> None:
    async def whole() -> None:
        async with gateway_before(FakeReplica(load=[line()])) as inner:
            outer = Gateway(RoundRobin(), QUICK)
            outer.sync({"inner": inner.url})
            async with TestServer(outer.app(), host="127.0.0.1") as server:
                replica = next(iter(outer.replicas))
                await until(lambda: replica.has_feed is not None, SILENT_S / 2)
                url = str(server.make_url("")).rstrip("/")
                got = await Client(outer, url, "", inner.session).complete()

        assert (replica.has_feed, got.is_ended) == (False, True)

    asyncio.run(whole())


def test_an_engine_that_reports_is_stalled_when_neither_tokens_nor_reports_come() -> None:
    stalled, other = FakeReplica(load=[line()], stall_after=0), FakeReplica(load=[line()])

    async def whole() -> None:
        async with gateway_before(stalled, other) as client:
            got = await client.complete(5, stream=False)

            assert got.status == 200
            assert client.gateway.counts["stalls"] == 1

    asyncio.run(whole())


def test_a_slow_request_on_an_engine_that_reports_is_left_alone() -> None:
    slow, other = FakeReplica(load=[line()], token_s=0.3), FakeReplica(load=[line()])

    async def whole() -> None:
        async with gateway_before(slow, other) as client:
            asking = asyncio.create_task(client.complete(4, stream=False))
            while not asking.done():  # its steps go on
                assert slow.load is not None
                slow.load.append(line(running=1))
                await asyncio.sleep(0.05)

            assert (await asking).status == 200
            assert client.gateway.counts["stalls"] == 0
            assert other.bodies == []

    asyncio.run(whole())
