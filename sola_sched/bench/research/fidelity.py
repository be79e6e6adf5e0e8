"""``python -m sola_sched.bench fidelity``: how near virtual time comes to real engines."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sola_sched.bench import calibrate
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import OnDone, RunOutcome, SchedulerSpec, parse_scheduler
from sola_sched.bench.data.datasets import DatasetOptions, build
from sola_sched.bench.data.workload import Workload
from sola_sched.bench.report import results
from sola_sched.bench.values import positive_int
from sola_sched.config.output_file import require_writable
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.errors import ConfigError

if TYPE_CHECKING:
    from sola_sched.bench.backends.engine_recording import Cycle, RecordingBackend

Say = Callable[[str], None]

DATA_VARIABLE = "SOLA_SCHED_DATA"
_DEFAULT_DATA = Path(__file__).parents[3].parent / "shared" / "data"
SCHEDULERS = ("stock:512", "sola:2048")
#: Added to the seed of training workloads.
_TRAINING_SEED = 1000
_NUM_PROBE = 80


@dataclass(frozen=True)
class Traffic:
    """A workload of the comparison.

    Attributes:
        dataset: Fields of ``DatasetOptions``.
        load: Request rate over the saturation rate with 32 requests in flight.
        slo_scale: Targets over 10 x the latency of a request alone. Both are chosen so that
            some requests meet their targets and some do not.
    """

    dataset: dict[str, Any]
    load: float
    slo_scale: float


TRAFFIC = {
    "chat": Traffic({"name": "sharegpt-like"}, 1.15, 0.5),
    "short": Traffic(
        {"name": "random", "random_input_len": 64, "random_output_len": 256,
         "random_range_ratio": 0.5}, 1.5, 0.5,
    ),
    "long": Traffic(
        {"name": "random", "random_input_len": 1200, "random_output_len": 24,
         "random_range_ratio": 0.5}, 0.95, 1.0,
    ),
}  # fmt: skip

_DESCRIPTION = """\
Measures how near the simulator comes to real engines.

engine: a random 62 M parameter Llama on this machine's CPU, three workloads, vLLM's scheduler at
its best chunk size and ours. Step times are fitted to training workloads with other seeds; then the
held-out steps are predicted, and the runs repeated in virtual time.

requests: runs recorded on GPUs, of which only request times are known. Step times are fitted to
every second request; errors are those of the others. Needs vllm_measured_requests.csv.gz.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m sola_sched.bench fidelity",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--only", choices=("engine", "requests"), help="one of the two parts (default: both)")
    add("--workloads", nargs="+", choices=tuple(TRAFFIC), default=list(TRAFFIC))
    add(
        "--schedulers",
        nargs="+",
        metavar="SPEC",
        default=list(SCHEDULERS),
        help=f"as in the benchmark (default: {' '.join(SCHEDULERS)})",
    )
    add("--num-prompts", type=positive_int, default=60, help="requests a run (default: 60)")
    add("--seed", type=int, default=0)
    add(
        "--clock",
        choices=("cpu", "wall"),
        default="cpu",
        help="cpu leaves out what other work on the machine takes (default: cpu)",
    )
    add(
        "--model-shape",
        choices=("default", "tiny"),
        default="default",
        help="tiny is for tests of the command",
    )
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"folder of the recorded requests (default: ${DATA_VARIABLE}, or ../shared/data)",
    )
    add(
        "--save-profile",
        type=Path,
        metavar="FILE",
        help="write the fitted step times, for --backend sim --profile FILE",
    )
    add("--output", type=Path, metavar="FILE", help="write all numbers as JSON")
    return parser


def main(argv: Sequence[str], say: Say = print) -> int:
    """Run the command; return the exit code, 0 whatever the numbers are.

    Raises:
        ConfigError: An argument cannot be right.
        DatasetError: The recorded requests cannot be read.
    """
    args = build_parser().parse_args(argv)
    if args.output:
        require_writable(args.output, "--output")
    environment.prepare(None, is_random=True)
    started_s = time.monotonic()
    document: dict[str, Any] = {"environment": results.environment(), "seed": args.seed}
    if args.only != "requests":
        document["engine"] = run_engine(args, say)
    path = _requests_file(args.data)
    if args.only == "requests" and path is None:
        raise ConfigError(
            "'--only requests' needs vllm_measured_requests.csv.gz (got no such file); name its "
            f"folder with --data or {DATA_VARIABLE}."
        )
    if args.only != "engine":
        if path is None:
            say("Recorded requests: left out, there is no vllm_measured_requests.csv.gz.")
        else:
            document["requests"] = run_requests(path, say)
    if args.output:
        args.output.write_text(results.to_json(document) + "\n", encoding="utf-8")
        say(f"Saved {args.output}.")
    say(f"Took {time.monotonic() - started_s:.0f} s, load {os.getloadavg()[0]:.1f} at the end.")
    return 0


def _requests_file(data: Path | None) -> Path | None:
    from sola_sched.bench.research.fidelity_requests import REQUESTS_FILE

    folder = data or Path(os.environ.get(DATA_VARIABLE) or _DEFAULT_DATA)
    path = folder / REQUESTS_FILE
    return path if path.is_file() else None


