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
from sola_sched.core.metrics import RequestRecord
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
_PERCENTILES = (50, 90, 99)


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
    """All tables as Markdown; step times are fitted, and stretched, for each GPU by its runs."""
    steps = read_steps(beside(setup.path, "steps"))
    times_us = _pairs(beside(setup.path, "steps"), "schedule_us", "update_us")
    served = _pairs(beside(setup.path, "requests"), "ttft_s", "tpot_s")
    profile = load_step_profile(PROFILE).step_time
    assert isinstance(profile, StepTables)
    rows = sorted(rows, key=_run_key)
    runs, tails, errors, costs = [], [], [], []
    for gpu, of_gpu in groupby(rows, key=lambda row: row["gpu"]):
        mine = list(of_gpu)
        curves = fit(steps[row["run"]] for row in mine)
        every = [step for row in mine for step in steps[row["run"]]]
        factor = sum(s for _, s in every) / sum(profile.seconds(counts_of(b)) for b, _ in every)
        profiles = (profile, Scaled(profile, factor))
        for key, group in groupby(mine, key=_run_key):
            seeds = list(group)
            named = [gpu, f"{key[1]:g}", key[2]]
            simulated = [
                [_simulated(setup, row, each) for row in seeds]
                for each in (_Curves(curves), *profiles)
            ]
            runs.append(
                [
                    *named,
                    _of_seeds(row["attainment"] for row in seeds),
                    *(_of_seeds(map(_attained, seeds, each)) for each in simulated),
                    f"{factor:.3f}",
                    f"{np.mean([row['tokens_per_s'] for row in seeds]):.0f}",
                    f"{np.mean([row['mean_running'] for row in seeds]):.0f}",
                ]
            )  # fmt: skip
            measured = [latency for row in seeds for latency in served[row["run"]]]
            virtual = [(r.ttft_s, r.tpot_s) for run in simulated[-1] for r in run if r.completed]
            tails += [[*named, *cells] for cells in _tails(measured, virtual)]
            tested = [step for row in seeds for step in steps[row["run"]][1::2]]
            errors += [[*named, *cells] for cells in _errors(tested, curves, profile)]
            costs.append([*named, *_cost([t for row in seeds for t in times_us[row["run"]]])])
    head = ("GPU", "req/s", "scheduler")
    first = rows[0]
    title = (
        f"Llama of 8B with random weights on one GPU, driver {first['driver']}, torch "
        f"{first['torch']}, vLLM {first['vllm']}; `{first['dataset']}`, {first['num_requests']} "
        f"requests a run, TTFT {first['ttft_s']:g} s, TPOT {1e3 * first['tpot_s']:g} ms. Attained: "
        "mean, and each seed."
    )
    return "\n\n".join(
        [
            title,
            markdown(
                (*head, "attained, %", "simulated, fitted steps", "simulated, shipped profile",
                 "simulated, the profile stretched", "by", "tokens/s", "running"), runs, 3),
            "Latencies, and how far the stretched profile has them off:",
            markdown(
                (*head, "latency", "P50", "P90", "P99", "simulated P50", "P90", "P99"), tails, 4),
            "Single steps that nothing was fitted to:",
            markdown(
                (*head, "steps", "number", "median, ms", "error, fitted", "error, shipped profile",
                 "its sum"), errors, 4),
            "Microseconds of the scheduler's two calls in a step:",
            markdown(
                (*head, "steps", "`schedule` median", "P99", "`update_from_output` median", "P99"),
                costs, 3),
        ]
    )  # fmt: skip


def _run_key(row: Mapping[str, Any]) -> tuple[str, float, str]:
    return row["gpu"], row["rate_per_s"], row["scheduler"]


def _of_seeds(values: Iterable[float]) -> str:
    """Their mean in per cent, and each where there are several."""
    shares = [100 * value for value in values]
    each = f" ({', '.join(f'{share:.1f}' for share in shares)})" if len(shares) > 1 else ""
    return f"{np.mean(shares):.1f}{each}"


def _attained(row: Mapping[str, Any], records: Sequence[RequestRecord]) -> float:
    return summary(records, point_of(row).slo)["attainment"]


def _pairs(path: Path, first: str, second: str) -> dict[str, list[tuple[float, float]]]:
    """Two columns of every row, by run."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            pairs.setdefault(row["run"], []).append((float(row[first]), float(row[second])))
    return pairs


def _tails(
    measured: Sequence[tuple[float, float]], virtual: Sequence[tuple[float, float]]
) -> Iterator[list[str]]:
    """Percentiles of both latencies in ms, and how far the simulated ones are off."""
    for index, name in enumerate(("TTFT, ms", "TPOT, ms")):
        real, simulated = (
            1e3 * np.nanpercentile([each[index] for each in latencies], _PERCENTILES)
            for latencies in (measured, virtual)
        )
        off = 100 * (simulated / real - 1)
        yield [name, *(f"{each:.1f}" for each in real), *(f"{each:+.1f} %" for each in off)]


def _cost(times_us: Sequence[tuple[float, float]]) -> list[str]:
    columns = np.array(times_us).T
    return [
        str(len(times_us)),
        *(f"{np.percentile(column, share):.0f}" for column in columns for share in (50, 99)),
    ]


def _errors(
    steps: Sequence[tuple[Batch, float]], curves: StepCurves, profile: StepTables
) -> Iterator[list[str]]:
    """Of each kind of step: number, median and how far they are off."""
    for kind in _KINDS:
        mine = [step for step in steps if (step[0].num_prefills > 0) == (kind == _KINDS[1])]
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


def _simulated(setup: Setup, row: Mapping[str, Any], step_time: Any) -> list[RequestRecord]:
    point = point_of(row)
    limits = ModelLimits(
        max_model_len=row["facts"]["max_model_len"], vocab_size=LLAMA_3_8B.vocab_size,
        encode=_no_text,
    )  # fmt: skip
    facts = EngineFacts(**{name: row["facts"][name] for name in _FACTS})
    workload = make_workload(point, limits, setup.data)
    spec = parse_scheduler(point.scheduler)
    return simulate(workload, [], spec, point.slo, facts, step_time)


def _no_text(text: str) -> list[int]:
    raise ValueError("the lengths of these data sets are known; there is no text to encode.")
