"""The part of a first run that gives the same numbers on every machine: virtual time."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.report import intervals, plots, results
from sola_sched.bench.report.results import Result, RunInfo, SloSource
from sola_sched.bench.report.table import best_stock
from sola_sched.config.progress_bar import tqdm_class
from sola_sched.config.slo import SloTarget
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.workloads.datasets import DatasetOptions, build
from sola_sched.workloads.workload import Workload

if TYPE_CHECKING:
    from sola_sched.bench.backends.simulation import SimBackend

PROFILE = "llama-3-8b-a100"
SCHEDULERS = ("stock:512", "stock:2048", "stock:8192", "sola")
#: Requests per second: below what stock vLLM sustains, where it begins to fail, and past it.
RATES = (2.5, 3.0, 3.5)
NUM_REQUESTS = 400
#: 10 x the latency of a request that has the profile's GPU to itself, seconds.
TTFT_S, TPOT_S = 2.421, 0.1051
ROWS, FIGURE = "virtual-time.jsonl", "virtual-time.png"
_MAX_NUM_BATCHED_TOKENS = 8192
_NUM_WORKERS = 2
#: In a row: the 95 % interval of its attainment.
_INTERVAL = "attainment_interval"

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
        directory: Of results and picture.
        say: Takes lines of text.
        rates, num_requests: Of the runs.
        is_hidden: No progress bar.
    """
    say(
        f"1. Virtual time: vLLM's own scheduler and sola_sched's in vLLM's loop, step times of "
        f"Llama-3-8B on an A100 ({PROFILE}, computed), {num_requests} requests with lengths like "
        f"ShareGPT's. Targets: TTFT {TTFT_S:.3g} s, TPOT {1e3 * TPOT_S:.3g} ms, 10 x the latency "
        "of a request alone. The same numbers on every machine."
    )
    tqdm = tqdm_class()
    runs = list(itertools.product(rates, SCHEDULERS))
    # Spawned, since a fork of a process with threads (OpenMP, the bar) may hang.
    workers = max(1, min(_NUM_WORKERS, os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        made = pool.map(functools.partial(_run, num_requests), *zip(*runs, strict=True))
        found = list(tqdm(made, "virtual time", len(runs), unit="run", disable=is_hidden))
    results.save(directory / ROWS, found)
    best = best_stock(found)
    say(f"   {'requests/s':>10}  {'best stock vLLM, 95 % interval':38}  sola_sched")
    for rate in rates:
        stock = best[rate]
        ours = next(
            r for r in found if r["request_rate"] == rate and r["scheduler"]["kind"] == "sola"
        )
        theirs = f"{_share(stock)}  {stock['scheduler']['label']}"
        say(f"   {rate:>10g}  {theirs:38}  {_share(ours)}")
    picture = plots.drawn(lambda: plots.plot_attainment(found, directory / FIGURE))
    say(f"   Picture: {picture}")
    return found


def _share(result: Result) -> str:
    return intervals.Estimate(result["attainment"], *result[_INTERVAL]).percent()


def make_backend() -> SimBackend:
    """The real schedulers, with the step times of `PROFILE`."""
    from sola_sched.bench.backends.simulation import SimBackend, SimOptions

    args = {"max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS}
    return SimBackend(SimOptions(load_step_profile(PROFILE), engine_args=args))


def make_workload(backend: SimBackend, num_requests: int = NUM_REQUESTS) -> Workload:
    """Requests with lengths like ShareGPT's, the same at every rate."""
    return build(DatasetOptions(num_prompts=num_requests), backend.limits)


def _run(num_requests: int, rate: float, scheduler: str) -> Result:
    """One run, in this process."""
    environment.prepare(None, is_random=True)
    backend, spec = make_backend(), parse_scheduler(scheduler)
    workload = make_workload(backend, num_requests).at_rate(rate)
    slo = SloSource(SloTarget(TTFT_S, TPOT_S), "10 x the latency of a request alone")
    outcome = backend.run(workload, spec, slo.target)
    info = RunInfo(
        backend.name, backend.model_id, backend.tokenizer_id, "sharegpt-like", seed=0, slo=slo
    )
    result = results.make_result(info, workload, spec, outcome)
    found = intervals.share(result["attained"])
    return results.without_details(result) | {_INTERVAL: [found.low, found.high]}
