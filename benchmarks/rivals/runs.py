"""One run of a scheduler at a point, and the key of its row."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import sweep
from harness.points import BOUND, HINDSIGHT
from harness.resumable import Row
from rivals.points import EVEN, LOADS, MEASURED, backend_on, told
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.backends.simulation import SimBackend
from sola_sched.bench.backends.virtual_replay import VirtualReplay
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.workloads.workload import Workload

#: What takes a scheduler's place.
REFERENCES = (HINDSIGHT, BOUND)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        load, machine, profile: As in `Place`.
        scheduler: As in `sola_sched.bench`, or one of the references.
    """

    load: str
    rate_per_s: float
    scheduler: str
    num_requests: int
    seed: int
    machine: str = EVEN
    profile: str = MEASURED


def run_case(case: Case, data: Path | None) -> Row:
    """One run, in this process."""
    environment.prepare(None, is_random=True)
    load = LOADS[case.load]
    backend, rough = backend_on(case.profile, case.machine, case.seed)
    workload = load.workload(backend.limits, data, case.rate_per_s, case.num_requests, case.seed)
    if case.scheduler in REFERENCES:
        return asdict(case) | {
            "attainment": _reference(case.scheduler, backend, workload, load.slo)
        }
    spec = told(parse_scheduler(case.scheduler), case.profile, case.machine)
    engine = backend.warm_engine(spec, load.slo, workload)
    replay = VirtualReplay(engine, None, None, tells_lengths=False)
    if rough is not None:
        rough.begin(engine.clock, math.ceil(engine.clock.now))
    records = replay.start(workload.requests, on_done=None)
    engine.run(on_finish=replay.ended)
    done = [record for record in records if record.completed]
    ttft = metrics.describe((record.ttft_s for record in done), (50.0, 99.0))
    return asdict(case) | {
        "attainment": metrics.attainment_ratio(metrics.attained(records, load.slo)),
        "num_completed": len(done),
        "p50_ttft_s": ttft["p50"],
        "p99_ttft_s": ttft["p99"],
        "worst_wait_s": max((record.ttft_s for record in done), default=None),
        "tokens_per_s": sum(record.num_output_tokens for record in done) / replay.now_s,
    }


def _reference(name: str, backend: SimBackend, workload: Workload, slo: SloTarget) -> float:
    if name == HINDSIGHT:
        from harness.hindsight import attainable_with_hindsight

        return attainable_with_hindsight(backend, workload, slo)
    from sola_sched.bench.backends.bound import workload_bound

    return workload_bound(backend, workload, slo).attainable_ratio


def key_of(case: Case) -> str:
    """Name of its row; changes with the source of what runs, that of its policy included."""
    scripts = [Path(__file__)]
    if case.scheduler not in REFERENCES:
        module = str(parse_scheduler(case.scheduler).options.get("policy", "")).partition(":")[0]
        found = importlib.util.find_spec(module) if "." in module else None
        scripts += [Path(found.origin)] if found is not None and found.origin else []
    return sweep.make_key(asdict(case), case.scheduler, case.profile, scripts=scripts)
