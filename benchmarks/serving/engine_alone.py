"""vLLM's engine in one process, asked by the calls of `LLMEngine`: no HTTP, no other process.

Run as a program, it is that process: it reads what to do and writes what came of it, as lines of
JSON.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

#: Before each line that is meant for the other process.
_MARK = "answer: "
#: One thread: the engine and the model take turns anyway.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class EngineAlone:
    """A process with one engine.

    Args:
        model_dir: With its tokenizer.
        arguments: Of the engine.
    """

    def __init__(self, model_dir: Path, arguments: Mapping[str, Any]) -> None:
        self._arguments = json.dumps({"model": str(model_dir), **arguments})

    def __enter__(self) -> Self:
        from serving.served import environment

        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, self._arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                env=environment() | _ENVIRONMENT,
            )  # fmt: skip
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
        self._read()

    def answer(self, num_clients: int, num_tokens: int, seed: int) -> Any:
        """Requests of so many clients at once, each of so many tokens."""
        from serving.served import Answers

        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([num_clients, num_tokens, seed]) + "\n")
        self._process.stdin.flush()
        return Answers(*self._read())

    def _stop(self) -> None:
        """At once: it has nothing to put in order."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> list[float]:
        """The next line that is meant for us."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                said: list[float] = json.loads(line.removeprefix(_MARK))
                return said
        self._log.seek(0)
        log = self._log.read()[-3000:].decode(errors="replace")
        raise RuntimeError(f"the engine must run; its log:\n{log}")


def _answer(engine: Any, num_clients: int, num_tokens: int, seed: int) -> list[float]:
    """Seconds between two tokens, and processor time for each of all tokens."""
    from vllm import SamplingParams

    from serving.served import prompt_of

    rng = random.Random(seed)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    start_cpu_s = time.process_time()
    for number in range(num_clients):
        engine.add_request(f"{seed}-{number}", {"prompt_token_ids": prompt_of(rng)}, params)
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            first_s.setdefault(output.request_id, now_s)
            last_s[output.request_id] = now_s
    cpu_s = time.process_time() - start_cpu_s
    gaps_s = [(last_s[name] - first_s[name]) / (num_tokens - 1) for name in first_s]
    return [sum(gaps_s) / len(gaps_s), cpu_s / (num_clients * num_tokens)]


def _main(arguments: Mapping[str, Any]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    print(f"{_MARK}[]", flush=True)
    for line in sys.stdin:
        answers = _answer(engine, *json.loads(line))
        print(f"{_MARK}{json.dumps(answers)}", flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
