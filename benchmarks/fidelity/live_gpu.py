"""vLLM of today on this machine's GPU: its own scheduler and ours on the same requests.

A Llama of 8B with random weights serves a workload whose lengths are recorded, at one rate after
the other. Every step and every request is kept, so that step times can be fitted and the runs
repeated in virtual time where there is no GPU (`live_gpu_report`).
"""

from __future__ import annotations

import csv
import gzip
import importlib.metadata
import itertools
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fidelity.recording import engine_facts, scheduler_of
from harness.points import SYNTHETIC, Point, make_workload
from harness.setup import Outcome, Setup
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import RunOutcome, SchedulerSpec
from sola_sched.bench.backends.engine import EngineBackend, EngineOptions
from sola_sched.bench.backends.model import TINY_SHAPE, ModelShape, cached_model
from sola_sched.config.output_file import require_writable
from sola_sched.core import metrics
from sola_sched.cost.fit import kind_of
from sola_sched.simulator.steps.curves import Batch, batch_of

#: Sizes of Llama-3-8B.
LLAMA_3_8B = ModelShape(
    hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    vocab_size=128256, max_model_len=8192,
)  # fmt: skip
#: The file names no profile: the point is only there for its requests.
_NO_PROFILE = "none"
_DATASET = "azure_conv_2023.csv.gz"
_TTFT_S, _TPOT_S = 0.263, 0.0663

STEP_COLUMNS = (
    "run", "decodes", "prefills", "new", "decode_ctx", "prefill_tokens", "prefill_sq",
    "prefill_ctx", "total_us", "schedule_us", "update_us",
)  # fmt: skip
REQUEST_COLUMNS = ("run", "request", "arrival_s", "prompt", "output", "ttft_s", "tpot_s", "e2e_s")


