"""Simulates runs of which only request times were recorded, with step times fitted to half of them.

The schedule of a simulation tells which steps lie between the arrival, the first and the last
token of each request. While it stays the same, these times are linear in the coefficients of
`StepTimeModel`; while no prefill waits, arrivals and not the work before fix when a step begins.
So the fit simulates, solves the linear problem for the training requests, and
simulates again with the new coefficients, which may change the schedule; the coefficients whose
simulation came nearest are kept. Only training requests enter the fit, all requests run.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sola_sched.core import metrics
from sola_sched.errors import DatasetError
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.time import StepTimeModel

if TYPE_CHECKING:
    from sola_sched.simulator.engine import StepTrace

FloatArray = NDArray[np.float64]

#: Name of the file in the data folder.
REQUESTS_FILE = "vllm_measured_requests.csv.gz"
#: Coefficients that are fitted.
COEFFICIENTS = (
    "base_s", "per_decode_s", "per_ctx_s", "per_prefill_attn_s", "weights_s", "per_token_s",
)  # fmt: skip
NUM_SIMULATIONS = 7
# Short TTFTs are weighted as if they were this share of the mean: a queue that is one request
# longer in the simulation would count many times.
_TTFT_FLOOR = 0.5
_NUM_REWEIGHTS = 4
_HUBER_SIGMAS = 1.5
_ROUNDING_S = 1e-9
# Prior of a new coefficient on the one before, relative to the largest column.
_DAMPING = 0.01


@dataclass(frozen=True)
class Deployment:
    """Engine settings of a recorded run, as far as a scheduler depends on them."""

    max_num_seqs: int
    num_blocks: int
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    async_scheduling: bool = True


#: Settings of the recorded runs. Source: casys-kaist/LLMServingSim, the ``meta.json`` files of
#: bench/examples (settings; KV blocks are those of the same runs repeated on vLLM 0.28, never
#: full in these runs) and for RTX 4090 its simulator's log, whose KV size was set by its authors.
#: The two data-parallel replicas of Qwen3-30B-A3B run in lock step and are one engine of twice
#: the size here.
DEPLOYMENTS = {
    ("RTXPRO6000", "Qwen3-32B"): Deployment(128, 28_884),
    ("RTXPRO6000", "Qwen3-30B-A3B-Instruct-2507"): Deployment(
        256, 75_638, max_num_batched_tokens=4096
    ),
    ("RTXPRO6000", "Llama-3.1-8B"): Deployment(128, 35_913),
    ("RTX4090", "Llama-3.1-8B"): Deployment(256, 2_588),
}


@dataclass(frozen=True)
class MeasuredRequest:
    """One recorded request, seconds on the clock of its run."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    first_token_s: float
    last_token_s: float

    @property
    def ttft_s(self) -> float:
        return metrics.ttft_s(self.arrival_s, self.first_token_s)

    @property
    def tpot_s(self) -> float:
        """NaN for a single token."""
        return metrics.tpot_s(self.last_token_s - self.arrival_s, self.ttft_s, self.output_tokens)


@dataclass(frozen=True)
class Simulated:
    """A simulated run, one entry a request in order of the input.

    Attributes:
        ttft_s, tpot_s: Latencies, [num_requests].
        first, decode: Derivatives of first-token time and of the time from first to last token
            by the coefficients while the schedule stays the same, [num_requests, 6].
        first_offset_s, decode_offset_s: The part of both that does not depend on them.
        num_steps: Steps that ran.
        num_preemptions: Requests sent back to wait.
    """

    ttft_s: FloatArray
    tpot_s: FloatArray
    first: FloatArray
    first_offset_s: FloatArray
    decode: FloatArray
    decode_offset_s: FloatArray
    num_steps: int
    num_preemptions: int


def read_requests(path: Path) -> dict[tuple[str, str], list[MeasuredRequest]]:
    """The recorded requests by GPU and model, in order of arrival.

    Raises:
        DatasetError: The file cannot be read or lacks a column.
    """
    runs: dict[tuple[str, str], list[MeasuredRequest]] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                runs.setdefault((row["gpu"], row["model"]), []).append(
                    MeasuredRequest(
                        int(row["prompt_tokens"]),
                        int(row["output_tokens"]),
                        float(row["queued_s"]),
                        float(row["first_token_s"]),
                        float(row["last_token_s"]),
                    )
                )
    except (OSError, KeyError, ValueError) as error:
        raise DatasetError(
            f"{path} must be a gzip CSV of measured requests ({type(error).__name__}: {error})."
        ) from error
    return {key: sorted(rows, key=lambda row: row.arrival_s) for key, rows in runs.items()}


