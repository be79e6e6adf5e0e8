"""A program: vLLM's engine in this process, asked by the calls of `LLMEngine`.

It reads what to do and writes what came of it, as lines of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Before each line that is meant for the other process.
MARK = "answer: "


def _answer(engine: Any, num_clients: int, num_tokens: int, seed: int) -> list[float]:
    """The values of `serving.process.Answers`."""
    from vllm import SamplingParams

    from serving.process import mean_and_quiet, prompt_of

    rng = random.Random(seed)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    start_cpu_s = time.process_time()
    for number in range(num_clients):
        engine.add_request(f"{seed}-{number}", {"prompt_token_ids": prompt_of(rng)}, params)
    came_s: defaultdict[str, list[float]] = defaultdict(list)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            came_s[output.request_id].append(now_s)
    cpu_s = time.process_time() - start_cpu_s
    return [*mean_and_quiet(came_s.values()), cpu_s / (num_clients * num_tokens)]


def _main(arguments: Mapping[str, Any]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    print(f"{MARK}[]", flush=True)
    for line in sys.stdin:
        answers = _answer(engine, *json.loads(line))
        print(f"{MARK}{json.dumps(answers)}", flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