class StepLog:
    """Keeps batch and time of every step of a live scheduler, asynchronous or not.

    A step takes from the end of the one before, or from its own `schedule()` when that is later, to
    the end of its `update_from_output()`.

    Attributes:
        steps: Batch, microseconds in all, of `schedule()` and of `update_from_output()`.
    """

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[tuple[Batch, float, float, float]] = []
        in_flight: dict[int, tuple[Batch, float, float]] = {}
        schedule, update = scheduler.schedule, scheduler.update_from_output
        last_end = clock()

        def logged_schedule(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            output = schedule(*args, **kwargs)
            end = clock()
            in_flight[id(output)] = (batch_of(output, scheduler.requests), start, end - start)
            return output

        def logged_update(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal last_end
            begin = clock()
            result = update(scheduler_output, *args, **kwargs)
            end = clock()
            batch, start, spent = in_flight.pop(id(scheduler_output))
            if kind_of(batch.shape) is not None:
                total = end - max(start, last_end)
                self.steps.append((batch, 1e6 * total, 1e6 * spent, 1e6 * (end - begin)))
            last_end = end
            return result

        scheduler.schedule, scheduler.update_from_output = logged_schedule, logged_update

    def start(self) -> list[tuple[Batch, float, float, float]]:
        """Keep steps in a new list, and return it."""
        self.steps = []
        return self.steps


class LoggingBackend(EngineBackend):
    """In-process vLLM that keeps the steps of the run that it is in.

    Attributes:
        steps: As in `StepLog`, after the warm-up or the run before.
        facts: Of its engine that a simulation must know.
    """

    def _watched(self, engine: Any, scheduler: Any, clock: Callable[[], float]) -> Any:
        config = engine.vllm_config
        self.facts = asdict(engine_facts(config, scheduler)) | {
            "compilation": str(config.compilation_config.mode),
            "cudagraphs": str(config.compilation_config.cudagraph_mode),
        }
        self._log = StepLog(scheduler)
        return engine

    def _warmed_up(self) -> None:
        self.steps = self._log.start()


def measure(setup: Setup, points: Sequence[Point], say: Callable[[str], None]) -> None:
    """Serve every point and keep its row, its steps and its requests.

    Args:
        setup: Its path takes the rows; steps and requests go to `beside` it.
        points: What to serve; their `profile` is not used.
        say: Takes a line for each run.

    Raises:
        ConfigError: A scheduler is none of vLLM's or ours.
    """
    backend = _backend(setup)
    for scheduler, group in itertools.groupby(points, lambda point: point.scheduler):
        _serve(setup, backend, scheduler, list(group), say)


def beside(path: Path, what: str) -> Path:
    """The file with steps or requests of the rows in `path`."""
    return path.with_name(f"{path.stem}-{what}.csv.gz")


def points_of(setup: Setup) -> list[Point]:
    """Every seed and rate for one scheduler after the other, each of which has one engine."""
    return [
        Point(
            _NO_PROFILE,
            SYNTHETIC if setup.data is None else _DATASET,
            rate,
            _TTFT_S,
            _TPOT_S,
            scheduler,
            num_requests=setup.num_requests,
            seed=seed,
        )
        for scheduler in setup.options["schedulers"]
        for seed in setup.seeds
        for rate in setup.options["request_rates"]
    ]


def point_of(row: Mapping[str, Any]) -> Point:
    """What a row's requests are made of."""
    return Point(
        _NO_PROFILE, row["dataset"], row["rate_per_s"], row["ttft_s"], row["tpot_s"],
        row["scheduler"], num_requests=row["num_requests"], seed=row["seed"],
    )  # fmt: skip


def _backend(setup: Setup) -> LoggingBackend:
    shape = TINY_SHAPE if setup.is_quick else LLAMA_3_8B
    engine_args = {"max_num_seqs": 256, **(setup.options["engine_args"] or {})}
    return LoggingBackend(
        EngineOptions(
            model=str(cached_model(shape)),
            model_id="llama-3-8b",
            is_random_model=True,
            engine_args=engine_args,
        )
    )


def _serve(
    setup: Setup,
    backend: LoggingBackend,
    scheduler: str,
    points: Sequence[Point],
    say: Callable[[str], None],
) -> None:
    """All points of one scheduler on one engine; each is kept as soon as it is there."""
    machine = _machine()
    spec = scheduler_of(scheduler)
    workloads = [make_workload(point, backend.limits, setup.data) for point in points]
    left = iter(points)
    started_s = time.monotonic()

    def keep(outcome: RunOutcome) -> None:
        nonlocal started_s
        point = next(left)
        now_s = time.monotonic()
        run = f"{machine['gpu']}, {point.rate_per_s:g}/s, {spec.label}, {point.seed}"
        row = {
            "run": run,
            "dataset": point.dataset,
            "rate_per_s": point.rate_per_s,
            "ttft_s": point.ttft_s,
            "tpot_s": point.tpot_s,
            "scheduler": spec.label,
            "seed": point.seed,
            "num_requests": point.num_requests,
            **_summary(outcome, point, spec),
            "facts": backend.facts,
            "wall_s": round(now_s - started_s, 1),
            **machine,
        }
        started_s = now_s
        _append(beside(setup.path, "steps"), STEP_COLUMNS, _step_rows(run, backend.steps))
        _append(beside(setup.path, "requests"), REQUEST_COLUMNS, _request_rows(run, outcome))
        for kept in setup.keep([row]):
            say(
                f"{kept['rate_per_s']:g}/s {kept['scheduler']}, seed {kept['seed']}: "
                f"{100 * kept['attainment']:.1f} % in time, {kept['tokens_per_s']:.0f} tokens/s, "
                f"{kept['num_steps']} steps, {kept['num_preemptions']} preemptions"
            )

    backend.run_each(workloads, spec, points[0].slo, keep)


def _summary(outcome: RunOutcome, point: Point, spec: SchedulerSpec) -> dict[str, Any]:
    done = [record for record in outcome.records if record.completed]
    stats = outcome.scheduler
    return {
        "attainment": metrics.attainment_ratio(metrics.attained(outcome.records, point.slo)),
        "num_completed": len(done),
        "tokens_per_s": sum(r.num_output_tokens for r in done) / outcome.duration_s,
        "duration_s": outcome.duration_s,
        "num_steps": stats.num_steps if stats else 0,
        "num_preemptions": stats.num_preemptions if stats else 0,
        "scheduler_cpu_us": 1e6 * stats.cpu_s / max(1, stats.num_steps) if stats else None,
        "mean_running": stats.mean_num_running if stats else None,
        "notes": outcome.notes,
    }


def _step_rows(
    run: str, steps: Iterable[tuple[Batch, float, float, float]]
) -> Iterable[Sequence[object]]:
    for batch, *times_us in steps:
        shape = batch.shape
        yield (
            run, shape.num_decodes, batch.num_prefills, batch.num_new, shape.decode_ctx_tokens,
            shape.prefill_tokens, int(shape.prefill_sq_tokens), int(shape.prefill_ctx_tokens),
            *(round(time_us) for time_us in times_us),
        )  # fmt: skip


def _request_rows(run: str, outcome: RunOutcome) -> Iterable[Sequence[object]]:
    for record in outcome.records:
        if record.completed:
            yield (
                run, record.req_id, round(record.arrival_s, 4), record.num_prompt_tokens,
                record.num_output_tokens, round(record.ttft_s, 4), round(record.tpot_s, 5),
                round(record.token_times_s[-1] - record.arrival_s, 4),
            )  # fmt: skip


def _append(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "at", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        if is_new:
            writer.writerow(columns)
        writer.writerows(rows)


def _machine() -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    driver = ""
    if on_gpu:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "driver": driver,
        "torch": importlib.metadata.version("torch"),
    }


def live(setup: Setup) -> Outcome:
    """Serve and keep what happened, or with `--stored` compare it with virtual time.

    Raises:
        ConfigError: An argument cannot be right.
        DatasetError: The data set is not there.
    """
    if setup.is_stored:
        from fidelity.live_gpu_report import tables

        rows = setup.all_rows()
        return Outcome(rows, tables(setup, rows))
    environment.prepare(None, is_random=True)
    require_writable(setup.path, "--results")
    measure(setup, points_of(setup), print)
    return Outcome(setup.all_rows(), "Compared with virtual time by `--stored`; that needs no GPU.")