class _Features:
    """`StepTimeModel` that keeps its derivatives by the coefficients, step by step."""

    def __init__(self, coefficients: FloatArray) -> None:
        self._coefficients = coefficients
        self._units = [StepTimeModel(**{"base_s": 0.0, name: 1.0}) for name in COEFFICIENTS]
        self._has_backlog = False
        self.scheduler: Any = None
        # Derivatives of each step, and whether any prefill was waiting when it was scheduled.
        self.rows: deque[tuple[FloatArray, bool]] = deque()

    def __call__(self, output: Any, requests: Any) -> float:
        row = np.array([unit(output, requests) for unit in self._units])
        # Of reading the weights and computing with them only the longer one counts.
        hidden = -1 if self._coefficients[-2] > self._coefficients[-1] * row[-1] else -2
        row[hidden] = 0.0
        self.rows.append((row, self._has_backlog))
        _, num_waiting = self.scheduler.get_request_counts()
        self._has_backlog = bool(num_waiting) or any(
            requests[req_id].is_prefill_chunk for req_id in output.num_scheduled_tokens
        )
        return float(row @ self._coefficients)


def simulate(
    requests: Sequence[MeasuredRequest], deployment: Deployment, coefficients: FloatArray
) -> Simulated:
    """Run all requests under vLLM's own scheduler.

    Args:
        requests: Sorted by arrival.
        deployment: Engine settings.
        coefficients: Values of `COEFFICIENTS`, seconds, >= 0.
    """
    from sola_sched.simulator.engine import VirtualEngine
    from sola_sched.simulator.host import stock_scheduler_cls

    step_time = _Features(coefficients)
    engine = VirtualEngine(
        stock_scheduler_cls(async_scheduling=deployment.async_scheduling),
        num_blocks=deployment.num_blocks,
        max_model_len=deployment.max_model_len,
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        async_scheduling=deployment.async_scheduling,
        step_time=step_time,
    )
    step_time.scheduler = engine.scheduler
    num, width = len(requests), len(COEFFICIENTS)
    first, first_offset = np.full((num, width), np.nan), np.full(num, np.nan)
    # Totals at the first and at the last token.
    opened = np.full((num, width + 1), np.nan)
    closed = np.full((num, width + 1), np.nan)
    # Derivatives since a moment when nothing waited, that moment, and totals with idle time last.
    done, begun_s, total = np.zeros(width), 0.0, np.zeros(width + 1)
    previous_end_s = 0.0

    def on_step(trace: StepTrace) -> None:
        nonlocal done, begun_s, total, previous_end_s
        row, has_backlog = step_time.rows.popleft()
        idle_s = trace.start_s - previous_end_s
        if not has_backlog or idle_s > _ROUNDING_S:
            done, begun_s = np.zeros(width), trace.start_s
        done = done + row
        total = total + np.append(row, max(0.0, idle_s))
        previous_end_s = trace.end_s
        for req_id in trace.sampling:
            index = int(req_id)
            if np.isnan(first_offset[index]):
                first[index], first_offset[index] = done, begun_s
                opened[index] = total
            closed[index] = total

    records = engine.run(
        [
            VirtualRequest(
                str(index),
                arrival_s=request.arrival_s,
                output_len=request.output_tokens,
                prompt_len=request.prompt_tokens,
            )
            for index, request in enumerate(requests)
        ],
        on_step=on_step,
    )
    by_id = {record.req_id: record for record in records}
    ordered = [by_id[str(index)] for index in range(num)]
    ttft = [metrics.ttft_s(r.arrival_s, r.first_token_s or math.nan) for r in ordered]
    tpot = [
        metrics.tpot_s((r.last_token_s or math.nan) - r.arrival_s, ttft_s, r.num_output_tokens)
        for r, ttft_s in zip(ordered, ttft, strict=True)
    ]
    return Simulated(
        ttft_s=np.array(ttft),
        tpot_s=np.array(tpot),
        first=first,
        first_offset_s=first_offset,
        decode=(closed - opened)[:, :-1],
        decode_offset_s=(closed - opened)[:, -1],
        num_steps=engine.num_steps,
        num_preemptions=sum(record.num_preemptions for record in records),
    )


@dataclass(frozen=True)
class RequestFit:
    """Fitted coefficients, and the simulation with them."""

    step_time: StepTimeModel
    simulated: Simulated
    training_error: float
    num_simulations: int


