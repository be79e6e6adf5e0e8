"""`sola_sched.plan` and NVIDIA's aiconfigurator on the same question: how many GPUs?

Needs the command `aiconfigurator` of that package on PyPI, best in an environment of its own.
Llama-3-8B, requests of one length, since aiconfigurator knows no distribution and no arrivals. It
rests on the tables of kernels of which our measured profiles are made as well.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.plan.cli import main as plan
from sola_sched.simulator.steps.profile import profile_of
from sola_sched.simulator.steps.roofline import MODELS, make_profile

MODEL = "llama-3-8b"
PROMPT, OUTPUT, TTFT_MS, TPOT_MS = 2048, 256, 1000, 60
RATES = (20.0, 60.0)
#: Arrivals of a plan's runs: long enough for a queue to outgrow the TTFT target where an engine is
#: asked for more than it sustains.
ARRIVALS_S = 40.0
SYSTEMS = {"a100": "a100_sxm", "h100": "h100_sxm"}


def theirs(command: str, gpu: str, rate: float, folder: Path) -> dict[str, int]:
    """GPUs that aiconfigurator wants, by mode."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = profile_of(make_profile(MODEL, gpu)).model_config()
    config["max_position_embeddings"] = MODELS[MODEL].max_model_len
    (model / "config.json").write_text(json.dumps(config))
    out = folder / f"{gpu}-{rate:g}"
    subprocess.run(
        [
            command, "cli", "default", "--model-path", str(model), "--system", SYSTEMS[gpu],
            "--backend", "vllm", "--target-request-rate", f"{rate:g}", "--isl", str(PROMPT),
            "--osl", str(OUTPUT), "--ttft", str(TTFT_MS), "--tpot", str(TPOT_MS), "--no-color",
            "--save-dir", str(out),
        ],
        capture_output=True, check=False,
    )  # fmt: skip
    found = {}
    for mode in ("agg", "disagg"):
        tables = list(out.glob(f"*/{mode}/best_config_topn.csv"))
        if not tables:
            raise SystemExit(
                f"error: aiconfigurator must write {mode} results (got none in {out})."
            )
        with tables[0].open() as file:
            found[mode] = min(int(row["total_gpus_needed"]) for row in csv.DictReader(file))
    return found


def ours(gpu: str, rate: float, folder: Path) -> dict[str, int]:
    """GPUs that the plan wants, by mode; searched with the fast model.

    Pools are only tried as long as they cost no more than the cheapest without.
    """
    path = folder / f"plan-{gpu}-{rate:g}.json"
    arguments = [
        "--model", MODEL, "--gpu", f"{gpu}=1", "--request-rate", f"{rate:g}", "--dataset-name",
        "random", "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT),
        "--num-prompts", f"{ARRIVALS_S * rate:.0f}", "--slo", f"ttft:{TTFT_MS}", f"tpot:{TPOT_MS}",
        "--tensor-parallel-size", "1", "2", "--routers", "least-ttft", "--max-num-seqs", "256",
        "--schedulers", "sola", "stock:2048", "--no-check", "--disable-tqdm", "--output", str(path),
    ]  # fmt: skip
    if plan(arguments):
        raise SystemExit(f"error: the plan for {gpu} at {rate:g} requests per second failed.")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["configurations"]
    found = {}
    for mode, has_pools in (("agg", False), ("disagg", True)):
        attained = [
            r["num_gpus"] for r in rows if r["attained"] and bool(r["num_prefill"]) == has_pools
        ]
        if attained:
            found[mode] = min(attained)
    return found


def against(setup: Setup) -> Outcome:
    """The table.

    Raises:
        SystemExit: aiconfigurator is not there, or one of the two finds nothing.
    """
    command = shutil.which("aiconfigurator")
    if command is None:
        raise SystemExit("error: `aiconfigurator` must be on the PATH; pip install it.")
    head = ("GPU", "req/s", "aiconfigurator", "plan", "aiconfigurator, pools", "plan, pools")
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for gpu in SYSTEMS:
            for rate in RATES:
                their = theirs(command, gpu, rate, folder)
                own = ours(gpu, rate, folder)
                pairs = [
                    str(each.get(mode, f"> {own['agg']}"))
                    for mode in their
                    for each in (their, own)
                ]
                lines.append([gpu, f"{rate:g}", *pairs])
    return Outcome([], markdown(head, lines))
