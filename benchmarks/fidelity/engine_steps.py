"""Predicts what the real engine did: steps from their batches, whole runs in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from scipy.optimize import nnls

from fidelity.recording import PARTS, Cycle, EngineFacts
from sola_sched.bench.backends.base import SchedulerSpec, extra_args
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import CONFIG_KEY
from sola_sched.core import metrics
from sola_sched.core.metrics import RequestRecord
from sola_sched.cost.model import CostModel
from sola_sched.errors import ProfileError
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.curves import Batch, StepCurves, batch_of
from sola_sched.workloads.workload import RequestSpec, Workload

#: Targets: mean absolute error of a step, and of attainment.
STEP_TARGET = 0.06
ATTAINMENT_TARGET = 0.03
#: How much longer every step is made, to see what a step's error does to a run.
SLOWDOWN = 1.03
SPAN_FORM = "linear, schedule() to update"


@dataclass(frozen=True)
class SchedulerTime:
    """CPU time of ``schedule()`` and ``update_from_output()``, on average over like steps.

    Attributes:
        base_s, per_request_s, per_prefill_s: Coefficients, >= 0.
    """

    base_s: float
    per_request_s: float
    per_prefill_s: float

    @classmethod
    def fit(cls, cycles: Sequence[Cycle]) -> SchedulerTime:
        """By least squares, so that the sum over the steps is right."""
        table = [[1.0, c.batch.num_requests, c.batch.num_prefills] for c in cycles]
        solution, _ = nnls(np.array(table), np.array([c.schedule_s + c.update_s for c in cycles]))
        return cls(*solution.tolist())

    def step_s(self, batch: Batch) -> float:
        """Seconds of one step."""
        requests, prefills = batch.num_requests, batch.num_prefills
        return self.base_s + self.per_request_s * requests + self.per_prefill_s * prefills


@dataclass(frozen=True)
class EngineTime:
    """Time of a whole cycle under one scheduler; a `step_time` of the virtual engine."""

    engine: StepCurves
    scheduler: SchedulerTime

    def step_s(self, batch: Batch) -> float:
        """Seconds of one step; 0 for an empty one."""
        return self.engine.step_s(batch) + self.scheduler.step_s(batch) if batch.num_tokens else 0.0

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        return self.step_s(batch_of(output, requests))


def fit_engine(training: Mapping[str, Sequence[Cycle]]) -> dict[str, EngineTime]:
    """Step times by scheduler: what is the engine's is shared, the scheduler's own is not.

    Args:
        training: Cycles by label of the scheduler.

    Raises:
        ProfileError: A scheduler has no cycles.
    """
    for label, cycles in training.items():
        if not cycles:
            raise ProfileError(f"'{label}' must have run some steps to be fitted (got none).")
    every = [cycle for cycles in training.values() for cycle in cycles]
    curves = StepCurves.fit(
        [cycle.batch for cycle in every],
        [cycle.total_s - cycle.schedule_s - cycle.update_s for cycle in every],
    )
    return {label: EngineTime(curves, SchedulerTime.fit(c)) for label, c in training.items()}


def fit_without_host(
    training: Mapping[str, Sequence[Cycle]], stock: Sequence[str]
) -> dict[str, EngineTime]:
    """The same without the host time that a profile of vLLM's scheduler leaves out.

    That is taking in requests, making outputs, and what another scheduler takes longer.

    Args:
        training: Cycles by label of the scheduler.
        stock: Labels that are vLLM's scheduler; without one each keeps its own time.
    """
    fitted = fit_engine(
        {
            label: [replace(cycle, admit_s=0.0, output_s=0.0) for cycle in cycles]
            for label, cycles in training.items()
        }
    )
    return {
        label: EngineTime(each.engine, fitted[stock[0]].scheduler if stock else each.scheduler)
        for label, each in fitted.items()
    }


def step_errors(predicted_s: Sequence[float], cycles: Sequence[Cycle]) -> dict[str, float]:
    """Mean absolute relative error over steps, and the error of their sum."""
    measured = np.array([cycle.total_s for cycle in cycles])
    predicted = np.array(predicted_s)
    return {
        "num_steps": len(cycles),
        "mean_abs_error": float(np.mean(np.abs(predicted / measured - 1.0))),
        "total_error": float(predicted.sum() / measured.sum() - 1.0),
    }


def repeat_noise(cycles: Sequence[Cycle]) -> float:
    """Mean relative difference of neighbouring decode steps of equal size, over the root of 2.

    What no function of the batch can predict, without slow changes of the machine; NaN if there
    are no such steps.
    """
    differences = [
        abs(a.total_s / b.total_s - 1.0) / math.sqrt(2.0)
        for a, b in pairwise(cycles)
        if a.batch.num_prefills == b.batch.num_prefills == 0
        and a.batch.num_requests == b.batch.num_requests
    ]
    return float(np.mean(differences)) if differences else math.nan


def mean_parts(cycles: Sequence[Cycle]) -> dict[str, float]:
    """Where the time of a cycle goes on average, seconds."""
    return {part: float(np.mean([getattr(cycle, part) for cycle in cycles])) for part in PARTS}


@dataclass(frozen=True)
class LinearForms:
    """The cost model in place of the curves, fitted to the same steps.

    Attributes:
        span: To what `python -m sola_sched.profile` measures, under vLLM's scheduler.
        cycle: To whole cycles.
    """

    span: CostModel
    cycle: CostModel

    @classmethod
    def fit(cls, training: Mapping[str, Sequence[Cycle]], stock: Sequence[str]) -> LinearForms:
        """Fit both.

        Args:
            training: Cycles by label of the scheduler.
            stock: Labels that are vLLM's scheduler; all if there are none.
        """
        every = [cycle for cycles in training.values() for cycle in cycles]
        chosen = [cycle for label in stock for cycle in training[label]] or every
        return cls(
            CostModel.fit([(cycle.batch.shape, cycle.span_s) for cycle in chosen]),
            CostModel.fit([(cycle.batch.shape, cycle.total_s) for cycle in every]),
        )

    def errors(
        self, test: Sequence[Cycle], curves_s: Sequence[float]
    ) -> dict[str, dict[str, float]]:
        """Errors of each form against whole cycles.

        Args:
            test: All held-out cycles.
            curves_s: Predictions for them by the curves.
        """
        shapes = [cycle.batch.shape for cycle in test]
        return {
            SPAN_FORM: step_errors([self.span.step_s(shape) for shape in shapes], test),
            "linear, whole step": step_errors([self.cycle.step_s(s) for s in shapes], test),
            "curves, whole step": step_errors(curves_s, test),
        }


@dataclass(frozen=True)
class Scaled:
    """Another step time, all steps longer by a factor."""

    step_time: Callable[[Any, Mapping[str, Any]], float]
    factor: float

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        return self.factor * self.step_time(output, requests)


def simulate(
    workload: Workload,
    warmup: Sequence[RequestSpec],
    scheduler: SchedulerSpec,
    slo: SloTarget,
    facts: EngineFacts,
    step_time: Any,
) -> list[RequestRecord]:
    """The workload in virtual time, after the same warm-up; records in its order.

    Output lengths are forced and known as limits, as in the real replay.
    """
    from sola_sched.simulator.engine import VirtualEngine
    from sola_sched.simulator.host import MODELS, stock_scheduler_cls

    additional = {}
    scheduler_cls: type[Any] = stock_scheduler_cls(async_scheduling=facts.async_scheduling)
    if scheduler.kind == "sola":
        from sola_sched.vllm_adapter.scheduler import Scheduler

        scheduler_cls = Scheduler
        targets = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
        additional[CONFIG_KEY] = {
            **{name: value if math.isfinite(value) else None for name, value in targets.items()},
            **scheduler.options,
        }
    vocab_size = 1 + max(max(request.prompt_token_ids) for request in workload.requests)
    engine = VirtualEngine(
        scheduler_cls,
        model=MODELS["llama-3-8b"] | {"vocab_size": max(1024, vocab_size)},
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        async_scheduling=facts.async_scheduling,
        enable_prefix_caching=facts.enable_prefix_caching,
        additional_config=additional,
        step_time=step_time,
    )
    engine.run([_virtual(request, 0.0) for request in warmup])
    start_s = engine.clock.now = float(math.ceil(engine.clock.now))
    engine.run([_virtual(request, start_s) for request in workload.requests])
    times = {record.req_id: record for record in engine.records}
    return [
        RequestRecord(
            req_id=request.req_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=len(request.prompt_token_ids),
            token_times_s=[time_s - start_s for time_s in times[request.req_id].token_times_s],
            completed=times[request.req_id].is_finished,
            slo=request.slo,
        )
        for request in workload.requests
    ]


def _virtual(request: RequestSpec, start_s: float) -> VirtualRequest:
    return VirtualRequest(
        req_id=request.req_id,
        arrival_s=start_s + request.arrival_s,
        output_len=request.output_tokens,
        prompt_token_ids=request.prompt_token_ids,
        extra_args=extra_args(request.slo),
    )


def summary(records: Sequence[RequestRecord], slo: SloTarget) -> dict[str, float]:
    """Attainment and mean latencies of a run, seconds."""
    done = [record for record in records if record.completed]
    return {
        "attainment": metrics.attainment_ratio(metrics.attained(records, slo)),
        "mean_ttft_s": float(np.mean([record.ttft_s for record in done])),
        "mean_tpot_s": float(np.nanmean([record.tpot_s for record in done])),
    }


def ranking(real: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, int]:
    """How many pairs of schedulers the simulation puts in the right order.

    A pair counts as different when its real attainments differ by more than
    `ATTAINMENT_TARGET`; it is right when the simulated difference has the same sign.
    """
    pairs = [
        (real[a] - real[b], simulated[a] - simulated[b])
        for a, b in combinations(real, 2)
        if abs(real[a] - real[b]) > ATTAINMENT_TARGET
    ]
    return {"num_pairs": len(pairs), "num_right": sum(x * y > 0 for x, y in pairs)}
