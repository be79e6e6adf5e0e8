"""`adaptive_placement` on Ray Serve with vLLM's engines, its file changed under load.

Slow: each engine is two processes that import vLLM.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray.serve")

import aiohttp
from local_ray import free_port, local_ray_with_dashboard
from operators import admin_of
from tiny_llama import write_byte_tokenizer, write_tiny_llama

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(2400),
]

LIMIT_S = 900.0
NUM_TOKENS = 120
NUM_STREAMS = 6


@dataclass
class Controller:
    """The command, what it reads and what it says."""

    services: Path
    log: Path
    first_port: int
    model: Path

    @property
    def url(self) -> str:
        """Of the first service's gateway."""
        return f"http://127.0.0.1:{self.first_port}"

    def describe(self, *services: dict[str, Any]) -> None:
        """Change the file, at once."""
        fresh = self.services.with_suffix(".new")
        fresh.write_text(json.dumps(services))
        fresh.replace(self.services)

    def service(self, name: str, **engine: Any) -> dict[str, Any]:
        """A description whose weights are those of the tiny model, on a CPU."""
        options = {
            "model": str(self.model),
            "dtype": "float32",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "enforce_eager": True,
            "additional_config": {"sola_sched": {"swap": {"mode": "off"}}},
        }
        return {"name": name, "model": "llama-3-8b", "rate": 0.5, "ttft": 5000, "tpot": 500,
                "prompt": 60, "output": 60, "engine": options | engine}  # fmt: skip

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until it has said something so often."""
        _wait_for(lambda: self.log.read_text().count(text) >= times, self.log)


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    folder = tmp_path_factory.mktemp("adaptive_placement")
    model = write_tiny_llama(folder / "tiny")
    write_byte_tokenizer(model)
    made = Controller(folder / "services.json", folder / "log", free_port(), model)
    made.describe(made.service("chat"))
    command = [
        *(
            sys.executable,
            "-P",
            "-m",
            "sola_sched.adaptive_placement",
            "--services",
            str(made.services),
        ),
        *("--gpu", "a100", "--num-gpus", "1", "--most-sharing", "3"),
        *("--first-port", str(made.first_port), "--start-limit-s", str(LIMIT_S)),
    ]
    with local_ray_with_dashboard() as url:
        with made.log.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--address", url], stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield made
        finally:
            process.terminate()
            assert process.wait(60) == 0


def test_services_change_under_load_and_every_stream_is_what_it_would_have_been(
    controller: Controller,
) -> None:
    _wait_for(lambda: _usable(controller.url) == 1, controller.log)
    prompts = [f"the {i}th of many prompts " * (1 + i % 3) for i in range(NUM_STREAMS)]
    alone = [asyncio.run(_stream(controller.url, "chat", prompt)) for prompt in prompts]

    # A service is added.
    chat, code = controller.service("chat"), controller.service("code")
    texts = asyncio.run(_while_it_changes(controller, prompts, [chat, code], "next interval", 2))
    assert texts == alone
    code_url = f"http://127.0.0.1:{controller.first_port + 1}"
    _wait_for(lambda: _usable(code_url) == 1, controller.log)
    assert asyncio.run(_stream(code_url, "code", prompts[0])) == alone[0]

    # One that cannot start, and one whose description breaks a rule.
    bad = controller.service("bad", model=str(controller.model / "missing"))
    said = "'bad' cannot start as it is described and is not added"
    texts = asyncio.run(_while_it_changes(controller, prompts, [chat, code, bad], said))
    assert texts == alone
    texts = asyncio.run(
        _while_it_changes(controller, prompts, [chat, code | {"rate": 0}], "rate of service code")
    )
    assert texts == alone
    assert asyncio.run(_stream(code_url, "code", prompts[0])) == alone[0]

    # A service is removed.
    texts = asyncio.run(_while_it_changes(controller, prompts, [chat], "stopping code"))
    assert texts == alone
    _wait_for(lambda: _is_closed(code_url), controller.log)

    with urllib.request.urlopen(f"{admin_of(controller.url)}/metrics", timeout=10) as answer:
        counted = answer.read().decode()
    assert "sola_gateway_given_up_total 0.0" in counted


async def _while_it_changes(
    controller: Controller, prompts: list[str], services: list[Any], said: str, times: int = 1
) -> list[str]:
    """Texts of streams on chat that begin before a change, and go on until it is said to be made.

    Each prompt is asked for again and again; all its answers must be the same.
    """
    is_done = asyncio.Event()

    async def ask(prompt: str) -> str:
        texts = {await _stream(controller.url, "chat", prompt)}
        while not is_done.is_set():
            texts.add(await _stream(controller.url, "chat", prompt))
        assert len(texts) == 1, texts
        return texts.pop()

    asking = [asyncio.create_task(ask(prompt)) for prompt in prompts]
    await asyncio.sleep(1.0)
    controller.describe(*services)
    try:
        await asyncio.to_thread(controller.wait_for, said, times)
    finally:
        is_done.set()
    return list(await asyncio.gather(*asking))


async def _stream(url: str, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        lines = [line async for line in answer.content]
    events = [line[6:].strip() for line in lines if line.strip()]
    assert events[-1] == b"[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def _usable(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{admin_of(url)}/replicas", timeout=10) as answer:
            return sum(bool(replica["is_usable"]) for replica in json.load(answer))
    except OSError:
        return 0


def _is_closed(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{admin_of(url)}/replicas", timeout=10):
            return False
    except OSError:
        return True


def _wait_for(condition: Any, log: Path) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"it did not become true in time:\n{log.read_text()}"
        time.sleep(0.1)
