"""Several kinds of request at once: ours against stock vLLM, and against deadlines as priorities.

vLLM's `--scheduling-policy priority` with the deadline as priority is the earliest deadline first:
what an operator can have without another scheduler. Both run at each chunk size, and the best of
each counts, by its share of all requests over all seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from harness import sweep
from harness.markdown import markdown
from harness.points import BOUND
from harness.resumable import Row
from harness.setup import Outcome, Setup
from mixed.mixes import MIXES, Mix, due_s, mixed_workload
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import SchedulerSpec, parse_scheduler
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.workloads.workload import Workload

_CHUNKS = (256, 512, 2048, 8192)
_FCFS, _EDF = (tuple(f"{rule}:{chunk}" for chunk in _CHUNKS) for rule in ("stock", "edf"))
_OURS = ("sola",)
#: Ranks of strict classes are so far apart that no deadline passes from one to the next.
_RANK_MS = 10**10
_SCRIPTS = tuple(Path(__file__).with_name(name) for name in ("experiment.py", "mixes.py"))


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        mix: Key of `MIXES`.
        scheduler: ``stock:CHUNK``, ``edf:CHUNK``, one of ours, or `BOUND`.
    """

    mix: str
    scheduler: str
    num_requests: int
    seed: int


def mixed(setup: Setup) -> Outcome:
    """Attained % by mix, rule and class."""
    setup.check_only(list(MIXES))
    rows: list[Row] = []
    lines = []
    for name in setup.only or MIXES:
        cases = [
            Case(name, scheduler, MIXES[name].stretch * setup.num_requests, seed)
            for scheduler in (*_FCFS, *_EDF, *_OURS, BOUND)
            for seed in setup.seeds
        ]
        found = setup.rows_of(cases, _key, partial(run_case, data=setup.data), name)
        rows += found
        for group in (_FCFS, _EDF, _OURS):
            lines.append([name, *_line(MIXES[name], found, group)])
        bounds = [row["attainment"] for row in found if row["scheduler"] == BOUND]
        all_of, each = _shares(bounds)
        lines.append([name, BOUND, all_of, "", each, "", ""])
    head = ["mix", "rule", "all %", "by weight %", "each seed", "worst class", "by class %"]
    shown = setup.only or MIXES
    about = [f"- *{name}*: {MIXES[name].about}; {_terms(MIXES[name])}." for name in shown]
    return Outcome(rows, "\n".join([markdown(head, lines, 2), "", *about]))


def run_case(case: Case, data: Path | None) -> Row:
    """One run, in this process."""
    environment.prepare(None, is_random=True)
    mix = MIXES[case.mix]
    backend = sweep.make_backend(mix.profile)
    workload = mixed_workload(mix, backend.limits, data, case.num_requests, case.seed)
    if case.scheduler == BOUND:
        from sola_sched.bench.backends.bound import workload_bound

        bound = workload_bound(backend, workload, SloTarget())
        return asdict(case) | {"attainment": bound.attainable_ratio}
    spec, workload = _as_run(mix, case.scheduler, workload)
    outcome = backend.run(workload, spec, SloTarget())
    records = outcome.records
    flags, worth = metrics.attained(records, SloTarget()), metrics.weights(records, SloTarget())
    done = [record.ttft_s for record in records if record.completed]
    return asdict(case) | {
        "attainment": metrics.attainment_ratio(flags),
        "weighted": metrics.weighted_ratio(flags, worth),
        "goodput_per_s": metrics.goodput_per_s(flags, outcome.duration_s),
        "weighted_goodput_per_s": metrics.goodput_per_s(flags, outcome.duration_s, worth),
        "classes": metrics.attainment_by_class(records, SloTarget()),
        "worst_wait_s": max(done, default=None),
        "num_completed": len(done),
    }


def _as_run(mix: Mix, scheduler: str, workload: Workload) -> tuple[SchedulerSpec, Workload]:
    """The scheduler, and the workload with the priorities that it reads."""
    rule, _, chunk = scheduler.partition(":")
    is_edf = rule == "edf"
    spec = parse_scheduler(f"stock:{chunk}" if is_edf else scheduler)
    if not is_edf and not mix.is_strict:
        return spec, workload
    spec.engine_args["scheduling_policy"] = "priority"
    requests = tuple(
        replace(
            request,
            priority=request.priority * _RANK_MS + (round(1e3 * due_s(request)) if is_edf else 0),
        )
        for request in workload.requests
    )
    return spec, replace(workload, requests=requests)


def _key(case: Case) -> str:
    _, _, chunk = case.scheduler.partition(":")
    scheduler = f"stock:{chunk}" if case.scheduler.startswith("edf") else case.scheduler
    return sweep.make_key(asdict(case), scheduler, MIXES[case.mix].profile, scripts=_SCRIPTS)


def _line(mix: Mix, rows: Sequence[Row], group: Sequence[str]) -> list[str]:
    """The best of a group."""
    of = {name: [row for row in rows if row["scheduler"] == name] for name in group}
    best = max(group, key=lambda name: _mean(row["attainment"] for row in of[name]))
    runs = of[best]
    shares = {name: _mean(row["classes"][name]["attainment"] for row in runs) for name in mix.kinds}
    worst = min(shares, key=lambda name: shares[name])
    all_of, each = _shares([row["attainment"] for row in runs])
    return [
        best,
        all_of,
        f"{100 * _mean(row['weighted'] for row in runs):.1f}",
        each,
        f"{worst} {100 * shares[worst]:.1f}",
        ", ".join(f"{name} {100 * share:.1f}" for name, share in shares.items()),
    ]


def _shares(values: Sequence[float]) -> tuple[str, str]:
    """The mean, and each, in percent."""
    return f"{100 * _mean(values):.1f}", ", ".join(f"{100 * value:.1f}" for value in values)


def _mean(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]


def _terms(mix: Mix) -> str:
    """Targets, rate, lengths and step times."""
    kinds = "; ".join(f"{name}: {kind.slo}" for name, kind in mix.kinds.items())
    return f"{kinds}; {mix.rate_per_s:g} requests/s, {mix.dataset.split('.')[0]}, {mix.profile}"