# Recorded requests --------------------------------------------------------------------------


def run_requests(path: Path, say: Say) -> list[dict[str, Any]]:
    """Fit and test every recorded run; return plain data."""
    from sola_sched.bench.research import fidelity_requests as recorded
    from sola_sched.bench.research.fidelity_report import request_table

    rows = []
    for (gpu, model), requests in recorded.read_requests(path).items():
        deployment = recorded.DEPLOYMENTS.get((gpu, model))
        if deployment is None:
            say(f"{gpu} {model}: left out, its engine settings are not known here.")
            continue
        is_training = np.arange(len(requests)) % 2 == 0
        fitted = recorded.fit(requests, deployment, is_training)
        rows.append(
            {
                "gpu": gpu,
                "model": model,
                "deployment": asdict(deployment),
                "step_time": asdict(fitted.step_time),
                "training": recorded.evaluate(requests, fitted, is_training),
                "test": recorded.evaluate(requests, fitted, ~is_training),
                "num_steps": fitted.simulated.num_steps,
                "num_preemptions": fitted.simulated.num_preemptions,
            }
        )
        say(f"{gpu} {model}: fitted to {int(is_training.sum())} requests.")
    say("\n" + request_table(rows) + "\n")
    return rows


# Engine -------------------------------------------------------------------------------------


