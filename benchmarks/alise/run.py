"""Latency under `policy=alise` in virtual time: `python benchmarks/alise/run.py NAME`.

Rows are appended to `benchmarks/results/alise/runs.jsonl`; what is there is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from experiments import EXPERIMENTS
from setups import RESULTS, Run, folder, make_workload, scheduler_of

Row = dict[str, Any]
_SOURCE = Path(__file__).resolve().parents[2] / "sola_sched"


_ENGINE = ("simulator/*.py", "bench/sim_*.py")
_POLICY = ("cost_*.py", "execution.py", "ewt.py", "monitor.py", "prediction.py", "state.py")
_PLANNER = {"sola:policy=alise": ("planner/alise*.py", "planner/levels.py")}
_OTHERS = ("planner/attain*.py", "planner/deadlines.py")


def key_of(run: Run) -> str:
    """Changes with the parameters and the source of the scheduler."""
    patterns = _ENGINE
    if run.scheduler.startswith("sola"):
        name = run.scheduler.partition(",")[0]
        patterns += _POLICY + _PLANNER.get(name, _OTHERS)
    files = [file for pattern in patterns for file in sorted(_SOURCE.glob(pattern))]
    digest = hashlib.sha256(json.dumps(asdict(run), sort_keys=True).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def run_one(run: Run, data: Path | None) -> Row:
    """One run, in this process."""
    from sola_sched import metrics
    from sola_sched.bench import environment, sweep
    from sola_sched.bench.backend import parse_scheduler
    from sola_sched.bench.calibrate import measure_slo

    environment.prepare(None, is_random=True)
    backend = sweep.make_backend(run.profile)
    workload = make_workload(run, backend.limits, data)
    slo = measure_slo(backend, workload, parse_scheduler("stock")).target
    outcome = backend.run(workload, parse_scheduler(scheduler_of(run)), slo)
    done = [record for record in outcome.records if record.completed]
    latency_s = np.array([record.latency_s for record in done])
    ttft = metrics.describe((record.ttft_s for record in done), (50.0, 99.0))
    assert outcome.scheduler is not None
    row = {
        "normalized_latency_s": metrics.mean_normalized_latency_s(outcome.records),
        "mean_latency_s": float(latency_s.mean()),
        "p50_latency_s": float(np.percentile(latency_s, 50)),
        "p99_latency_s": float(np.percentile(latency_s, 99)),
        "worst_latency_s": float(latency_s.max()),
        "mean_ttft_s": ttft["mean"],
        "worst_ttft_s": max(record.ttft_s for record in done),
        "attainment": metrics.attainment_ratio(metrics.attained(outcome.records, slo)),
        "num_completed": len(done),
        "tokens_per_s": sum(r.num_output_tokens for r in done) / outcome.duration_s,
        "mean_running": outcome.scheduler.mean_num_running,
        "num_preemptions": outcome.scheduler.num_preemptions,
        "duration_s": outcome.duration_s,
        "cpu_us_per_step": 1e6 * outcome.scheduler.cpu_s / max(1, outcome.scheduler.num_steps),
    }
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
    return {"key": key_of(run), **asdict(run), **rounded}


def rows_of(runs: Iterable[Run], path: Path, data: Path | None, workers: int) -> list[Row]:
    """A row per run, run where it is missing."""
    wanted = list(dict.fromkeys(runs))
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    done = {row["key"]: row for row in map(json.loads, text.splitlines())}
    missing = [run for run in wanted if key_of(run) not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        path.open("a", encoding="utf-8") as out,
        ProcessPoolExecutor(max(1, workers), mp_context=get_context("spawn")) as pool,
    ):
        for number, future in enumerate(
            as_completed([pool.submit(run_one, run, data) for run in missing]), 1
        ):
            row = future.result()
            done[row["key"]] = row
            out.write(json.dumps(row, separators=(",", ":")) + "\n")
            out.flush()
            print(f"{number}/{len(missing)}", row["dataset"], row["rate_per_s"], row["scheduler"],
                  row["normalized_latency_s"], row["mean_latency_s"], flush=True)  # fmt: skip
    return [done[key_of(run)] for run in wanted]


def stored(runs: Iterable[Run], path: Path) -> list[Row]:
    """The rows that there are, the last of each, by whatever source they were made."""
    names = list(asdict(next(iter(runs := list(runs)))))
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    found = {tuple(row[name] for name in names): row for row in rows}
    keys = [tuple(asdict(run).values()) for run in dict.fromkeys(runs)]
    return [found[key] for key in keys if key in found]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(EXPERIMENTS))
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="of the experiment's setups")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="few, short runs: does it work?")
    parser.add_argument("--stored", action="store_true", help="tables of the rows there are")
    parser.add_argument("--plots", type=Path, help="draw the figure into this folder")
    args = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    experiment = EXPERIMENTS[args.name]
    path = args.results / ("runs-quick.jsonl" if args.quick else "runs.jsonl")
    runs = experiment.runs(args.only, args.quick)
    if args.stored:
        rows = stored(runs, path)
    else:
        rows = rows_of(runs, path, folder(args.data), args.workers)
    table = experiment.table(rows)
    print(table)
    if not args.only and not args.quick:
        (args.results / f"{args.name}.md").write_text(table + "\n", encoding="utf-8")
    if args.plots is not None:
        from figure import plot

        print(plot(rows, args.plots / "alise-rates.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