def fit(
    requests: Sequence[MeasuredRequest],
    deployment: Deployment,
    is_training: NDArray[np.bool_],
    num_simulations: int = NUM_SIMULATIONS,
) -> RequestFit:
    """Fit step times to the training requests.

    Args:
        requests: Sorted by arrival.
        deployment: Engine settings.
        is_training: [num_requests].
        num_simulations: Simulations to run, >= 1.
    """
    arrival = np.array([request.arrival_s for request in requests])
    ttft = np.array([request.ttft_s for request in requests])
    tpot = np.array([request.tpot_s for request in requests])
    gaps = np.array([request.output_tokens - 1 for request in requests])
    weight = 1.0 / np.maximum(ttft, _TTFT_FLOOR * float(ttft[is_training].mean()))
    is_decode = is_training & (gaps > 0)
    coefficients = _first_guess(tpot[is_decode], requests)
    best: RequestFit | None = None
    for count in range(1, num_simulations + 1):
        simulated = simulate(requests, deployment, coefficients)
        errors = np.concatenate(
            [
                ((simulated.ttft_s - ttft) * weight)[is_training],
                (simulated.tpot_s / tpot - 1.0)[is_decode],
            ]
        )
        error = float(np.mean(np.abs(errors)))
        if best is None or error < best.training_error:
            step_time = StepTimeModel(**dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True)))
            best = RequestFit(step_time, simulated, error, num_simulations)
        if count == num_simulations:
            break
        decode_s = (tpot * gaps)[is_decode]
        rows = np.vstack(
            [
                simulated.first[is_training] * weight[is_training, None],
                simulated.decode[is_decode] / decode_s[:, None],
            ]
        )
        target = np.concatenate(
            [
                ((arrival + ttft - simulated.first_offset_s) * weight)[is_training],
                1.0 - simulated.decode_offset_s[is_decode] / decode_s,
            ]
        )
        coefficients = _solve(rows, target, coefficients)
    assert best is not None
    return best


def _solve(rows: FloatArray, target: FloatArray, previous: FloatArray) -> FloatArray:
    scale = np.sqrt(np.mean(rows**2, axis=0))
    scale = np.where(scale > 0.0, scale, 1.0)
    damping = math.sqrt(_DAMPING * len(target))
    prior, prior_target = damping * np.eye(len(scale)), damping * previous * scale
    weights = np.ones(len(target))
    for _ in range(1 + _NUM_REWEIGHTS):
        table = np.vstack([rows / scale * weights[:, None], prior])
        solution, _ = nnls(table, np.concatenate([target * weights, prior_target]))
        residual = np.abs(rows / scale @ solution - target)
        cut = _HUBER_SIGMAS * max(1.4826 * float(np.median(residual)), 1e-3)
        weights = np.sqrt(np.minimum(1.0, cut / np.maximum(residual, cut)))
    result: FloatArray = solution / scale
    return result


def _first_guess(tpot_s: FloatArray, requests: Sequence[MeasuredRequest]) -> FloatArray:
    """From the spread of TPOT; reading the weights takes as long as computing 200 tokens."""
    fastest, usual = np.percentile(tpot_s, [2, 50])
    context = float(np.mean([r.prompt_tokens + r.output_tokens / 2 for r in requests]))
    constant = 0.6 * fastest
    per_decode = (usual - constant) / 100
    return np.array(
        [
            0.2 * constant,
            0.3 * per_decode,
            0.5 * per_decode / context,
            0.1 * constant / 200 / context,
            0.8 * constant,
            0.8 * constant / 200,
        ]
    )


def evaluate(
    requests: Sequence[MeasuredRequest], fitted: RequestFit, is_test: NDArray[np.bool_]
) -> dict[str, Any]:
    """Errors of the simulation over the test requests, plain data."""
    report: dict[str, Any] = {"num_requests": int(is_test.sum())}
    for name in ("ttft", "tpot"):
        real = np.array([getattr(request, f"{name}_s") for request in requests])[is_test]
        simulated = getattr(fitted.simulated, f"{name}_s")[is_test]
        defined = np.isfinite(real) & np.isfinite(simulated)
        real, simulated = real[defined], simulated[defined]
        relative = np.abs(simulated / real - 1.0)
        report |= {
            f"real_mean_{name}_ms": 1e3 * float(real.mean()),
            f"simulated_mean_{name}_ms": 1e3 * float(simulated.mean()),
            f"mean_{name}_error": float(simulated.mean() / real.mean() - 1.0),
            f"{name}_correlation": float(np.corrcoef(real, simulated)[0, 1]),
            **{f"p{p}_abs_{name}_error": float(np.percentile(relative, p)) for p in (50, 90, 99)},
        }
    return report