class _Collector:
    """Keeps the steps of every run of a backend, by scheduler."""

    def __init__(self, backend: RecordingBackend, label: str) -> None:
        self._backend = backend
        self._label = label
        self.name, self.model_id, self.tokenizer_id = "engine", backend.model_id, backend.model_id
        self.cycles: dict[str, list[Cycle]] = {}

    def run(
        self,
        workload: Workload,
        scheduler: SchedulerSpec,
        slo: SloTarget,
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        """See ``Backend.run``."""
        outcome = self._backend.run(
            workload, scheduler, slo, max_concurrency=max_concurrency, on_done=on_done
        )
        self.cycles.setdefault(self._label or scheduler.label, []).extend(self._backend.cycles)
        return outcome


@dataclass
class _Run:
    """A real test run and what is needed to repeat it in virtual time."""

    traffic: str
    spec: SchedulerSpec
    workload: Workload
    slo: SloTarget
    outcome: RunOutcome
    cycles: list[Cycle]
    facts: Any
    warmup: Any
    is_repeat: bool


def run_engine(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Record the real runs, fit, simulate and compare; return plain data."""
    from sola_sched.bench.research import fidelity_steps as steps
    from sola_sched.bench.research.fidelity_report import engine_tables

    specs = [parse_scheduler(text) for text in args.schedulers]
    for spec in specs:
        if spec.kind not in ("stock", "sola"):
            raise ConfigError(f"'--schedulers' must be stock or sola here (got {spec.label!r}).")
        SolaConfig.from_mapping(spec.options)
    backend = _make_backend(args)
    training: dict[str, list[Cycle]] = {spec.label: [] for spec in specs}
    runs: list[_Run] = []
    for name in args.workloads:
        _record(args, name, specs, backend, training, runs, say)
    fitted = steps.fit_engine(training)
    stock = [spec.label for spec in specs if spec.kind == "stock"]
    without_host = steps.fit_without_host(training, stock)
    linear = steps.LinearForms.fit(training, stock)
    rows = []
    for run in runs:
        step_time = fitted[run.spec.label]
        predicted = [step_time.step_s(cycle.batch) for cycle in run.cycles]
        row: dict[str, Any] = {
            "workload": run.traffic,
            "scheduler": run.spec.label,
            "is_repeat": run.is_repeat,
            "request_rate": run.workload.request_rate,
            "slo": {"ttft_s": run.slo.ttft_s, "tpot_s": run.slo.tpot_s},
            "steps": steps.step_errors(predicted, run.cycles),
            "repeat_noise": steps.repeat_noise(run.cycles),
            "parts": steps.mean_parts(run.cycles),
            "real": steps.summary(run.outcome.records, run.slo),
        }
        if not run.is_repeat:
            # Diagnosis only: the run's own total is no prediction.
            own_speed = 1.0 / (1.0 + row["steps"]["total_error"])
            variants = {
                "simulated": step_time,
                "simulated_own_speed": steps.Scaled(step_time, own_speed),
                "simulated_without_host": without_host[run.spec.label],
                "simulated_slower": steps.Scaled(step_time, steps.SLOWDOWN),
            }
            for name, variant in variants.items():
                records = steps.simulate(
                    run.workload, run.warmup, run.spec, run.slo, run.facts, variant
                )
                row[name] = steps.summary(records, run.slo)
        rows.append(row)
    tests = [cycle for run in runs for cycle in run.cycles]
    every = [cycle for cycles in training.values() for cycle in cycles]
    chosen = [fitted[run.spec.label].step_s(cycle.batch) for run in runs for cycle in run.cycles]
    report: dict[str, Any] = {
        "clock": args.clock,
        "num_prompts": args.num_prompts,
        "num_training_steps": len(every),
        "runs": rows,
        "forms": linear.errors(tests, chosen),
        "scheduler_time": {label: asdict(each.scheduler) for label, each in fitted.items()},
        "ranking": {name: steps.ranking(*_attainments(rows, name)) for name in args.workloads},
    }
    say("\n" + engine_tables(report) + "\n")
    if args.save_profile:
        _save_profile(args.save_profile, every, specs, backend)
        say(f"Wrote {args.save_profile}.")
    return report


def _attainments(
    rows: Sequence[dict[str, Any]], name: str
) -> tuple[dict[str, float], dict[str, float]]:
    mine = [row for row in rows if row["workload"] == name and not row["is_repeat"]]
    real = {row["scheduler"]: row["real"]["attainment"] for row in mine}
    return real, {row["scheduler"]: row["simulated"]["attainment"] for row in mine}


def _record(
    args: argparse.Namespace,
    name: str,
    specs: Sequence[SchedulerSpec],
    backend: RecordingBackend,
    training: dict[str, list[Cycle]],
    runs: list[_Run],
    say: Say,
) -> None:
    """Targets, rate, training and test runs of one workload."""
    traffic = TRAFFIC[name]
    num_training = max(1, args.num_prompts // 2)
    tested = build(
        DatasetOptions(num_prompts=args.num_prompts, seed=args.seed, **traffic.dataset),
        backend.limits,
    )
    trained = build(
        DatasetOptions(
            num_prompts=max(_NUM_PROBE, num_training),
            seed=args.seed + _TRAINING_SEED,
            **traffic.dataset,
        ),
        backend.limits,
    )
    reference = next((spec for spec in specs if spec.kind == "stock"), specs[0])
    collector = _Collector(backend, reference.label)
    alone = calibrate.measure_slo(collector, trained, reference).target
    slo = SloTarget(alone.ttft_s * traffic.slo_scale, alone.tpot_s * traffic.slo_scale)
    rate = traffic.load * calibrate.measure_saturation(
        collector, trained, reference, num_requests=min(_NUM_PROBE, args.num_prompts)
    )
    for label, cycles in collector.cycles.items():
        training[label].extend(cycles)
    say(
        f"{name}: {rate:.2f} requests/s, targets TTFT {slo.ttft_s * 1e3:.0f} ms, "
        f"TPOT {slo.tpot_s * 1e3:.1f} ms."
    )
    trained = replace(trained, requests=trained.requests[:num_training])
    trained = trained.at_rate(rate, seed=args.seed + _TRAINING_SEED)
    tested = tested.at_rate(rate, seed=args.seed)
    for spec in specs:
        backend.run(trained, spec, slo)
        training[spec.label].extend(backend.cycles)
        _test(name, spec, tested, slo, backend, runs, is_repeat=False)
    _test(name, specs[0], tested, slo, backend, runs, is_repeat=True)


def _test(
    name: str,
    spec: SchedulerSpec,
    workload: Workload,
    slo: SloTarget,
    backend: RecordingBackend,
    runs: list[_Run],
    *,
    is_repeat: bool,
) -> None:
    outcome = backend.run(workload, spec, slo)
    runs.append(
        _Run(
            name, spec, workload, slo, outcome, backend.cycles, backend.facts, backend.warmup,
            is_repeat,
        )
    )  # fmt: skip


def _make_backend(args: argparse.Namespace) -> RecordingBackend:
    from sola_sched.bench.backends.engine import EngineOptions
    from sola_sched.bench.backends.engine_recording import RecordingBackend
    from sola_sched.bench.backends.model import BENCH_SHAPE, TINY_SHAPE, cached_model
    from sola_sched.bench.plan import RANDOM_MODEL_KV_BYTES

    shape = BENCH_SHAPE if args.model_shape == "default" else TINY_SHAPE
    engine_args: dict[str, Any] = {
        "kv_cache_memory_bytes": RANDOM_MODEL_KV_BYTES,
        "max_num_seqs": 128,
        "enforce_eager": True,
    }
    return RecordingBackend(
        EngineOptions(
            model=str(cached_model(shape)),
            model_id=shape.name,
            is_random_model=True,
            engine_args=engine_args,
            seed=args.seed,
            clock=args.clock,
        )
    )


def _save_profile(
    path: Path, cycles: Sequence[Cycle], specs: Sequence[SchedulerSpec], backend: RecordingBackend
) -> None:
    from sola_sched.cost.model import CostModel
    from sola_sched.simulator.steps.curves import META_KEY, StepCurves

    model = CostModel.fit([(cycle.batch.shape, cycle.total_s) for cycle in cycles])
    curves = StepCurves.fit([c.batch for c in cycles], [c.total_s for c in cycles])
    meta = {
        "model": backend.model_id,
        "measured": "whole engine cycles, host time included",
        "schedulers": [spec.label for spec in specs],
        "num_steps": len(cycles),
        "async_scheduling": backend.facts.async_scheduling if backend.facts else False,
        "environment": results.environment(),
        META_KEY: curves.to_json(),
    }
    model.save(path, meta=meta)
