"""Lengths and arrival times of the requests of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harness.points import read_lengths
from sola_sched.errors import ConfigError
from sola_sched.workloads.workload import arrival_times

if TYPE_CHECKING:
    from cluster.cases import Case

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Requests:
    """What comes to the gateway.

    Attributes:
        prompts, outputs: Tokens of each [n].
        arrival_s: Seconds [n], ascending.
    """

    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    arrival_s: FloatArray


def make_requests(case: Case, max_model_len: int, data: Path | None) -> Requests:
    """The requests of a case, the same for every cluster of engines with that context.

    `Case.arrivals` is ``poisson``, ``gamma:SHAPE`` (less than 1 is bursty), or ``recorded``: those
    of the file stretched to the rate, seed n taking the n-th run of its rows.
    """
    rng = np.random.default_rng([case.seed, 61])
    table = read_lengths(case.dataset, max_model_len, data)
    size = case.num_requests
    kind, _, shape = case.arrivals.partition(":")
    if kind == "recorded":
        start = case.seed * size
        if start + size > len(table.prompt) or not np.isfinite(table.arrival_s).all():
            raise ConfigError(
                f"'recorded' arrivals need {start + size} rows with times for seed {case.seed} "
                f"(got {len(table.prompt)} in {case.dataset}); use fewer requests or poisson."
            )
        chosen = np.argsort(table.arrival_s, kind="stable")[start : start + size]
        times_s = table.arrival_s[chosen] - table.arrival_s[chosen[0]]
        arrival_s = times_s * (size / case.rate_per_s / times_s[-1])
    else:
        chosen = np.resize(rng.permutation(len(table.prompt)), size)
        if math.isinf(case.rate_per_s):
            arrival_s = np.zeros(size)
        else:
            burstiness = float(shape) if kind == "gamma" else 1.0
            arrival_s = arrival_times(size, case.rate_per_s, burstiness, seed=case.seed)
    outputs = np.clip(table.output[chosen] * case.output_factor, 1, max_model_len - 1)
    return Requests(np.minimum(table.prompt[chosen], max_model_len - outputs), outputs, arrival_s)
