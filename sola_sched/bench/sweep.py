"""Many runs in virtual time: points over worker processes, resumable, one flat row each."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import MISSING, asdict, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sola_sched import __version__, metrics
from sola_sched.bench import environment
from sola_sched.bench.backend import RunOutcome, SchedulerSpec, parse_scheduler
from sola_sched.bench.points import BOUND, HINDSIGHT, Point, make_workload
from sola_sched.config import CONFIG_KEY
from sola_sched.slo import SloTarget

Row = dict[str, Any]

#: Token budget of schedulers that name none, and of the bound.
MAX_NUM_BATCHED_TOKENS = 8192
_DIGITS = 4
_ROOT = Path(__file__).resolve().parents[1]
# What a row depends on, besides the point: a change of these runs it again.
_ENGINE = ("simulator/engine.py", "simulator/host.py", "simulator/request.py",
           "simulator/step_time.py", "bench/sim_backend.py")  # fmt: skip
_POLICY = ("config.py", "cost_fit.py", "cost_gamma.py", "cost_model.py", "monitor.py",
           "planner/*.py", "queues.py", "scheduler.py", "slo.py", "state.py")  # fmt: skip
_REFERENCES = {
    BOUND: ("bench/sim_bound.py", "simulator/bound*.py", "simulator/step_time.py"),
    HINDSIGHT: (*_ENGINE, *_POLICY, "bench/sim_hindsight.py"),
}
# Left out of the file where a row has them.
_DEFAULTS = {f.name: f.default for f in fields(Point) if f.default is not MISSING} | {
    "num_preemptions": 0,
    "cost_model_error": None,
}
#: Raised when a change of `points` or of this file changes rows.
_FORMAT = 1


def run(
    points: Iterable[Point],
    path: Path,
    *,
    data: Path | None = None,
    num_workers: int = 1,
    title: str = "sweep",
    is_hidden: bool = False,
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

    Returns:
        One row per distinct point of a scheduler, in the order given, with all parameters, and
        the columns ``bound`` and ``hindsight`` where the same workload was given with ``BOUND``
        and ``HINDSIGHT`` too; NaN otherwise.
    """
    wanted = list(dict.fromkeys(points))
    done = {row["key"]: row for row in load(path)}
    missing = [point for point in wanted if key_of(point) not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > len(_whole(path).encode()):
        path.write_text(_whole(path), encoding="utf-8")
    with (
        tqdm(total=len(missing), desc=title, unit="run", disable=is_hidden) as bar,
        path.open("a", encoding="utf-8") as out,
    ):
        for row in _results(missing, data, min(num_workers, len(missing))):
            done[row["key"]] = row
            out.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            out.flush()
            bar.update()
    return with_bound([done[key_of(point)] for point in wanted])


def load(path: Path) -> list[Row]:
    """All rows of a file; none if it does not exist. A line that was cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in _whole(path).splitlines()]


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
    """The rows of those points that `path` has, with their bound; the last of each, by whatever
    source it was made."""
    rows = {_parameters(row): row for row in load(path)}
    wanted = (_parameters(asdict(point)) for point in dict.fromkeys(points))
    return with_bound([rows[parameters] for parameters in wanted if parameters in rows])


def key_of(point: Point) -> str:
    """Changes with any parameter, the version, and the source that the row depends on."""
    parts = [_FORMAT, asdict(point), __version__, _source_hash(_sources(point.scheduler))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def run_point(point: Point, data: Path | None = None) -> Row:
    """Run one point, in this process.

    Raises:
        ConfigError: A parameter cannot be right.
        DatasetError: The data set is missing or unusable.
    """
    head = {"key": key_of(point), **_told(asdict(point))}
    if point.scheduler in _REFERENCES:
        return head | {"attainment": _rounded(_reference(point, data))}
    outcome = run_outcome(point, data)
    row = _measures(outcome, point.slo)
    return head | _told({name: _rounded(value) for name, value in row.items()})


def run_outcome(point: Point, data: Path | None = None) -> RunOutcome:
    """The run of a point with the times of every token."""
    environment.prepare(None, is_random=True)
    backend = make_backend(point.profile)
    workload = make_workload(point, backend.limits, data)
    return backend.run(workload, scheduler_spec(point), point.slo)


def make_backend(profile: str) -> Any:
    """The virtual-time backend of a profile, at the budget of all sweeps."""
    from sola_sched.bench.sim_backend import SimBackend, SimOptions
    from sola_sched.simulator.step_profile import load_step_profile

    args = {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    return SimBackend(SimOptions(load_step_profile(profile), engine_args=args))


def scheduler_spec(point: Point) -> SchedulerSpec:
    """The scheduler of a point; a class named with ``engine.scheduler_cls`` gets the targets."""
    spec = parse_scheduler(point.scheduler)
    if "scheduler_cls" in spec.engine_args:
        targets = {"ttft_s": point.ttft_s, "tpot_s": point.tpot_s}
        spec.engine_args["additional_config"] = {CONFIG_KEY: targets}
    return spec


def _reference(point: Point, data: Path | None) -> float:
    """What is attained by what takes a scheduler's place."""
    from sola_sched.bench.sim_bound import workload_bound
    from sola_sched.bench.sim_hindsight import attainable_with_hindsight

    environment.prepare(None, is_random=True)
    backend = make_backend(point.profile)
    workload = make_workload(point, backend.limits, data)
    if point.scheduler == HINDSIGHT:
        return attainable_with_hindsight(backend, workload, point.slo)
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


def _rounded(value: Any) -> Any:
    """Few digits keep the files small; None where there is no number."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def _results(points: Sequence[Point], data: Path | None, num_workers: int) -> Iterable[Row]:
    call: Callable[[Point], Row] = functools.partial(run_point, data=data)
    if num_workers <= 1:
        yield from map(call, points)
        return
    # Spawned, since a fork of a process with threads (OpenMP, the bar) may hang.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(call, point) for point in points]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _whole(path: Path) -> str:
    """The text without a last line that was cut off when a run was killed."""
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1]


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


def _sources(scheduler: str) -> tuple[str, ...]:
    kind = scheduler.partition(":")[0]
    if kind in _REFERENCES:
        return _REFERENCES[kind]
    if kind == "stock" and "scheduler_cls" not in scheduler:
        return _ENGINE
    # Baselines learn step times and lengths with the product's own models.
    return (*_ENGINE, *_POLICY, "simulator/baselines.py")


@functools.lru_cache(maxsize=8)
def _source_hash(patterns: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for pattern in patterns:
        for file in sorted(_ROOT.glob(pattern)):
            digest.update(os.fsencode(file.name) + file.read_bytes())
    return digest.hexdigest()[:12]
