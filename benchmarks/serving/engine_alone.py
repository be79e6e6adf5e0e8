"""vLLM's engine in one process, asked by the calls of `LLMEngine`: no HTTP, no other process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.engine_program import MARK
from serving.process import Answers, EngineProcess

_PROGRAM = Path(__file__).with_name("engine_program.py")
#: One thread: the engine and the model take turns anyway.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class EngineAlone(EngineProcess):
    """A process with one engine.

    Args:
        model_dir: With its tokenizer.
        arguments: Of the engine.
        environment: Beside what all engines have here.
    """

    def __init__(
        self, model_dir: Path, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        told = json.dumps({"model": str(model_dir), **arguments})
        super().__init__(
            [sys.executable, "-P", str(_PROGRAM), told], {**ENVIRONMENT, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait(self) -> None:
        """See `EngineProcess`."""
        self._read()

    def answer(self, num_clients: int, num_tokens: int, seed: int) -> Answers:
        """See `EngineProcess`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([num_clients, num_tokens, seed]) + "\n")
        self.process.stdin.flush()
        return Answers(*self._read())

    def _stop(self) -> None:
        """At once: it has nothing to put in order."""
        self.process.kill()
        self.process.communicate()

    def _read(self) -> list[float]:
        """The next line that is meant for us."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                said: list[float] = json.loads(line.removeprefix(MARK))
                return said
        raise RuntimeError(f"the engine must run; its log:\n{self.log()}")
