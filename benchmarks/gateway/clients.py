"""Requests of `vllm bench serve`, and the processor time that servers spend on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Environment of every process with vLLM or Ray in it.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # replicas count as much as the clients and the gateway
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_START_S = 600.0


@dataclass(frozen=True)
class Traffic:
    """What the clients ask for.

    Attributes:
        input_len, output_len: Tokens, drawn from within 30 %.
        ttft_s, tpot_s: Targets.
    """

    input_len: int = 128
    output_len: int = 48
    ttft_s: float = 1.0
    tpot_s: float = 0.1


class Bench:
    """One run of `vllm bench serve`, which begins at once.

    Args:
        url: Of the server.
        model_dir: With its tokenizer.
        traffic: Lengths and targets.
        options: Further options by name.
    """

    def __init__(self, url: str, model_dir: Path, traffic: Traffic, **options: Any) -> None:
        self._traffic = traffic
        self._folder = Path(tempfile.mkdtemp(prefix="bench-gateway-"))
        command = [
            *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
            *("--model", "tiny", "--tokenizer", str(model_dir), "--dataset-name", "random"),
            *("--random-input-len", str(traffic.input_len)),
            *("--random-output-len", str(traffic.output_len)),
            *("--random-range-ratio", "0.3", "--ignore-eos", "--temperature", "0"),
            *("--save-result", "--save-detailed", "--result-dir", str(self._folder)),
            *("--result-filename", "result.json", "--disable-tqdm"),
        ]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **QUIET}
            )

    def finish(self) -> dict[str, Any]:
        """Wait for its end; what came of it."""
        if self._process.wait() != 0:
            log = (self._folder / "log").read_text()[-2000:]
            raise RuntimeError(f"vllm bench serve failed:\n{log}")
        result = json.loads((self._folder / "result.json").read_text())
        attained = 0
        columns = (result["ttfts"], result["itls"], result["errors"])
        for ttft_s, gaps_s, error in zip(*columns, strict=True):
            tpot_s = sum(gaps_s) / len(gaps_s) if gaps_s else 0.0
            is_met = ttft_s <= self._traffic.ttft_s and tpot_s <= self._traffic.tpot_s
            attained += not error and is_met
        return {
            "num_requests": len(result["ttfts"]),
            "attained": attained,
            "failed": result["failed"],
            "output_tokens": result["total_output_tokens"],
            "tokens_per_s": round(result["output_throughput"], 1),
            "median_ttft_ms": round(result["median_ttft_ms"], 1),
            "p99_ttft_ms": round(result["p99_ttft_ms"], 1),
            "median_tpot_ms": round(result["median_tpot_ms"], 2),
            "p99_tpot_ms": round(result["p99_tpot_ms"], 2),
        }


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time of processes so far, without their children, seconds."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def get_json(url: str) -> Any:
    """The answer to a GET."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def wait_for(condition: Callable[[], Any], limit_s: float = _START_S) -> None:
    """Wait until `condition` is true; errors of a connection are not."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"nothing was ready within {limit_s:g} s")
