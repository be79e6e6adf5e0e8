"""`vllm serve` with its default options, and the clients that ask it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from cluster.clients import cpu_s, wait_for
from cluster.servers import free_port

#: Options that an operator may leave alone, so that vLLM chooses: threads and cores among them.
_LEFT_TO_VLLM = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL")
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPT_TOKENS = 32
#: Ids of the tiny model's tokens that are text.
TEXT_IDS = range(40, 100)


@dataclass(frozen=True)
class Answers:
    """What requests were answered with.

    Attributes:
        token_s: Mean time between two tokens of a request.
        cpu_s: Processor time for each token of all requests.
    """

    token_s: float
    cpu_s: float


class Subject(Protocol):
    """What is measured; a context manager that starts and ends it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: Any) -> None: ...

    def wait(self) -> None:
        """Until it is up."""

    def answer(self, num_clients: int, num_tokens: int, seed: int) -> Answers:
        """Requests of so many clients at once, each of so many tokens."""


def environment() -> dict[str, str]:
    """Of an engine's process, with what vLLM chooses itself."""
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT_TO_VLLM}
    return kept | _ENVIRONMENT


class Served:
    """One `vllm serve`.

    Args:
        model_dir: With its tokenizer.
        arguments: Of its engine.
    """

    def __init__(self, model_dir: Path, arguments: Mapping[str, Any]) -> None:
        self._port = free_port()
        self._command = [
            *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
            *("--host", "127.0.0.1", "--port", str(self._port), *_flags(arguments)),
        ]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                self._command, stdout=self._log, stderr=self._log, env=environment()
            )
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def wait(self) -> None:
        """Until it is up."""
        wait_for(self._is_up)

    def answer(self, num_clients: int, num_tokens: int, seed: int) -> Answers:
        """Requests of so many clients at once, each of so many tokens."""
        before_s = cpu_s([self._process.pid])
        times_s = asyncio.run(self._ask(num_clients, num_tokens, seed))
        spent_s = cpu_s([self._process.pid]) - before_s
        return Answers(sum(times_s) / len(times_s), spent_s / (num_clients * num_tokens))

    async def _ask(self, num_clients: int, num_tokens: int, seed: int) -> list[float]:
        rng = random.Random(seed)
        return await asyncio.gather(
            *(self._stream(num_tokens, prompt_of(rng)) for _ in range(num_clients))
        )

    async def _stream(self, num_tokens: int, prompt: list[int]) -> float:
        """One streamed answer; mean seconds between its tokens."""
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
        first_s = last_s = 0.0
        is_whole = False
        async for line in reader:
            if line.startswith(b"data: {"):
                last_s = time.perf_counter()
                first_s = first_s or last_s
            is_whole = is_whole or line.startswith(b"data: [DONE]")
        writer.close()
        if not is_whole:
            raise RuntimeError(f"a stream must end with [DONE]; the server's log:\n{self._tail()}")
        return (last_s - first_s) / (num_tokens - 1)

    def _is_up(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"vllm serve must start; its log:\n{self._tail()}")
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/v1/models", timeout=10):
            return True

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def prompt_of(rng: random.Random) -> list[int]:
    """Ids of a prompt that no cache has."""
    return [rng.choice(TEXT_IDS) for _ in range(PROMPT_TOKENS)]


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """As `vllm serve` takes them."""
    from sola_sched.serving.engine import to_arguments

    return list(to_arguments(dict(arguments)))
