"""Stock vLLM at every chunk size against `sola`, around the knee, on measured and computed steps.

`python benchmarks/fidelity/measured_load.py [--profiles NAME...]`: the experiment `load` of
`benchmarks/simulation` in short, for a look at how far its conclusions hang on the step times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "benchmarks" / "simulation"))

from setups import Setup, at_stock_rate, multiples, single_request_slo  # noqa: E402

from sola_sched.bench.research.points import Point  # noqa: E402

PROFILES = ("llama-3-8b-a100-measured", "llama-3-8b-h100-measured")
DATASETS = ("sharegpt", "azure-conv", "arxiv")
CHUNKS = (512, 1024, 2048, 4096, 8192)
LOADS = (0.8, 1.0, 1.25)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--profiles", nargs="+", default=PROFILES)
    add("--datasets", nargs="+", default=DATASETS)
    add("--loads", nargs="+", type=float, default=LOADS)
    add("--data", type=Path, default=_ROOT.parent / "shared" / "data")
    add("--results", type=Path, default=Path("measured-load.jsonl"), help="rows (default: here)")
    add("--num-requests", type=int, default=600)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    setup = Setup(args.data, args.results, num_requests=args.num_requests, seeds=(args.seed,))
    columns = ["profile", "data", "load", "requests/s", *map(str, CHUNKS), "sola"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    schedulers = [*(f"stock:{size}" for size in CHUNKS), "sola"]
    for profile in args.profiles:
        for file in setup.datasets(args.datasets):
            slo = single_request_slo(profile, file, 10.0, setup.data)
            base = Point(profile, file, 0.0, slo.ttft_s, slo.tpot_s, "stock")
            base = at_stock_rate(setup, base)
            for load, rate in zip(args.loads, multiples(base.rate_per_s, args.loads), strict=True):
                points = [
                    replace(base, rate_per_s=rate, scheduler=name, seed=args.seed)
                    for name in schedulers
                ]
                rows = setup.rows(points, f"{profile}, {file}, load {load:g}")
                shares = [f"{100 * row['attainment']:.1f}" for row in rows]
                cells = [profile, file.split(".")[0], f"{load:g}", f"{rate:g}", *shares]
                print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
