"""What is ours in Ray Serve, around fake engines: who hears of replicas, and who chooses."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve")

import aiohttp
from fake_replica import output_of
from local_ray import free_port, local_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def _replicas(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/replicas", timeout=10) as answer:
        shown: list[dict[str, Any]] = json.load(answer)
    return shown


@dataclass(frozen=True)
class Urls:
    """Where the two applications are: fake engines behind the gateway, others behind Serve."""

    gateway: str
    admin: str
    proxy: str


@pytest.fixture(scope="module")
def urls() -> Iterator[Urls]:
    """Two fake engines and the gateway; two light ones behind Serve's own proxy."""
    from fake_engine import FakeEngine
    from light_engine import LightIngressEngine
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from sola_sched.serving.ray_app import ROUTER_CLASS, GatewayServer, build

    port = free_port()
    with local_ray():
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        light = {"num_cpus": 0}
        engines = serve.deployment(FakeEngine).options(
            name="engine-0",
            num_replicas=2,
            ray_actor_options=light,
            request_router_config=RequestRouterConfig(request_router_class=ROUTER_CLASS),
        )
        gateway = serve.deployment(GatewayServer).options(name="gateway", ray_actor_options=light)
        args = {"model": "m", "host": "127.0.0.1", "port": 0, "router": "shortest-queue"}
        app = gateway.bind([engines.bind(0.02)], args)
        handle = serve.run(app, name="sola", route_prefix=None)
        admin_url = handle.admin_url.remote().result()
        behind = build(
            {
                "model": "m",
                "options": {"answer_s": 0.0},
                "front": "serve",
                "engines": [{"num_replicas": 2}],
            }
        )._bound_deployment
        light_app = behind.options(func_or_class=LightIngressEngine).bind(*behind.init_args)
        serve.run(light_app, name="behind", route_prefix="/behind")
        _wait_for(lambda: sum(bool(r["has_feed"]) for r in _replicas(admin_url)) == 2)
        url = handle.url.remote().result()
        yield Urls(url, admin_url, f"http://127.0.0.1:{port}/behind")


@pytest.fixture
def cluster(urls: Urls) -> tuple[str, str]:
    """The gateway's URLs, that for clients and that for operators."""
    return urls.gateway, urls.admin


def _wait_for(condition: Any, limit_s: float = 120.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not become true in time"
        time.sleep(0.05)


def test_serves_own_calls_go_where_the_policy_sends_them(cluster: tuple[str, str]) -> None:
    from ray import serve

    engines = serve.get_deployment_handle("engine-0", "sola")

    async def ask() -> list[bool]:
        await engines.is_busy.remote({"prompt": "p"})  # the router begins to follow the replicas
        await asyncio.sleep(2.0)
        return [await engines.is_busy.remote({"prompt": "p"}) for _ in range(8)]

    assert asyncio.run(ask()) == [False] * 8


def _ask(url: str, prompt: str) -> dict[str, Any]:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data=body, headers={"x-slo-ttft-ms": "500"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_requests_through_serves_own_proxy_reach_idle_replicas_in_turn(urls: Urls) -> None:
    prompt = "p" * 2**20

    answers = [_ask(urls.proxy, prompt) for _ in range(10)]

    assert {answer["body_bytes"] for answer in answers} == {
        len(json.dumps({"model": "m", "prompt": prompt}))
    }
    counts = Counter(answer["server"] for answer in answers)
    assert sorted(counts.values()) == [5, 5]


@pytest.mark.parametrize("length", ["2000000000", "9" * 18])
def test_a_size_that_a_client_only_announces_costs_serves_proxy_nothing(
    urls: Urls, length: str
) -> None:
    host, port = urllib.parse.urlsplit(urls.proxy).netloc.split(":")
    head = (
        f"POST /behind/v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
    )
    before = _proxy_bytes()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + b'{"prompt"')
        time.sleep(1.0)

        assert _ask(urls.proxy, "p")["body_bytes"] > 0

        assert _proxy_bytes() - before < 100 * 2**20


def _proxy_bytes() -> int:
    """The most memory that Serve's proxy has had."""
    (pid,) = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"ServeProxy" in path.read_bytes() or b"ProxyActor" in path.read_bytes()
    ]
    (line,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line
    ]
    return 1024 * int(line.split()[1])


def test_a_replica_is_killed_and_its_streams_go_on_and_a_new_one_joins(
    cluster: tuple[str, str],
) -> None:
    import ray

    prompts = [f"prompt {i}" for i in range(16)]

    async def stream(session: aiohttp.ClientSession, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 100, "stream": True, "temperature": 0}
        async with session.post(f"{cluster[0]}/v1/completions", json=body) as answer:
            lines = [line async for line in answer.content]
        events = [line[6:].strip() for line in lines if line.strip()]
        assert events[-1] == b"[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    async def all_of_them() -> list[str]:
        async with aiohttp.ClientSession() as session:
            asking = [asyncio.create_task(stream(session, prompt)) for prompt in prompts]
            await asyncio.sleep(0.7)
            shown = await asyncio.to_thread(_replicas, cluster[1])
            busiest = max(shown, key=lambda each: each["num_in_flight"])
            assert busiest["num_in_flight"] > 0
            gone.append(busiest["name"])
            (actor,) = [
                each
                for each in ray.util.list_named_actors(all_namespaces=True)
                if each["name"].endswith(busiest["name"])
            ]
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
            return list(await asyncio.gather(*asking))

    gone: list[str] = []
    texts = asyncio.run(all_of_them())

    assert texts == [output_of(prompt, 100) for prompt in prompts]
    with urllib.request.urlopen(f"{cluster[1]}/metrics", timeout=10) as answer:
        assert "sola_gateway_given_up_total 0.0" in answer.read().decode()

    def is_replaced() -> bool:
        shown = _replicas(cluster[1])
        return len(shown) == 2 and gone[0] not in {r["name"] for r in shown}

    _wait_for(is_replaced)
