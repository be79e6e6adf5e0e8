"""A day's rise and fall: Eq. 7 with change points, a plain autoscaler, a fixed number."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cluster import testbeds
from cluster.arrivals import Requests
from cluster.cases import Case, cluster_requests, file_of, key_of, measures
from cluster.fast_error import error_of
from harness.markdown import markdown
from harness.points import read_lengths
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.cluster.scaling import InstanceScaler, ScalingLaw, ScalingOptions
from sola_sched.cluster.view import Views
from sola_sched.simulator.cluster.cluster import VirtualCluster
from sola_sched.simulator.cluster.scaling import Scaling, Utilization
from sola_sched.workloads.workload import arrival_times

_KIND = "llama-3-8b@a100:1"
_TTFT_S, _TPOT_S = 1.0, 0.06
#: A day in so many seconds; the rate of the night, of noon, and of a spike in the afternoon.
_DAY_S = 2400.0
_NIGHT, _NOON, _SPIKE = 4.0, 26.0, 12.0
_SPIKE_AT, _SPIKE_LONG = 0.7, 0.04
_STARTUP_S, _PERIOD_S = 30.0, 5.0
_DOWN_DELAY_S = 60.0
#: Requests per second that so many instances are taken to serve with nearly all in time: Eq. 7.
_RATES_OF = {1: 7.0, 4: 34.0}


@dataclass(frozen=True)
class Day:
    """One run of a day.

    Attributes:
        scaler: ``fixed:N``, ``utilization:TARGET`` or ``eq7:MARGIN``.
        seed: Of lengths and arrivals.
    """

    scaler: str
    dataset: str
    seed: int = 0
    day_s: float = _DAY_S


_SCALERS = (
    "fixed:5", "fixed:4", "fixed:3", "utilization:0.3", "utilization:0.5", "utilization:0.7",
    "eq7:0.05", "eq7:0.2",
)  # fmt: skip


def day(setup: Setup) -> Outcome:
    """Attainment and instance-hours over a day."""
    length = 240.0 if setup.is_quick else _DAY_S
    runs = [
        Day(scaler, file_of(setup, "azure-conv"), seed, length)
        for scaler in _SCALERS
        for seed in setup.seeds
    ]
    make = functools.partial(run_day, data=setup.data)
    rows = setup.rows_of(runs, lambda run: key_of(_case(run)) + run.scaler, make, "days")
    lines = []
    for scaler in _SCALERS:
        each = [row for row in rows if row["scaler"] == scaler]
        mean = {n: float(np.mean([row[n] for row in each])) for n in ("attainment", "instances")}
        lines.append([
            scaler, f"{100 * mean['attainment']:.1f}", f"{mean['instances']:.2f}",
            str(max(row["most"] for row in each)),
        ])  # fmt: skip
    about = (
        f"A day in {_DAY_S / 60:.0f} minutes: {_NIGHT:g} requests/s at night, {_NOON:g} at noon, a "
        f"spike of {_SPIKE:g} more; an instance takes {_STARTUP_S:g} s to start, and is paid for "
        f"from then on. Llama-3-8B on A100, `sola_sched` in the engines, combined placement."
    )
    head = ["scaling", "attained, %", "instances on average", "most at once"]
    return Outcome(rows, f"{about} {error_of(setup)}\n\n{markdown(head, lines)}")


def run_day(run: Day, data: Path | None) -> Row:
    """The row of a day."""
    case = _case(run)
    requests = _requests(run, data)
    kind = testbeds.Kind.parse(_KIND)
    make = functools.partial(testbeds.fast_instance, kind, case.scheduler)
    name, _, argument = run.scaler.partition(":")
    most = [0]
    decide = _decide(name, float(argument), most)
    first = int(argument) if name == "fixed" else 2
    scaling = Scaling(decide, make, _PERIOD_S, _STARTUP_S) if name != "fixed" else None
    cluster = VirtualCluster(
        [make() for _ in range(first)], ALL_ROUTERS[case.router](run.seed), scaling=scaling,
        seed=run.seed,
    )  # fmt: skip
    result = cluster.run(cluster_requests(case, requests, 0.0))
    found = measures(case, result.records, result)
    return asdict(run) | {
        "attainment": found["attainment"], "p99_ttft_s": found["p99_ttft_s"],
        "instances": result.instance_s / result.duration_s, "most": max(most[0], first),
    }  # fmt: skip


def _decide(name: str, argument: float, most: list[int]) -> Callable[[int, Views, float], int]:
    if name == "utilization":
        # 40 requests at once are what the TPOT target allows; slots and memory hold far more.
        chosen = Utilization(argument, down_delay_s=_DOWN_DELAY_S, slots=64.0)
    else:
        (a, low), (b, high) = _RATES_OF.items()
        law = ScalingLaw.fit([low, high], [a, b])
        scaler = InstanceScaler(
            law,
            ScalingOptions(
                heartbeat_s=_PERIOD_S, window=60, margin_ratio=argument or 0.0,
                down_delay_s=_DOWN_DELAY_S,
            ),
        )  # fmt: skip

        def chosen(num_arrivals: int, views: Views, now_s: float) -> int:  # type: ignore[misc]
            return scaler.observe(num_arrivals, now_s)

    def decide(num_arrivals: int, views: Views, now_s: float) -> int:
        wanted: int = chosen(num_arrivals, views, now_s)
        most[0] = max(most[0], wanted)
        return wanted

    return decide


def _case(run: Day) -> Case:
    return Case(
        f"1*{_KIND}", "sola:8192", "combined", run.dataset, 1.0, _TTFT_S, _TPOT_S, seed=run.seed
    )


def _requests(run: Day, data: Path | None) -> Requests:
    """Arrivals of a rate that changes: those of an even process, moved to where it has come."""
    grid = np.linspace(0.0, 1.0, 2001)
    rate = _NIGHT + (_NOON - _NIGHT) * np.sin(math.pi * grid) ** 2
    rate += _SPIKE * ((grid >= _SPIKE_AT) & (grid < _SPIKE_AT + _SPIKE_LONG))
    area = np.concatenate(([0.0], np.cumsum(0.5 * (rate[1:] + rate[:-1]) * np.diff(grid))))
    size = round(float(area[-1]) * run.day_s)
    even = arrival_times(size, size, seed=run.seed)
    at_s = np.interp(even * area[-1], area, grid) * run.day_s
    max_model_len = testbeds.step_profile(testbeds.Kind.parse(_KIND)).max_model_len or 0
    table = read_lengths(run.dataset, max_model_len, data)
    rng = np.random.default_rng([run.seed, 62])
    chosen = rng.integers(0, len(table.prompt), size)
    outputs = np.clip(table.output[chosen], 1, max_model_len - 1)
    return Requests(np.minimum(table.prompt[chosen], max_model_len - outputs), outputs, at_s)
