"""At and just below what the engine of this machine sustains: is anything lost there?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from harness import provenance, sweep
from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sola_sched.bench import calibrate
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.first_run.checks import end_wait_s
from sola_sched.bench.first_run.run import random_engine
from sola_sched.bench.report import intervals
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.workloads.datasets import DatasetOptions, build

_STOCK = ("stock:512", "stock:2048")
_OURS = "sola:2048"
_LOADS = (0.85, 0.95, 1.05)
#: As in a first run: the capacity is what is served with so many requests in flight.
_PROBE_REQUESTS, _PROBE_CONCURRENCY, _POOL = 120, 64, 400
_PROBED = "targets and capacity"
_SCRIPTS = (Path(__file__),)


@dataclass(frozen=True)
class Probe:
    """Measures targets and capacity of this machine."""

    measures: str  # without a default: it tells this row from the others
    scheduler: str = "stock:2048"


@dataclass(frozen=True)
class Case:
    """One run; rates in requests and targets in seconds of the core's time."""

    load: float
    rate_per_s: float
    ttft_s: float
    tpot_s: float
    scheduler: str
    num_requests: int
    seed: int


def saturation(setup: Setup) -> Outcome:
    """Attainment beside the best stock setting at shares of the measured capacity."""
    loads = _LOADS[1:2] if setup.is_quick else _LOADS
    (probe,) = setup.rows_of([Probe(_PROBED)], _key, _measure, _PROBED)
    cases = [
        Case(load, float(f"{load * probe['capacity_per_s']:.3g}"), probe["ttft_s"],
             probe["tpot_s"], scheduler, setup.num_requests, seed)
        for seed in (setup.seeds[:1] if setup.is_quick else setup.seeds)
        for load in loads
        for scheduler in _in_turn(seed)
    ]  # fmt: skip
    rows = setup.rows_of(cases, _key, _run, "runs")
    lines = [_line(load, [row for row in rows if row["load"] == load]) for load in loads]
    head = ["load", "per second", "best stock %", "its seeds", "sola %", "its seeds",
            "difference, points", "uneven %"]  # fmt: skip
    about = [
        f"- vLLM's engine on one core ({rows[0]['cpu']}), times of that core (`--clock cpu`), a "
        f"random Llama of 62 M parameters, lengths like ShareGPT's, {setup.num_requests} requests "
        f"a run; TTFT {1e3 * probe['ttft_s']:.0f} ms, TPOT {1e3 * probe['tpot_s']:.1f} ms, 10 x "
        "those of a request alone.",
        f"- *load*: share of the {probe['capacity_per_s']:.3g} requests/s that vLLM serves with "
        f"{_PROBE_CONCURRENCY} in flight. *Best stock*: of {', '.join(_STOCK)}, by the mean over "
        "the seeds. *Difference*: with a 95 % interval (Newcombe's, of the paired requests).",
        "- *uneven*: an equal batch is timed before and after each run; so much longer it took "
        "beside sola than beside the best stock.",
    ]
    return Outcome([probe, *rows], "\n".join([markdown(head, lines), "", *about]))


def _in_turn(seed: int) -> tuple[str, ...]:
    """First and last in turn, since a machine's speed drifts."""
    return (_OURS, *_STOCK) if seed % 2 else (*_STOCK, _OURS)


def _line(load: float, rows: list[Row]) -> list[str]:
    def of(scheduler: str) -> list[Row]:
        return [row for row in rows if row["scheduler"] == scheduler]

    best = max(_STOCK, key=lambda name: _mean(of(name)))
    ours, theirs = of(_OURS), of(best)
    difference = intervals.paired_difference(_flags(ours), _flags(theirs))
    uneven = np.mean([r["reference_s"] for r in ours]) / np.mean([r["reference_s"] for r in theirs])
    return [
        f"{load:g}",
        f"{rows[0]['rate_per_s']:g}",
        f"{100 * _mean(theirs):.1f} ({best.partition(':')[2]})",
        _seeds(theirs),
        f"{100 * _mean(ours):.1f}",
        _seeds(ours),
        difference.percent().replace(" %", ""),
        f"{100 * (uneven - 1):+.1f}",
    ]


def _flags(rows: Iterable[Row]) -> list[list[bool]]:
    """Who met both targets, in order of arrival."""
    return [[flag == "1" for flag in row["flags"]] for row in rows]


def _mean(rows: list[Row]) -> float:
    return float(np.mean([row["attainment"] for row in rows]))


def _seeds(rows: list[Row]) -> str:
    return ", ".join(f"{100 * row['attainment']:.1f}" for row in rows)


def _key(item: Probe | Case) -> str:
    machine = {"cpu": provenance.cpu_model()}
    return sweep.make_key(asdict(item) | machine, item.scheduler, scripts=_SCRIPTS)


def _measure(probe: Probe) -> Row:
    backend, limits = random_engine("cpu")
    pool = build(DatasetOptions(num_prompts=_POOL), limits)
    spec = parse_scheduler(probe.scheduler)
    target = calibrate.measure_slo(backend, pool, spec).target
    capacity = calibrate.measure_saturation(
        backend, pool, spec, num_requests=_PROBE_REQUESTS, concurrency=_PROBE_CONCURRENCY
    )
    return asdict(probe) | {
        "capacity_per_s": float(f"{capacity:.3g}"),
        "ttft_s": float(f"{target.ttft_s:.3g}"),
        "tpot_s": float(f"{target.tpot_s:.3g}"),
    }


def _run(case: Case) -> Row:
    slo = SloTarget(ttft_s=case.ttft_s, tpot_s=case.tpot_s)
    backend, limits = random_engine("cpu")
    options = DatasetOptions(num_prompts=case.num_requests, seed=case.seed)
    workload = build(options, limits).at_rate(case.rate_per_s, seed=case.seed)
    spec = parse_scheduler(case.scheduler)
    outcome = backend.run(workload, spec, slo)
    flags = metrics.attained(outcome.records, slo)
    return asdict(case) | {
        "attainment": metrics.attainment_ratio(flags),
        "flags": "".join("1" if flag else "0" for flag in flags),
        "end_wait_s": end_wait_s(outcome.records),
        "reference_s": float(np.mean(outcome.reference_s)),
        "num_completed": sum(record.completed for record in outcome.records),
        "tokens_per_s": sum(len(r.token_times_s) for r in outcome.records) / outcome.duration_s,
        "cost_model_error": outcome.scheduler.cost_model_error
        if spec.kind == "sola" and outcome.scheduler else None,
    }  # fmt: skip
