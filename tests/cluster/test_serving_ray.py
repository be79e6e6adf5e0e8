"""The whole on Ray Serve: two engines with a tiny model, the gateway, and one engine killed.

Slow: each engine is three processes that import vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray.serve")

import aiohttp
from local_ray import free_port, local_ray
from tiny_llama import write_byte_tokenizer, write_tiny_llama

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

START_LIMIT_S = 900.0
NUM_TOKENS = 120
ENGINE = {
    "served_model_name": "tiny",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,
    "additional_config": {"sola_sched": {"swap": {"mode": "off"}}},
}


@dataclass(frozen=True)
class Cluster:
    """A running application."""

    url: str
    admin_url: str

    def replicas(self) -> list[dict[str, Any]]:
        """What the gateway knows."""
        with urllib.request.urlopen(f"{self.admin_url}/replicas", timeout=10) as answer:
            shown: list[dict[str, Any]] = json.load(answer)
        return shown


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from ray import serve

    from sola_sched.serving.ray_app import build

    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    write_byte_tokenizer(model)
    port, admin_port = free_port(), free_port()
    with local_ray():
        serve.start(proxy_location="Disabled")
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        args = {
            "model": str(model),
            "options": ENGINE,
            "engines": [{"num_replicas": 2, "env": env}],
            "host": "127.0.0.1",
            "port": port,
            "admin_port": admin_port,
        }
        serve.run(build(args), name="sola", route_prefix=None)
        running = Cluster(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
        _wait_for(lambda: sum(bool(r["has_feed"]) for r in running.replicas()) == 2)
        yield running


def _wait_for(condition: Any) -> None:
    end_s = time.monotonic() + START_LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not become true in time"
        time.sleep(0.1)


def _ask(url: str, body: dict[str, Any], **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps({"model": "tiny", **body}).encode(),
        headers={"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_targets_in_headers_reach_the_scheduler_or_are_refused(cluster: Cluster) -> None:
    body = {"prompt": "to be or not", "max_tokens": 3}

    assert _ask(cluster.url, body, **{"x-slo-ttft-ms": "5000"})[0] == 200
    status, text = _ask(cluster.url, body, **{"x-slo-ttft-ms": "soon"})
    assert (status, "'x-slo-ttft-ms' must be" in text) == (400, True)
    # The gateway does not know the classes; the engine does.
    status, text = _ask(cluster.url, body, **{"x-gateway-inference-objective": "gold"})
    assert (status, "'slo_class' must name a configured" in text) == (400, True)


def test_an_engine_is_killed_in_mid_run_and_every_stream_is_what_it_would_have_been(
    cluster: Cluster,
) -> None:
    prompts = [f"the {i}th of many prompts " * (1 + i % 3) for i in range(24)]

    streamed = asyncio.run(_stream_all_and_kill_one(cluster, prompts))

    (left,) = [r for r in cluster.replicas() if r["is_usable"]][:1]
    for prompt, text in zip(prompts, streamed, strict=True):
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        status, whole = _ask(left["url"], body)
        assert status == 200
        assert text == json.loads(whole)["choices"][0]["text"]
    with urllib.request.urlopen(f"{cluster.admin_url}/metrics", timeout=10) as answer:
        counts = answer.read().decode()
    assert "sola_gateway_given_up_total 0.0" in counts
    assert "sola_gateway_continued_total 0.0" not in counts


async def _stream_all_and_kill_one(cluster: Cluster, prompts: list[str]) -> list[str]:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        events: list[int] = [0] * len(prompts)
        asking = [
            asyncio.create_task(_stream(session, cluster.url, prompt, events, i))
            for i, prompt in enumerate(prompts)
        ]
        while sum(1 for count in events if count > 5) < 8 and not all(t.done() for t in asking):
            await asyncio.sleep(0.01)
        busiest = max(
            await asyncio.to_thread(cluster.replicas), key=lambda each: each["num_in_flight"]
        )
        assert busiest["num_in_flight"] > 0
        os.kill(_process_of(busiest["name"]), signal.SIGKILL)
        return list(await asyncio.gather(*asking))


async def _stream(
    session: aiohttp.ClientSession, url: str, prompt: str, events: list[int], place: int
) -> str:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, is_ended = "", False
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            is_ended |= data == "[DONE]"
            if data and data != "[DONE]":
                text += json.loads(data)["choices"][0]["text"]
                events[place] += 1
    assert is_ended
    return text


def _process_of(replica: str) -> int:
    """The process of a replica's actor."""
    import ray

    (found,) = [
        each
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["name"].endswith(replica)
    ]
    actor = ray.get_actor(found["name"], namespace=found["namespace"])
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid
