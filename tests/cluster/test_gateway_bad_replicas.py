"""Replicas that answer as no server should, or not at all."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession
from fake_replica import FakeReplica
from gateway_clients import QUICK
from listeners import serving

from sola_sched.cluster.routers import RoundRobin
from sola_sched.serving.gateway import Gateway


def test_an_address_that_takes_no_connection_costs_the_limit_of_connecting() -> None:
    fake = FakeReplica()

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            address = full.getsockname()
            waiting = [socket.socket() for _ in range(4)]
            for each in waiting:  # whoever comes after these gets no answer at all
                each.setblocking(False)
                each.connect_ex(address)
            options = replace(QUICK, connect_s=0.3)
            async with fake.running():
                gateway = Gateway(RoundRobin(), options)
                gateway.sync({"full": f"http://127.0.0.1:{address[1]}", "good": fake.url})
                async with serving(gateway.app(), gateway.front) as url, ClientSession() as session:
                    for _ in range(4):
                        began_s = time.monotonic()
                        body = {"prompt": "p", "max_tokens": 3}
                        async with session.post(f"{url}/v1/completions", json=body) as reply:
                            assert reply.status == 200
                        assert time.monotonic() - began_s < 2.0
                assert gateway.counts["failed_attempts"] >= 1
            for each in waiting:
                each.close()

    asyncio.run(asyncio.wait_for(test(), 20))
