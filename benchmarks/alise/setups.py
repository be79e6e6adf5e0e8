"""Workloads of the latency experiments: lengths, arrivals and recorded predictions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.prediction.length import LengthPrediction
from sola_sched.workloads import lengths
from sola_sched.workloads.datasets import ModelLimits
from sola_sched.workloads.rows import read_rows
from sola_sched.workloads.workload import RequestSpec, Workload, arrival_times, random_token_ids

_ROOT = Path(__file__).resolve().parents[2]
RESULTS = _ROOT / "benchmarks" / "results" / "alise"
SHAREGPT = "sharegpt_lengths_llama2.csv.gz"


@dataclass(frozen=True)
class Run:
    """Everything that decides a run.

    Attributes:
        profile: Of `sola_sched.simulator.steps.profile`.
        dataset: ``sharegpt``, ``alpaca`` or ``sharegpt-like`` (made up).
        rate_per_s: Poisson arrivals; the realised rate is exactly this.
        trace_s: Seconds of arrivals.
        scheduler: As on the command line of `sola_sched.bench`; ``{lexical}`` and ``{retrieval}``
            stand for that predictor's recorded predictions.
        seed: Of rows, arrivals and prompt tokens.
    """

    profile: str
    dataset: str
    rate_per_s: float
    trace_s: float
    scheduler: str
    seed: int = 0


def make_workload(run: Run, limits: ModelLimits, data: Path | None) -> Workload:
    """The requests of a run, the same for every scheduler."""
    rng = np.random.default_rng([run.seed, 6])
    size = max(1, round(run.rate_per_s * run.trace_s))
    table, predictions = _lengths(run.dataset, limits.max_model_len, data, _predictor(run))
    chosen = np.resize(rng.permutation(len(table)), size)
    times_s = arrival_times(size, run.rate_per_s, seed=run.seed)
    requests = []
    for index, (row, at_s) in enumerate(zip(chosen.tolist(), times_s.tolist(), strict=True)):
        prompt, output = table[row].tolist()
        prediction = None
        if predictions is not None:
            prediction = LengthPrediction(np.maximum(predictions[row], 1.0), "neighbours")
        ids = random_token_ids(rng, prompt, limits.vocab_size)
        requests.append(RequestSpec(f"r{index}", ids, output, at_s, prediction=prediction))
    return Workload(tuple(requests), request_rate=run.rate_per_s)


def scheduler_of(run: Run) -> str:
    """The scheduler with the recorded predictions of the run's data set put in."""
    name = _predictor(run)
    if name is None:
        return run.scheduler
    how = "given" if run.dataset == "alpaca" else f"recorded:{_file('arena', name)}"
    return run.scheduler.replace(f"{{{name}}}", how)


def data_files(run: Run) -> list[Path]:
    """Recorded predictions that a run reads besides those that its scheduler names."""
    return [_file("alpaca", _predictor(run) or "lexical")] if run.dataset == "alpaca" else []


def _predictor(run: Run) -> str | None:
    return next((n for n in ("lexical", "retrieval") if f"{{{n}}}" in run.scheduler), None)


def _file(dataset: str, predictor: str) -> Path:
    return RESULTS / f"predictions-{dataset}-{predictor}.json"


@lru_cache(maxsize=8)
def _lengths(
    dataset: str, max_model_len: int, data: Path | None, predictor: str | None
) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """Prompt and output tokens [n, 2] that fit the context, and quantiles [n, 10] or None."""
    if dataset == "alpaca":
        raw: dict[str, Any] = json.loads(_file("alpaca", predictor or "lexical").read_text())
        table = np.array([raw["prompt_tokens"], raw["lengths"]], dtype=np.int64).T
        return table, np.array(raw["quantiles"], dtype=np.float64) if predictor else None
    if dataset == "sharegpt" and data is not None:
        rows = [row for row in read_rows(data / SHAREGPT) if row.is_usable]
        table = np.array([(row.prompt_tokens, row.output_tokens) for row in rows], dtype=np.int64)
    else:
        rng = np.random.default_rng(7)
        samples = [d.sample(rng, 8000) for d in (lengths.SHAREGPT_PROMPT, lengths.SHAREGPT_OUTPUT)]
        table = np.stack(samples, axis=1)
    return table[table.sum(axis=1) <= max_model_len], None
