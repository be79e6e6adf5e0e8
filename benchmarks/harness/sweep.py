"""Many runs in virtual time: points over worker processes, resumable, one flat row each."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import provenance, resumable
from harness.import_closure import digest, import_closure
from harness.points import BOUND, HINDSIGHT, Point, make_workload
from harness.resumable import Row
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import RunOutcome, SchedulerSpec, parse_scheduler
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import CONFIG_KEY
from sola_sched.core import metrics
from sola_sched.core.metrics import BoolArray, RequestRecord
from sola_sched.simulator.steps.profile import load_step_profile, step_profile_file

#: Token budget of schedulers that name none, and of the bound.
MAX_NUM_BATCHED_TOKENS = 8192
_DIGITS = 4
#: What takes a scheduler's place in a point.
_REFERENCES = (BOUND, HINDSIGHT)
#: Modules that change no row: they keep rows, or runs of that kind never use them.
_KEEPING = (
    "harness.import_closure", "harness.provenance", "harness.resumable",
    "sola_sched.bench.report.results",
)  # fmt: skip
_POLICY = ("sola_sched.vllm_adapter.scheduler", "sola_sched.simulator.baselines.rules")
_BESIDE = ("sola_sched.bench.backends.bound", "harness.hindsight")
_UNUSED = {
    "stock": (*_POLICY, *_BESIDE),
    BOUND: (*_POLICY, "sola_sched.simulator.engine", "sola_sched.simulator.host", _BESIDE[1]),
    HINDSIGHT: _BESIDE[:1],
}
# Left out of the file where a row has them.
_DEFAULTS = {f.name: f.default for f in fields(Point) if f.default is not MISSING} | {
    "num_preemptions": 0,
    "cost_model_error": None,
    "longest_attainment": None,
}
#: Raised when the meaning of a row changes without its source.
_FORMAT = 2


def run(
    points: Iterable[Point],
    path: Path,
    *,
    data: Path | None = None,
    num_workers: int = 1,
    title: str = "sweep",
    is_hidden: bool = False,
    rerun: Sequence[str] = (),
) -> list[Row]:
    """Run the points that `path` has no row of yet; append each row when it is done.

    Equal points give equal rows, the columns about CPU time excepted, whatever the number of
    workers; only the order of the lines in the file depends on it.

    Args:
        points: In any order; repeated ones run once.
        path: JSON lines; created with its folder.
        data: Folder of the data sets.
        num_workers: Processes, >= 1; with one, the runs are made in this process.
        title: Of the progress bar.
        is_hidden: No progress bar.
        rerun: Schedulers whose rows must be of this source. With any, of all others a row that is
            stored counts, whatever source made it.

    Returns:
        One row per distinct point of a scheduler, in the order given, with all parameters, and
        the columns ``bound`` and ``hindsight`` where the same workload was given with ``BOUND``
        and ``HINDSIGHT`` too; NaN otherwise.
    """
    make = functools.partial(run_point, data=data)
    points = list(points)
    others = [point for point in points if rerun and point.scheduler not in rerun]
    kept = resumable.stored_keys(others, path)
    rows = resumable.run(
        points, path, lambda point: kept.get(point) or key_of(point), make,
        num_workers=num_workers, title=title, is_hidden=is_hidden,
    )  # fmt: skip
    return with_bound(rows)


def with_bound(rows: Sequence[Row]) -> list[Row]:
    """The rows of schedulers, all columns filled in; ``bound`` is that of the same workload, and
    so is ``hindsight``."""
    ratios = {
        (row["scheduler"], _workload_of(row)): row["attainment"]
        for row in rows
        if row["scheduler"] in _REFERENCES
    }
    return [
        _DEFAULTS
        | row
        | _derived(_DEFAULTS | row)
        | {name: ratios.get((name, _workload_of(row)), math.nan) for name in _REFERENCES}
        for row in rows
        if row["scheduler"] not in _REFERENCES
    ]


def stored(points: Iterable[Point], path: Path) -> list[Row]:
    """The rows of those points that `path` has, with their bound; see `resumable.stored`."""
    return with_bound(resumable.stored(points, path))


def key_of(point: Point) -> str:
    """Changes with all that decides the row of a point, see `make_key`."""
    return make_key(asdict(point), point.scheduler, point.profile)


def make_key(
    parameters: Mapping[str, Any],
    scheduler: str,
    profile: str | None = None,
    *,
    scripts: Iterable[Path] = (),
    files: Iterable[Path] = (),
) -> str:
    """Name of a run's row.

    Changes with any parameter, vLLM's version, the source that decides the run (what `run_point`
    imports with that scheduler), the profile, and the recorded predictions.

    Args:
        parameters: Of the run.
        scheduler: As in `Point`.
        profile: As in `Point`; None for a run on a real engine.
        scripts: Files that take part in the run; with them, all that they import.
        files: Data that the run reads.
    """
    source = _source_digest(scheduler, tuple(scripts))
    data = [*files] if profile is None else [step_profile_file(profile), *files]
    predictor = _spec(scheduler).predictor
    if predictor.startswith("recorded:"):
        data.append(Path(predictor.partition(":")[2]))
    parts = [_FORMAT, dict(parameters), provenance.vllm_version(), source, digest(data)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def run_point(point: Point, data: Path | None = None) -> Row:
    """Run one point, in this process.

    Raises:
        ConfigError: A parameter cannot be right.
        DatasetError: The data set is missing or unusable.
    """
    head = _told(asdict(point))
    if point.scheduler in _REFERENCES:
        return head | {"attainment": _rounded(_reference(point, data))}
    outcome = run_outcome(point, data)
    row = _measures(outcome, point.slo)
    return head | _told({name: _rounded(value) for name, value in row.items()})


def run_outcome(point: Point, data: Path | None = None) -> RunOutcome:
    """The run of a point with the times of every token."""
    environment.prepare(None, is_random=True)
    backend = make_backend(point.profile, point.scheduling_time)
    workload = make_workload(point, backend.limits, data)
    return backend.run(workload, scheduler_spec(point), point.slo)


def make_backend(profile: str, scheduling_time: str = "none") -> Any:
    """The virtual-time backend of a profile, at the budget of all sweeps."""
    from sola_sched.bench.backends.simulation import SimBackend, SimOptions

    args = {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    options = SimOptions(
        load_step_profile(profile), engine_args=args, scheduling_time=scheduling_time
    )
    return SimBackend(options)


def scheduler_spec(point: Point) -> SchedulerSpec:
    """The scheduler of a point; a class named with ``engine.scheduler_cls`` gets the targets."""
    spec = parse_scheduler(point.scheduler)
    if "scheduler_cls" in spec.engine_args:
        targets = {"ttft_s": point.ttft_s, "tpot_s": point.tpot_s}
        spec.engine_args["additional_config"] = {CONFIG_KEY: targets}
    return spec


def _reference(point: Point, data: Path | None) -> float:
    """What is attained by what takes a scheduler's place."""
    environment.prepare(None, is_random=True)
    backend = make_backend(point.profile)
    workload = make_workload(point, backend.limits, data)
    if point.scheduler == HINDSIGHT:
        from harness.hindsight import attainable_with_hindsight

        return attainable_with_hindsight(backend, workload, point.slo)
    from sola_sched.bench.backends.bound import workload_bound

    return workload_bound(backend, workload, point.slo).attainable_ratio


