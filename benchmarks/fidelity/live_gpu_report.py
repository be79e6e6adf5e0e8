"""What runs on a GPU say of virtual time: single steps, and the same runs simulated.

Needs no GPU: steps and requests are those that `live_gpu` kept.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from fidelity.engine_steps import Scaled, simulate, summary
from fidelity.live_gpu import LLAMA_3_8B, beside, point_of
from fidelity.recording import EngineFacts
from harness.markdown import markdown
from harness.points import make_workload
from harness.setup import Setup
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.cost.fit import StepShape
from sola_sched.simulator.steps.curves import Batch, StepCurves, batch_of
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.tables import StepTables
from sola_sched.simulator.steps.time import StepCounts
from sola_sched.workloads.datasets import ModelLimits

#: The profile of kernels that others timed on the same GPU.
PROFILE = "llama-3-8b-h100-measured"
_FACTS = tuple(EngineFacts.__dataclass_fields__)
_KINDS = ("decodes alone", "with prompts")


class _Curves:
    """Fitted step times, as a virtual engine asks for them."""

    def __init__(self, curves: StepCurves) -> None:
        self._curves = curves

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        return self._curves.step_s(batch_of(output, requests))


def read_steps(path: Path) -> dict[str, list[tuple[Batch, float]]]:
    """Batch and seconds of every step, by run."""
    steps: dict[str, list[tuple[Batch, float]]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            shape = StepShape(
                int(row["decodes"]), int(row["decode_ctx"]), int(row["prefill_tokens"]),
                float(row["prefill_sq"]), float(row["prefill_ctx"]),
            )  # fmt: skip
            batch = Batch(shape, int(row["prefills"]), int(row["new"]))
            steps.setdefault(row["run"], []).append((batch, int(row["total_us"]) / 1e6))
    return steps


def fit(runs: Iterable[Sequence[tuple[Batch, float]]]) -> StepCurves:
    """Step times of the engine, fitted to every second step; the others are for the test."""
    chosen = [step for run in runs for step in run[::2]]
    return StepCurves.fit([batch for batch, _ in chosen], [seconds for _, seconds in chosen])


def counts_of(batch: Batch) -> StepCounts:
    """The batch as a profile of kernels sees it."""
    shape = batch.shape
    return StepCounts(
        shape.num_decodes,
        shape.decode_ctx_tokens - shape.num_decodes,
        batch.num_prefills,
        shape.prefill_tokens,
        shape.prefill_ctx_tokens + 0.5 * shape.prefill_sq_tokens,
    )


def tables(setup: Setup, rows: Sequence[dict[str, Any]]) -> str:
    """Both tables as Markdown; step times are fitted, and stretched, for each GPU by its runs."""
    steps = read_steps(beside(setup.path, "steps"))
    profile = load_step_profile(PROFILE).step_time
    assert isinstance(profile, StepTables)
    rows = sorted(rows, key=lambda row: (row["gpu"], row["rate_per_s"], row["scheduler"]))
    runs, errors = [], []
    for gpu, of_gpu in groupby(rows, key=lambda row: row["gpu"]):
        mine = list(of_gpu)
        curves = fit(steps[row["run"]] for row in mine)
        every = [step for row in mine for step in steps[row["run"]]]
        factor = sum(s for _, s in every) / sum(profile.seconds(counts_of(b)) for b, _ in every)
        profiles = (profile, Scaled(profile, factor))
        for row in mine:
            run = [gpu, f"{row['rate_per_s']:g}", row["scheduler"]]
            simulated = [_simulated(setup, row, times) for times in (_Curves(curves), *profiles)]
            runs.append(
                [
                    *run,
                    f"{100 * row['attainment']:.1f}",
                    *(f"{100 * each['attainment']:.1f}" for each in simulated),
                    f"{factor:.3f}",
                    f"{row['tokens_per_s']:.0f}",
                    f"{row['mean_running']:.0f}",
                    f"{row['scheduler_cpu_us']:.0f}",
                ]
            )
            errors += [[*run, *cells] for cells in _errors(steps[row["run"]], curves, profile)]
    named = ("GPU", "req/s", "scheduler")
    head = (*named, "attained, %", "simulated, fitted steps", "simulated, shipped profile",
            "simulated, the profile stretched", "by", "tokens/s", "running",
            "us of the scheduler")  # fmt: skip
    step_head = (*named, "steps", "number", "median, ms", "error, fitted",
                 "error, shipped profile", "its sum")  # fmt: skip
    first = rows[0]
    title = (
        f"Llama of 8B with random weights on one GPU, driver {first['driver']}, torch "
        f"{first['torch']}, vLLM {first['vllm']}; `{first['dataset']}`, {first['num_requests']} "
        f"requests a run, TTFT {first['ttft_s']:g} s, TPOT {1e3 * first['tpot_s']:g} ms."
    )
    return "\n\n".join([title, markdown(head, runs, 3), markdown(step_head, errors, 4)])


def _errors(
    steps: Sequence[tuple[Batch, float]], curves: StepCurves, profile: StepTables
) -> Iterator[list[str]]:
    """Of the steps that nothing was fitted to: kind, number, median and how far they are off."""
    for kind in _KINDS:
        mine = [step for step in steps[1::2] if (step[0].num_prefills > 0) == (kind == _KINDS[1])]
        if not mine:
            continue
        measured = np.array([seconds for _, seconds in mine])
        fitted = np.array([curves.step_s(batch) for batch, _ in mine])
        shipped = np.array([profile.seconds(counts_of(batch)) for batch, _ in mine])
        yield [
            kind, str(len(mine)), f"{1e3 * np.median(measured):.2f}",
            *(f"{100 * np.mean(np.abs(each / measured - 1)):.1f} %" for each in (fitted, shipped)),
            f"{100 * (shipped.sum() / measured.sum() - 1):+.1f} %",
        ]  # fmt: skip


def _simulated(setup: Setup, row: Mapping[str, Any], step_time: Any) -> dict[str, float]:
    point = point_of(row)
    limits = ModelLimits(
        max_model_len=row["facts"]["max_model_len"], vocab_size=LLAMA_3_8B.vocab_size,
        encode=_no_text,
    )  # fmt: skip
    facts = EngineFacts(**{name: row["facts"][name] for name in _FACTS})
    workload = make_workload(point, limits, setup.data)
    spec = parse_scheduler(point.scheduler)
    records = simulate(workload, [], spec, point.slo, facts, step_time)
    return summary(records, point.slo)


def _no_text(text: str) -> list[int]:
    raise ValueError("the lengths of these data sets are known; there is no text to encode.")
