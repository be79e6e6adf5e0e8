"""Runs of `plan` that take a moment."""

from __future__ import annotations

import json
from pathlib import Path

from sola_sched.plan.cli import main

BASE = ["--model", "llama-3-8b", "--disable-tqdm", "--num-prompts", "150"]


FAST = [
    *BASE,
    "--tensor-parallel-size",
    "1",
    "--schedulers",
    "sola",
    "--routers",
    "least-ttft",
    "--max-num-seqs",
    "256",
    "--no-check",
]


LOAD = ["--request-rate", "6", "--dataset-name", "random", "--random-input-len", "1000"]


SLO = ["--slo", "ttft:1000", "tpot:60"]


def plan(tmp_path: Path, *args: str) -> tuple[int, dict]:
    output = tmp_path / "plan.json"
    code = main([*args, "--output", str(output)])
    return code, json.loads(output.read_text()) if output.exists() else {}
