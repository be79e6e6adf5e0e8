"""Compares routers on a cluster of unequal GPUs in virtual time, with real schedulers inside.

    python benchmarks/cluster/compare_routers.py --instances llama-3-8b-a100:2 llama-3-8b-v100:2 \
        --rates 8 12 16 --slo 1000 60 --num-prompts 400 --seeds 0 1 2

Each line is one run: the share of requests within both targets, the same requests for all routers.
Lengths are those of the azure_conv trace of the data sets where it is found, else lognormal with
its quartiles; arrivals are Poisson.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.config.slo import SloTarget
from sola_sched.simulator import StepProfile, VirtualEngine, VirtualRequest, load_step_profile
from sola_sched.simulator.cluster.cluster import VirtualCluster
from sola_sched.simulator.cluster.engine import ClusterRequest
from sola_sched.simulator.cluster.faults import INSTANT, Links
from sola_sched.simulator.cluster.lengths import true_lengths
from sola_sched.simulator.cluster.real import RealInstance, Slowed
from sola_sched.simulator.cluster.step_model import BatchTime

DATA = Path(os.environ.get("SOLA_SCHED_DATA") or Path(__file__).parents[3] / "shared" / "data")


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of so many requests."""
    path = DATA / "azure_conv_2023.csv.gz"
    rng = np.random.default_rng([seed, 5])
    if path.is_file():
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = [
                (int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)
            ]
        rows = [(p, o) for p, o in rows if p >= 1 and o >= 1 and p + o <= 8000]
        return [rows[int(i)] for i in rng.integers(0, len(rows), count)]
    prompts = rng.lognormal(6.9, 0.9, count).clip(10, 7000).astype(int)
    outputs = rng.lognormal(5.0, 0.8, count).clip(2, 1000).astype(int)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def requests(count: int, rate: float, slo: SloTarget, seed: int) -> list[ClusterRequest]:
    """Poisson arrivals at a rate."""
    arrivals = np.cumsum(np.random.default_rng([seed, 6]).exponential(1.0 / rate, count))
    return [
        ClusterRequest(
            VirtualRequest(
                f"r{i}", arrival_s=float(arrivals[i]), prompt_len=prompt, output_len=output,
                max_tokens=4000,
                extra_args={"ttft_slo_ms": 1e3 * slo.ttft_s, "tpot_slo_ms": 1e3 * slo.tpot_s},
            ),
            slo,
        )
        for i, (prompt, output) in enumerate(lengths(count, seed))
    ]  # fmt: skip


def instance(profile: StepProfile, scheduler: str, slo: SloTarget) -> RealInstance:
    """One engine with vLLM's scheduler or ours."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from sola_sched.vllm_adapter.scheduler import Scheduler

    steps = Slowed(BatchTime(profile.step_time))  # type: ignore[arg-type]
    targets = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "log_interval_s": 0}
    engine = VirtualEngine(
        Scheduler if scheduler == "sola" else AsyncScheduler,
        model=profile.model_config(),
        num_blocks=profile.num_blocks or 1000,
        block_size=profile.block_size,
        max_model_len=profile.max_model_len or 8192,
        max_num_seqs=256,
        max_num_batched_tokens=2048 if scheduler == "sola" else 512,
        async_scheduling=True,
        step_time=steps,
        additional_config={"sola_sched": targets} if scheduler == "sola" else {},
    )
    return RealInstance(engine, steps, num_gpus=profile.tensor_parallel)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every router at every rate and seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", nargs="+", required=True, metavar="PROFILE:NUMBER")
    parser.add_argument(
        "--routers", nargs="+", default=sorted(ALL_ROUTERS), choices=sorted(ALL_ROUTERS)
    )
    parser.add_argument("--scheduler", choices=("sola", "stock"), default="sola")
    parser.add_argument("--rates", nargs="+", type=float, required=True)
    parser.add_argument("--slo", nargs=2, type=float, default=(1000, 60), metavar=("TTFT", "TPOT"))
    parser.add_argument("--num-prompts", type=int, default=400)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--true-lengths", action="store_true", help="instead of past outputs")
    parser.add_argument("--instant", action="store_true", help="reports and sending take no time")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="append a JSON line for each run"
    )
    args = parser.parse_args(argv)
    slo = SloTarget(*(1e-3 * ms for ms in args.slo))
    profiles = [
        load_step_profile(name)
        for name, number in (item.split(":") for item in args.instances)
        for _ in range(int(number))
    ]
    for rate in args.rates:
        for name in args.routers:
            for seed in args.seeds:
                began_s = time.process_time()
                cluster = VirtualCluster(
                    [instance(profile, args.scheduler, slo) for profile in profiles],
                    ALL_ROUTERS[name](seed),
                    links=INSTANT if args.instant else Links(),
                    predict=true_lengths if args.true_lengths else None,
                    seed=seed,
                )
                run = cluster.run(requests(args.num_prompts, rate, slo, seed))
                ttft_s, tpot_s = run.percentiles(99)
                row = {
                    "instances": args.instances, "scheduler": args.scheduler, "router": name,
                    "rate": rate, "seed": seed, "slo_ms": list(args.slo),
                    "attained": round(run.attainment, 4), "p99_ttft_s": round(ttft_s, 3),
                    "p99_tpot_s": round(tpot_s, 4),
                    "shares": [round(x, 3) for x in run.shares(len(profiles))],
                    "cpu_s": round(time.process_time() - began_s, 1),
                }  # fmt: skip
                print(json.dumps(row), flush=True)
                if args.output:
                    with args.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
