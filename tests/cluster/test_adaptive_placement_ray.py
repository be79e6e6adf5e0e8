"""The controller on Ray Serve, around fake engines: services come, move and go under load."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray.serve")

import aiohttp
from fake_replica import output_of
from local_ray import free_port, local_ray_with_dashboard
from operators import admin_of

from sola_sched.adaptive_placement.follow import Follower
from sola_sched.adaptive_placement.search import Options
from sola_sched.adaptive_placement.serve_api import ServeApi
from sola_sched.cluster.sharing.placement import Cluster
from sola_sched.errors import DeploymentError
from sola_sched.plan.outputs import deploy

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
]

CHAT = {"name": "chat", "model": "llama-3-8b", "rate": 1, "ttft": 1500, "tpot": 80,
        "prompt": 200, "output": 60}  # fmt: skip
CODE = CHAT | {"name": "code", "model": "llama-2-7b", "rate": 0.3}
NUM_TOKENS = 100


@pytest.fixture(scope="module")
def api() -> Iterator[ServeApi]:
    with local_ray_with_dashboard() as url:
        yield ServeApi(url)


class Described:
    """Descriptions that change."""

    def __init__(self) -> None:
        self.services: list[dict[str, Any]] = []

    def read(self) -> str:
        return json.dumps(self.services)


async def stream(session: aiohttp.ClientSession, url: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        lines = [line async for line in answer.content]
    events = [line[6:].strip() for line in lines if line.strip()]
    assert events[-1] == b"[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_services_come_move_and_go_and_no_stream_is_lost(
    api: ServeApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = free_port()
    monkeypatch.setattr(deploy, "_IMPORT_PATH", "fake_apps:build")
    described = Described()
    options = Options("a100", Cluster.of(4), first_port=first)
    follower = Follower(api, described.read, options, limit_s=120.0)
    url = f"http://127.0.0.1:{first}"

    async def while_it_changes(*services: dict[str, Any]) -> list[str]:
        """Texts of eight streams on chat, a second before and all through a change."""
        async with aiohttp.ClientSession() as session:
            asking = [asyncio.create_task(stream(session, url, f"prompt {i}")) for i in range(8)]
            await asyncio.sleep(1.0)
            described.services = list(services)
            await asyncio.to_thread(follower.tick)
            return list(await asyncio.gather(*asking))

    whole = [output_of(f"prompt {i}", NUM_TOKENS) for i in range(8)]
    described.services = [CHAT]
    follower.tick()
    _wait_for(lambda: len(_replicas(url)) > 0)
    (before,) = _replicas(url)

    # `code` gets GPUs that `chat` had: its engines end, and its streams go on elsewhere.
    assert asyncio.run(while_it_changes(CHAT, CODE)) == whole
    assert {name.partition("--")[0] for name in api.details()} == {"chat", "code"}
    assert before["name"] not in {each["name"] for each in _replicas(url)}

    # A description that cannot be started: an error, and all is as before.
    with pytest.raises(DeploymentError, match="no such model"):
        asyncio.run(while_it_changes(CHAT, CODE, CODE | {"name": "bad", "model": "opt-6.7b"}))
    assert "'bad' cannot start as it is described and is not added" in caplog.text
    assert asyncio.run(while_it_changes(CHAT, CODE)) == whole
    assert {name.partition("--")[0] for name in api.details()} == {"chat", "code"}

    # `code` goes: its port is closed, and `chat` may have its GPUs.
    code_url = f"http://127.0.0.1:{api.details()['code']['deployed_app_config']['args']['port']}"
    _wait_for(lambda: len(_replicas(code_url)) > 0)
    assert asyncio.run(while_it_changes(CHAT)) == whole
    with pytest.raises(urllib.error.URLError):
        _replicas(code_url)

    assert {name.partition("--")[0] for name in api.details()} == {"chat"}
    with urllib.request.urlopen(f"{admin_of(url)}/metrics", timeout=10) as answer:
        counted = answer.read().decode()
    assert "sola_gateway_given_up_total 0.0" in counted
    assert "sola_gateway_requests_total 32.0" in counted  # one gateway from first to last


def _replicas(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{admin_of(url)}/replicas", timeout=10) as answer:
        shown: list[dict[str, Any]] = json.load(answer)
    return shown


def _wait_for(condition: Any, limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not become true in time"
        time.sleep(0.05)
