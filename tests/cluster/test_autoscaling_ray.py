"""Replicas come with the rate and go with it, on Ray Serve, around engines that compute nothing.

The policy, Serve's controller, what replicas tell it and the gateway are the real ones.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("ruptures")
pytest.importorskip("ray.serve")

import aiohttp
from local_ray import free_port, local_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

#: Requests per second: of one replica, and of two.
LOW, HIGH = 4.0, 18.0
#: Longer than the 2 s that Serve itself waits before it ends a replica.
ANSWER_S = 4.0
LIMIT_S = 120.0


def test_load_brings_a_replica_and_its_end_takes_one_away_and_no_request_is_cut() -> None:
    from light_engine import LightEngine
    from ray import serve

    from sola_sched.serving.ray_app import build

    policy = {
        "policy_function": "sola_sched.serving.scaling:ScalingPolicy",
        "policy_kwargs": {
            "rates_per_s": [10, 20],
            "replicas": [1, 2],
            "heartbeat_s": 0.5,
            "window": 40,
            "down_delay_s": 3.0,
        },
    }
    port = free_port()
    args = {
        "model": "m",
        "options": {"answer_s": ANSWER_S},
        "engines": [{"autoscaling": {"max_replicas": 3, "policy": policy}, "drain_s": 10.0}],
        "host": "127.0.0.1",
        "port": port,
    }
    gateway = build(args)._bound_deployment
    (engine,) = (each._bound_deployment for each in gateway.init_args[0])
    with local_ray():
        serve.start(proxy_location="Disabled")
        light = engine.options(func_or_class=LightEngine).bind(*engine.init_args)
        serve.run(gateway.bind([light], gateway.init_args[1]), name="sola", route_prefix=None)

        statuses = asyncio.run(_rise_and_fall(f"http://127.0.0.1:{port}"))

        counts = serve.get_deployment_handle("gateway", "sola").counts.remote().result()
    assert set(statuses) == {200}
    assert counts["requests"] == len(statuses)
    assert counts.get("failed_attempts", 0) == 0


async def _rise_and_fall(url: str) -> list[int]:
    """Load until there are two replicas, then less until there is one; the answers' statuses."""
    asking: list[asyncio.Task[int]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        assert await _load(session, url, asking, LOW, 0, limit_s=8.0) == {1}
        assert await _load(session, url, asking, HIGH, 2) <= {1, 2}
        assert await _load(session, url, asking, LOW, 1) <= {1, 2}
        return list(await asyncio.gather(*asking))


async def _load(
    session: aiohttp.ClientSession,
    url: str,
    asking: list[asyncio.Task[int]],
    rate_per_s: float,
    until: int,
    limit_s: float = LIMIT_S,
) -> set[int]:
    """Requests at an even rate, until so many replicas run; 0 for a while. All numbers seen."""
    seen: set[int] = set()
    end_s = time.monotonic() + limit_s
    while until not in seen:
        if time.monotonic() > end_s:
            assert until == 0, f"there are not {until} replicas in time, but {sorted(seen)}"
            break
        asking.append(asyncio.create_task(_ask(session, url)))
        await asyncio.sleep(1.0 / rate_per_s)
        if len(asking) % 4 == 0:
            seen.add(await asyncio.to_thread(_num_running))
    return seen


async def _ask(session: aiohttp.ClientSession, url: str) -> int:
    body: dict[str, Any] = {"model": "m", "prompt": "p", "max_tokens": 1}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


def _num_running() -> int:
    from ray import serve

    engine = serve.status().applications["sola"].deployments["engine-0"]
    return int(engine.replica_states.get("RUNNING", 0))
