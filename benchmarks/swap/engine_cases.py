"""One run by the clock on vLLM's real CPU engine with little KV memory."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sola_sched.bench.cli import main as bench_main
from swap.cases import policy_of

#: Blocks of 128 tokens for the bench's random model, which has 256 otherwise; rate, and targets
#: in ms.
NUM_BLOCKS, RATE_PER_S, SLO = 48, 2.3, ("ttft:2400", "tpot:140")


@dataclass(frozen=True)
class EngineCase:
    """Everything that decides a run; `policy` is that of `cases.Case`."""

    name: str
    seed: int
    scheduler: str
    policy: str
    num_prompts: int


def run(case: EngineCase) -> dict[str, Any]:
    """One run of `python -m sola_sched.bench`, in this process."""
    with tempfile.TemporaryDirectory() as folder, policy_of(case.policy):
        status = bench_main([
            "--clock", "wall", "--seed", str(case.seed), "--num-prompts", str(case.num_prompts),
            "--request-rate", str(RATE_PER_S), "--slo", *SLO,
            "--schedulers", case.scheduler, "--max-num-batched-tokens", "2048",
            "--engine-args", json.dumps({"num_gpu_blocks_override": NUM_BLOCKS}),
            "--result-dir", folder, "--result-filename", "run.json",
        ])  # fmt: skip
        if status:
            raise SystemExit(status)
        result = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))
    return {
        **asdict(case),
        "completed": result["completed"],
        "normalized_ms": result["mean_normalized_latency_ms"],
        "latency_s": 1e-3 * result["mean_e2el_ms"],
        "attained": result["attainment"],
        "tokens_per_s": result["output_throughput"],
        "num_preemptions": result["scheduler"]["num_preemptions"],
        "cpu_share": result.get("cpu_share"),
    }
