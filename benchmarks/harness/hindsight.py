"""What a scheduler could attain that knew the future: a lower bound beside the upper one.

`simulator.bound` says what nobody can pass. Between it and a scheduler lie two gaps: what the
relaxation gives away, and what nobody can know before it happens. Here is a schedule that exists:
ours, with true lengths, and told beforehand which requests to leave out. Whatever it attains could
be attained, with hindsight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.workloads.workload import Workload

if TYPE_CHECKING:
    from sola_sched.bench.backends.simulation import SimBackend

#: Nothing goes to requests that are lost: they are left out instead.
SCHEDULER = "sola:sim.predictor=oracle,best_effort_share=0"
_NUM_RUNS = 16
#: Chance of each request that is not in the best selection to be tried again, run by run.
_TRIED = (0.0, 0.5, 0.25, 0.1)


def attainable_with_hindsight(
    backend: SimBackend,
    workload: Workload,
    slo: SloTarget,
    *,
    num_runs: int = _NUM_RUNS,
    seed: int = 0,
) -> float:
    """Share of all requests that the best selection found attains, in a run of the simulator.

    A random local search: those that were attained in the best run so far, and some of the others,
    are served, and whoever is attained then is the new best selection if it is no smaller. The
    first run serves all.

    Args:
        backend: Step times and engine limits.
        workload: Requests with arrival times.
        slo: Targets of requests that have none of their own.
        num_runs: Runs of the whole workload, >= 1.
        seed: Of the requests tried again.
    """
    if num_runs < 1:
        raise ValueError(f"'num_runs' must be >= 1 (got {num_runs!r}).")
    rng = np.random.default_rng([seed, 9])
    spec = parse_scheduler(SCHEDULER)
    served = np.ones(len(workload.requests), dtype=bool)
    best = np.zeros_like(served)
    for index in range(num_runs):
        chosen = np.flatnonzero(served)
        requests = tuple(workload.requests[i] for i in chosen)
        outcome = backend.run(replace(workload, requests=requests), spec, slo)
        met = np.zeros_like(served)
        met[chosen[metrics.attained(outcome.records, slo)]] = True
        if met.sum() >= best.sum():
            best = met
        served = best | (rng.random(len(served)) < _TRIED[index % len(_TRIED)])
    return float(best.mean())
