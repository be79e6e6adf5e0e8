"""`vllm serve` with its default options, and the clients that ask it."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.clients import cpu_s, wait_for
from gateway.servers import free_port
from serving.process import Answers, EngineProcess, mean_and_quiet, prompt_of


class Served(EngineProcess):
    """One `vllm serve`.

    Args:
        model_dir: With its tokenizer.
        arguments: Of its engine.
        environment: Beside what all engines have here.
    """

    def __init__(
        self, model_dir: Path, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        command = [
            *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
            *("--host", "127.0.0.1", "--port", str(self._port), *_flags(arguments)),
        ]
        super().__init__(command, environment)

    def wait(self) -> None:
        """Until it is up."""
        wait_for(self._is_up)

    def answer(self, num_clients: int, num_tokens: int, seed: int) -> Answers:
        """Requests of so many clients at once, each of so many tokens."""
        before_s = cpu_s([self.process.pid])
        streams = asyncio.run(self._ask(num_clients, num_tokens, seed))
        spent_s = cpu_s([self.process.pid]) - before_s
        return Answers(*mean_and_quiet(streams), spent_s / (num_clients * num_tokens))

    async def _ask(self, num_clients: int, num_tokens: int, seed: int) -> list[list[float]]:
        rng = random.Random(seed)
        return await asyncio.gather(
            *(self._stream(num_tokens, prompt_of(rng)) for _ in range(num_clients))
        )

    async def _stream(self, num_tokens: int, prompt: list[int]) -> list[float]:
        """One streamed answer; when its tokens came, in seconds."""
        body = json.dumps({
            "model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True,
            "temperature": 0, "stream": True,
        }).encode()  # fmt: skip
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head.encode() + body)
        came_s = []
        is_whole = False
        async for line in reader:
            if line.startswith(b"data: {"):
                came_s.append(time.perf_counter())
            is_whole = is_whole or line.startswith(b"data: [DONE]")
        writer.close()
        if not is_whole:
            raise RuntimeError(f"a stream must end with [DONE]; the server's log:\n{self.log()}")
        return came_s

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"vllm serve must start; its log:\n{self.log()}")
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/v1/models", timeout=10):
            return True

    def _stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """As `vllm serve` takes them."""
    from sola_sched.serving.engine import to_arguments

    return list(to_arguments(dict(arguments)))