def _measures(outcome: RunOutcome, slo: SloTarget) -> Row:
    records, stats = outcome.records, outcome.scheduler
    assert stats is not None
    done = [record for record in records if record.completed]
    flags = metrics.attained(records, slo)
    duration_s = max(outcome.duration_s, 1e-9)
    ttft = metrics.describe((r.ttft_s for r in done), (50.0, 99.0))
    tpot = metrics.describe((r.tpot_s for r in done), (50.0, 99.0))
    only_ttft, only_tpot = replace(slo, tpot_s=math.inf), replace(slo, ttft_s=math.inf)
    return {
        "attainment": metrics.attainment_ratio(flags),
        "met_ttft": metrics.attainment_ratio(metrics.attained(records, only_ttft)),
        "met_tpot": metrics.attainment_ratio(metrics.attained(records, only_tpot)),
        "longest_attainment": _of_longest_prompts(records, flags),
        "num_completed": len(done),
        **{f"{name}_ttft_s": ttft[name] for name in ("mean", "p50", "p99")},
        **{f"{name}_tpot_s": tpot[name] for name in ("mean", "p50", "p99")},
        "mean_latency_s": float(np.mean([r.latency_s for r in done])) if done else math.nan,
        "normalized_latency_s": metrics.mean_normalized_latency_s(records),
        "worst_wait_s": max((r.ttft_s for r in done), default=math.nan),
        "tokens_per_s": sum(r.num_output_tokens for r in done) / duration_s,
        "duration_s": outcome.duration_s,
        "num_steps": stats.num_steps,
        "mean_running": stats.mean_num_running,
        "num_preemptions": stats.num_preemptions,
        "cost_model_error": stats.cost_model_error,
        "cpu_us_per_step": 1e6 * stats.cpu_s / max(1, stats.num_steps),
    }


def _of_longest_prompts(records: Sequence[RequestRecord], flags: BoolArray) -> float:
    """Attained share of the tenth with the longest prompts."""
    order = np.argsort([-record.num_prompt_tokens for record in records], kind="stable")
    return float(np.mean(flags[order[: -(-len(records) // 10)]]))


def _rounded(value: Any) -> Any:
    """Few digits keep the files small; None where there is no number."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def _told(row: Row) -> Row:
    """All columns but those at their defaults, which only lengthen the files."""
    return {k: v for k, v in row.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}


def _derived(row: Row) -> Row:
    """Columns that follow from others and are not in the file."""
    return {
        "goodput_per_s": row["attainment"] * row["num_requests"] / row["duration_s"],
        "overhead_ratio": 1e-6 * row["cpu_us_per_step"] * row["num_steps"] / row["duration_s"],
    }


def _parameters(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(field.name, field.default) for field in fields(Point))


def _workload_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return _parameters({**row, "scheduler": None})


def _spec(scheduler: str) -> SchedulerSpec:
    if scheduler in _REFERENCES:
        return SchedulerSpec(scheduler, scheduler)
    return parse_scheduler(scheduler)


@functools.lru_cache(maxsize=256)
def _source_digest(scheduler: str, scripts: tuple[Path, ...]) -> str:
    """Kept for the process: what it has imported does not change with the files."""
    return digest(_sources(scheduler, scripts))


def _sources(scheduler: str, scripts: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Files of the source that decides what a run with the scheduler gives."""
    spec = _spec(scheduler)
    roots: list[str | Path] = [__name__, *scripts]
    unused = _UNUSED.get(spec.kind, _BESIDE)
    named = spec.engine_args.get("scheduler_cls")
    if isinstance(named, str):
        unused = _BESIDE
        script = importlib.util.find_spec(named.replace(":", ".").rpartition(".")[0])
        if script is not None and script.origin is not None:
            roots.append(Path(script.origin))
    return import_closure(roots, (*unused, *_KEEPING))
