"""The part of a first run that gives the same numbers on every machine: virtual time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sola_sched.bench.report import intervals, plots
from sola_sched.bench.report.results import Result
from sola_sched.bench.report.table import best_stock
from sola_sched.bench.research import sweep
from sola_sched.bench.research.points import SYNTHETIC, Point
from sola_sched.bench.research.resumable import Row

PROFILE = "llama-3-8b-a100"
SCHEDULERS = ("stock:512", "stock:2048", "stock:8192", "sola")
#: Requests per second: below what stock vLLM sustains, where it begins to fail, and past it.
RATES = (2.5, 3.0, 3.5)
NUM_REQUESTS = 400
#: 10 x the latency of a request that has the profile's GPU to itself, seconds.
TTFT_S, TPOT_S = 2.093, 0.1048
ROWS, FIGURE = "virtual-time.jsonl", "virtual-time.png"
_NUM_WORKERS = 2

Say = Callable[[str], None]


def run(
    directory: Path,
    say: Say,
    *,
    rates: Sequence[float] = RATES,
    num_requests: int = NUM_REQUESTS,
    is_hidden: bool = False,
) -> list[Result]:
    """Compare in virtual time; say what came out and where the picture is.

    Args:
        directory: Of rows and picture; rows of the same source that are there are not made again.
        say: Takes lines of text.
        rates, num_requests: Of the runs.
        is_hidden: No progress bar.
    """
    points = [
        Point(PROFILE, SYNTHETIC, rate, TTFT_S, TPOT_S, scheduler, num_requests=num_requests)
        for rate in rates
        for scheduler in SCHEDULERS
    ]
    say(
        f"1. Virtual time: vLLM's own scheduler and sola_sched's in vLLM's loop, step times of "
        f"Llama-3-8B on an A100 ({PROFILE}, computed), {num_requests} requests with lengths like "
        f"ShareGPT's. Targets: TTFT {TTFT_S:.3g} s, TPOT {1e3 * TPOT_S:.3g} ms, 10 x the latency "
        "of a request alone. The same numbers on every machine."
    )
    workers = max(1, min(_NUM_WORKERS, os.cpu_count() or 1))
    rows = sweep.run(
        points, directory / ROWS, num_workers=workers, title="virtual time", is_hidden=is_hidden
    )
    found = [_result(row) for row in rows]
    best = best_stock(found)
    say(f"   {'requests/s':>10}  {'best stock vLLM, 95 % interval':38}  sola_sched")
    for rate in rates:
        stock = best[rate]
        ours = next(
            r for r in found if r["request_rate"] == rate and r["scheduler"]["kind"] == "sola"
        )
        theirs = f"{_share(stock)}  {stock['scheduler']['label']}"
        say(f"   {rate:>10g}  {theirs:38}  {_share(ours)}")
    say(f"   Picture: {plots.plot_attainment(found, directory / FIGURE)}")
    return found


def _share(result: Result) -> str:
    num = round(result["attainment"] * result["num_prompts"])
    flags = [True] * num + [False] * (result["num_prompts"] - num)
    return intervals.share(flags).percent()


def _result(row: Row) -> Result:
    """What tables and figures of the benchmark need of a row."""
    label = row["scheduler"]
    return {
        "request_rate": row["rate_per_s"],
        "request_throughput": row["num_requests"] / row["duration_s"],
        "request_goodput": row["goodput_per_s"],
        "attainment": row["attainment"],
        "mean_ttft_ms": 1e3 * (row["mean_ttft_s"] or math.nan),
        "scheduler": {"label": label, "kind": "sola" if label.startswith("sola") else "stock"},
        "model_id": row["profile"],
        "dataset_name": row["dataset"],
        "num_prompts": row["num_requests"],
    }
