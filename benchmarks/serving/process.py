"""Engines in processes of their own, and what they answer."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

#: Options that an operator may leave alone, so that vLLM chooses: threads and cores among them.
_LEFT_TO_VLLM = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL")
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).resolve().parents[1]),  # for `idle_connector`
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_TAIL = 3000
PROMPT_TOKENS = 32
#: Ids of the tiny model's tokens that are text.
TEXT_IDS = range(40, 100)


@dataclass(frozen=True)
class Answers:
    """What requests were answered with.

    Attributes:
        token_s: Mean time between two tokens of a request.
        quiet_s: Tenth percentile of these times, over all requests.
        cpu_s: Processor time for each token of all requests.
    """

    token_s: float
    quiet_s: float
    cpu_s: float


def mean_and_quiet(streams: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Mean and tenth percentile of the times between tokens of a request, in seconds.

    Args:
        streams: When the tokens of each request came.
    """
    gaps_s = [end - start for came_s in streams for start, end in itertools.pairwise(came_s)]
    return statistics.mean(gaps_s), statistics.quantiles(gaps_s, n=10)[0]


class EngineProcess(ABC):
    """A process with an engine; a context manager that starts and ends it.

    Args:
        command: Of the process.
        environment: Beside what all engines have here.
        pipes: Arguments of `Popen`; output that goes nowhere else goes to the log.
    """

    process: subprocess.Popen[Any]

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        **pipes: Any,
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _LEFT_TO_VLLM}
        self._command = list(command)
        self._options = {"env": kept | _ENVIRONMENT | dict(environment or {}), **pipes}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            outputs = {"stdout": self._log, "stderr": self._log}
            self.process = subprocess.Popen(self._command, **(outputs | self._options))
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

    def log(self) -> str:
        """The end of what it has written."""
        self._log.seek(0)
        return self._log.read()[-_TAIL:].decode(errors="replace")

    @abstractmethod
    def wait(self) -> None:
        """Until it is up."""

    @abstractmethod
    def answer(self, num_clients: int, num_tokens: int, seed: int) -> Answers:
        """Requests of so many clients at once, each of so many tokens."""

    @abstractmethod
    def _stop(self) -> None:
        """End the process."""


def prompt_of(rng: random.Random) -> list[int]:
    """Ids of a prompt that no cache has."""
    return [rng.choice(TEXT_IDS) for _ in range(PROMPT_TOKENS)]
