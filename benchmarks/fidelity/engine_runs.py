"""Runs on the real engine, step times fitted to some, and the others repeated in virtual time.

A random 62 M parameter Llama on this machine's CPU, three workloads, vLLM's scheduler at its best
chunk size and ours. Step times are fitted to training workloads with other seeds; then the held-out
steps are predicted, and the runs repeated in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity import engine_steps as steps
from harness.setup import Setup
from sola_sched.bench import calibrate
from sola_sched.bench.backends.base import OnDone, RunOutcome, SchedulerSpec
from sola_sched.bench.report import results
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.workloads.datasets import DatasetOptions, build
from sola_sched.workloads.workload import Workload

if TYPE_CHECKING:
    from fidelity.recording import Cycle, RecordingBackend

Say = Callable[[str], None]

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


def run_engine(setup: Setup, workloads: Sequence[str], say: Say) -> dict[str, Any]:
    """Record the real runs, fit, simulate and compare; return plain data.

    Args:
        setup: With ``schedulers``, ``clock`` and ``save_profile``; one seed.
        workloads: Keys of `TRAFFIC`.
        say: Takes lines of text.

    Raises:
        ConfigError: A scheduler is none of vLLM's or ours.
    """
    from fidelity.recording import scheduler_of

    specs = [scheduler_of(text) for text in setup.options["schedulers"]]
    for spec in specs:
        SolaConfig.from_mapping(spec.options)
    backend = _make_backend(setup)
    training: dict[str, list[Cycle]] = {spec.label: [] for spec in specs}
    runs: list[_Run] = []
    for name in workloads:
        _record(setup, name, specs, backend, training, runs, say)
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
        "clock": setup.options["clock"],
        "num_prompts": setup.num_requests,
        "num_training_steps": len(every),
        "runs": rows,
        "forms": linear.errors(tests, chosen),
        "scheduler_time": {label: asdict(each.scheduler) for label, each in fitted.items()},
        "ranking": {name: steps.ranking(*_attainments(rows, name)) for name in workloads},
    }
    path = setup.options["save_profile"]
    if path is not None:
        _save_profile(path, every, specs, backend)
        say(f"Wrote {path}.")
    return report


def _attainments(
    rows: Sequence[dict[str, Any]], name: str
) -> tuple[dict[str, float], dict[str, float]]:
    mine = [row for row in rows if row["workload"] == name and not row["is_repeat"]]
    real = {row["scheduler"]: row["real"]["attainment"] for row in mine}
    return real, {row["scheduler"]: row["simulated"]["attainment"] for row in mine}


def _record(
    setup: Setup,
    name: str,
    specs: Sequence[SchedulerSpec],
    backend: RecordingBackend,
    training: dict[str, list[Cycle]],
    runs: list[_Run],
    say: Say,
) -> None:
    """Targets, rate, training and test runs of one workload."""
    traffic = TRAFFIC[name]
    num_training = max(1, setup.num_requests // 2)
    tested = build(
        DatasetOptions(num_prompts=setup.num_requests, seed=setup.seeds[0], **traffic.dataset),
        backend.limits,
    )
    trained = build(
        DatasetOptions(
            num_prompts=max(_NUM_PROBE, num_training),
            seed=setup.seeds[0] + _TRAINING_SEED,
            **traffic.dataset,
        ),
        backend.limits,
    )
    reference = next((spec for spec in specs if spec.kind == "stock"), specs[0])
    collector = _Collector(backend, reference.label)
    alone = calibrate.measure_slo(collector, trained, reference).target
    slo = SloTarget(alone.ttft_s * traffic.slo_scale, alone.tpot_s * traffic.slo_scale)
    rate = traffic.load * calibrate.measure_saturation(
        collector, trained, reference, num_requests=min(_NUM_PROBE, setup.num_requests)
    )
    for label, cycles in collector.cycles.items():
        training[label].extend(cycles)
    say(
        f"{name}: {rate:.2f} requests/s, targets TTFT {slo.ttft_s * 1e3:.0f} ms, "
        f"TPOT {slo.tpot_s * 1e3:.1f} ms."
    )
    trained = replace(trained, requests=trained.requests[:num_training])
    trained = trained.at_rate(rate, seed=setup.seeds[0] + _TRAINING_SEED)
    tested = tested.at_rate(rate, seed=setup.seeds[0])
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


def _make_backend(setup: Setup) -> RecordingBackend:
    from fidelity.recording import RecordingBackend
    from sola_sched.bench.backends.engine import EngineOptions
    from sola_sched.bench.backends.model import (
        BENCH_SHAPE,
        TINY_SHAPE,
        cached_model,
        random_engine_args,
    )

    shape = TINY_SHAPE if setup.is_quick else BENCH_SHAPE
    engine_args = random_engine_args(shape.dtype if setup.is_quick else None)
    return RecordingBackend(
        EngineOptions(
            model=str(cached_model(shape)),
            model_id=shape.name,
            is_random_model=True,
            engine_args=engine_args | {"enforce_eager": True},
            seed=setup.seeds[0],
            clock=setup.options["clock"],
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
