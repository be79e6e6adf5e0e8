"""Clusters in virtual time: the fast model's error and speed, and the simple routers compared.

    python benchmarks/cluster/virtual.py fast       # against the real schedulers, one engine
    python benchmarks/cluster/virtual.py routers    # by the fast model; --real with the schedulers

Llama-3-8B by the computed profiles; lengths of `--dataset-name`, Poisson arrivals, seeds 0 to 2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from sola_sched.bench.args import Parser, dataset_group
from sola_sched.bench.backends import environment
from sola_sched.cluster.routers import ROUTERS
from sola_sched.plan.configurations import Configuration, profile
from sola_sched.plan.evaluate import fast_engine, outcome, real_engine, run_fast, run_real
from sola_sched.plan.load import Load, make_load
from sola_sched.simulator.cluster.cluster import VirtualCluster

MODEL = "llama-3-8b"
#: Requests per second of the whole cluster.
RATES = {"fast": (4.0, 7.0, 9.0), "equal": (36.0, 44.0), "unequal": (22.0, 28.0)}
CLUSTERS = {"equal": ("a100",) * 4, "unequal": ("h100", "v100")}


def configuration(gpu: str, scheduler: str, chunk: int) -> Configuration:
    return Configuration(gpu, 1.0, 1, scheduler, 256, chunk, "single")


def load(args: argparse.Namespace, rate: float, seed: int) -> Load:
    shape = profile(MODEL, "a100", 1)
    args.request_rate, args.seed, args.self_timed = rate, seed, False
    return make_load(args, shape.max_model_len or 0, shape.vocab_size)


def fast(args: argparse.Namespace) -> None:
    print("scheduler   rate seed  attained: real  fast  TTFT p50  p99  TPOT p50  p99  times faster")
    points, speeds = [], []
    for scheduler, chunk in (("stock", 512), ("stock", 2048), ("sola", 8192)):
        for rate in RATES["fast"]:
            for seed in args.seeds:
                work, choice = load(args, rate, seed), configuration("a100", scheduler, chunk)
                times_s, outcomes = [], []
                for run in (run_real, run_fast):
                    begin_s = time.process_time()
                    outcomes.append(run(MODEL, choice, work, seed, 0.95))
                    times_s.append(time.process_time() - begin_s)
                real, model = outcomes
                errors = [
                    a / b - 1.0
                    for a, b in zip(
                        (*model.ttft_ms, *model.tpot_ms),
                        (*real.ttft_ms, *real.tpot_ms),
                        strict=True,
                    )
                ]
                points.append(100 * (model.attainment - real.attainment))
                speeds.append(times_s[0] / times_s[1])
                print(
                    f"{scheduler + ':' + str(chunk):10s} {rate:5.1f} {seed:4d}  "
                    f"{real.attainment:14.1%} {model.attainment:5.1%}  "
                    + "  ".join(f"{error:+6.1%}" for error in errors)
                    + f"  {speeds[-1]:10.0f}",
                    flush=True,
                )
    print(
        f"Attainment: mean error {np.mean(np.abs(points)):.1f} points, largest "
        f"{np.max(np.abs(points)):.1f}; {np.min(speeds):.0f} to {np.max(speeds):.0f} times faster."
    )


def routers(args: argparse.Namespace) -> None:
    print("cluster  rate  router                attained, mean of seeds (each)")
    for name, gpus in CLUSTERS.items():
        for rate in RATES[name]:
            for router in sorted(ROUTERS):
                shares = []
                for seed in args.seeds:
                    work = load(args, rate, seed)
                    choices = [configuration(gpu, args.scheduler, 2048) for gpu in gpus]
                    make = real_engine if args.real else fast_engine
                    engines = [make(MODEL, choice, work, seed) for choice in choices]
                    start_s = 100.0  # past every warm-up
                    cluster = VirtualCluster(
                        engines, ROUTERS[router](seed), seed=seed, start_s=start_s
                    )
                    run = cluster.run(work.requests(start_s))
                    counted_s = start_s + work.counted_from_s
                    shares.append(outcome(choices[0], run.records, counted_s, 0.95).attainment)
                each = " ".join(f"{share:.1%}" for share in shares)
                print(
                    f"{name:8s} {rate:5.1f}  {router:20s} {np.mean(shares):7.1%} ({each})",
                    flush=True,
                )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("fast", "routers"))
    parser.add_argument("--slo", nargs="+", default=["ttft:1000", "tpot:60"])
    parser.add_argument("--slo-class", action="append", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--burstiness", type=float, default=1.0)
    parser.add_argument("--scheduler", default="sola", choices=("sola", "stock"))
    parser.add_argument("--real", action="store_true", help="routers: with the real schedulers")
    dataset_group(parser)
    args = parser.parse_args(argv)
    environment.prepare(None, is_random=True)
    (fast if args.experiment == "fast" else routers)(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
