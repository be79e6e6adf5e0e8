"""A real server - API, engine core and worker processes - with a tiny model."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_ray import free_port
from tiny_llama import VOCAB_SIZE, write_byte_tokenizer, write_tiny_llama

START_LIMIT_S = 600.0


@dataclass(frozen=True)
class Answer:
    """What a server answered: status, headers and body."""

    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def json(self) -> dict[str, Any]:
        """The body, or the first event of a stream."""
        first: dict[str, Any] = json.loads(self.text.removeprefix("data: ").partition("\n\n")[0])
        return first


@dataclass(frozen=True)
class Server:
    """A running server: its address, the folder of its model, and its log."""

    url: str
    model_dir: Path
    log: Path

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """GET, or POST with a body."""
        data = None if body is None else json.dumps({"model": "tiny", **body}).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Answer(response.status, response.headers, response.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read().decode())

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body, or the first event of a stream."""
        answer = self.ask(path, body)
        return answer.status, answer.json

    def complete(self, xargs: dict[str, Any] | None, **options: Any) -> tuple[int, dict[str, Any]]:
        """A completion of five tokens."""
        body = {"prompt": "to be or not", "max_tokens": 5, "ignore_eos": True, **options}
        return self.post("/v1/completions", body | ({"vllm_xargs": xargs} if xargs else {}))


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{server.log.read_text()[-4000:]}")


@contextmanager
def serving(
    folder: Path, sola: Mapping[str, Any], *arguments: str, vocab_size: int = VOCAB_SIZE
) -> Iterator[Server]:
    """Serve a tiny model with the scheduler selected by flag.

    Args:
        folder: Empty; for model and log.
        sola: Our options.
        arguments: More for the server.
        vocab_size: Of the model; the tokenizer knows 259 tokens, others have no text.
    """
    model_dir = write_tiny_llama(folder / "tiny", vocab_size=vocab_size)
    write_byte_tokenizer(model_dir)
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}", model_dir, folder / "server.log")
    options = json.dumps({"sola_sched": dict(sola)})
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_dir), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--block-size", "32", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"),
        *("--num-gpu-blocks-override", "60", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.2"),  # of the host: others may hold most of it
        *("--scheduler-cls", "sola_sched.Scheduler", "--additional-config", options),
        *arguments,
    ]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
        try:
            _wait_until_ready(process, server)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
