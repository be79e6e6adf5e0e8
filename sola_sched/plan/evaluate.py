"""Runs a load on a configuration: by the fast model, or with the real schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sola_sched.cluster.routers import ROUTERS
from sola_sched.core import metrics
from sola_sched.plan.configurations import Configuration, profile, to_json
from sola_sched.plan.load import Load
from sola_sched.simulator.cluster.cluster import VirtualCluster
from sola_sched.simulator.cluster.engine import ClusterEngine
from sola_sched.simulator.cluster.fast import FastInstance
from sola_sched.simulator.cluster.fast_slo import FastSloInstance
from sola_sched.simulator.cluster.records import ClusterRecord, ClusterRun
from sola_sched.simulator.cluster.step_model import BatchTime

if TYPE_CHECKING:
    from sola_sched.simulator.cluster.real import RealInstance


@dataclass(frozen=True)
class Outcome:
    """What a configuration does to a load; the requests of the first fifth are not counted.

    Attributes:
        attainment: Share that met both targets.
        ttft_attainment, tpot_attainment: Share that met each.
        ttft_ms, tpot_ms: 50th and 99th percentile.
        ttft_excess, tpot_excess: What the share asked for needs at least, over the target.
    """

    configuration: Configuration
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    ttft_excess: float
    tpot_excess: float

    def to_json(self, goal: float) -> dict[str, Any]:
        """Plain data."""
        values = {name: value for name, value in vars(self).items() if name != "configuration"}
        return to_json(self.configuration) | {"attained": self.attainment >= goal} | values


def run_fast(
    model: str, configuration: Configuration, load: Load, seed: int, goal: float, faster: float = 1
) -> Outcome:
    """By the fast model."""
    engines = [
        fast_engine(model, configuration, load, seed) for _ in range(configuration.num_instances)
    ]
    cluster = VirtualCluster(engines, ROUTERS[configuration.router](seed), seed=seed)
    run = cluster.run(load.requests(faster=faster))
    return outcome(configuration, run, load.counted_from_s / faster, goal)


def run_real(
    model: str,
    configuration: Configuration,
    load: Load,
    seed: int,
    goal: float,
    on_done: Callable[[ClusterRecord], None] | None = None,
) -> Outcome:
    """With the real schedulers inside."""
    engines = [
        real_engine(model, configuration, load, seed) for _ in range(configuration.num_instances)
    ]
    start_s = float(math.ceil(max(instance.engine.clock.now for instance in engines)))
    cluster = VirtualCluster(
        engines,
        ROUTERS[configuration.router](seed),
        seed=seed,
        start_s=start_s,
        on_done=on_done,
    )
    run = cluster.run(load.requests(start_s))
    return outcome(configuration, run, start_s + load.counted_from_s, goal)


def outcome(
    configuration: Configuration, run: ClusterRun, counted_from_s: float, goal: float
) -> Outcome:
    """Count what came after the filling."""
    counted = [record for record in run.records if record.arrival_s >= counted_from_s]
    ttft, tpot = (
        np.array([getattr(record, name) if record.completed else math.inf for record in counted])
        for name in ("ttft_s", "tpot_s")
    )
    tpot = np.where(np.isnan(tpot), 0.0, tpot)  # one token alone counts as met
    ttft_targets = [record.slo.ttft_s for record in counted]
    tpot_targets = [record.slo.tpot_s for record in counted]
    return Outcome(
        configuration,
        attainment=metrics.attainment_ratio([record.attains for record in counted]),
        ttft_attainment=float(np.mean(ttft <= ttft_targets)),
        tpot_attainment=float(np.mean(tpot <= tpot_targets)),
        ttft_ms=_percentiles_ms(ttft),
        tpot_ms=_percentiles_ms(tpot),
        ttft_excess=excess(ttft, ttft_targets, goal),
        tpot_excess=excess(tpot, tpot_targets, goal),
    )


def excess(values: Any, targets: Sequence[float], goal: float) -> float:
    """The factor on the targets with which a share `goal` of the values would meet them."""
    ratios = np.sort(np.asarray(values) / np.asarray(targets))
    return float(ratios[min(len(ratios) - 1, math.ceil(goal * len(ratios)) - 1)])


def _percentiles_ms(values: Any) -> tuple[float, float]:
    finite = values[np.isfinite(values)] * 1e3
    if not len(finite):
        return math.inf, math.inf
    return float(np.percentile(finite, 50)), float(np.percentile(finite, 99))


def fast_engine(model: str, configuration: Configuration, load: Load, seed: int) -> ClusterEngine:
    """One instance by the fast model."""
    shape = profile(model, configuration.gpu, configuration.tensor_parallel)
    assert shape.num_blocks is not None
    assert shape.max_model_len is not None
    cls = FastSloInstance if configuration.spec.kind == "sola" else FastInstance
    return cls(
        BatchTime(shape.step_time),
        kv_capacity_tokens=(shape.num_blocks - 1) * shape.block_size,
        max_num_seqs=configuration.max_num_seqs,
        max_num_batched_tokens=configuration.max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        num_gpus=configuration.tensor_parallel,
        block_size=shape.block_size,
    )


def real_engine(model: str, configuration: Configuration, load: Load, seed: int) -> RealInstance:
    """One instance with the real scheduler inside, that has served its warm-up."""
    from sola_sched.bench.backends.simulation import SimBackend, SimOptions
    from sola_sched.simulator.cluster.real import RealInstance, Slowed

    plain = profile(model, configuration.gpu, configuration.tensor_parallel)
    steps = Slowed(BatchTime(plain.step_time))
    stretched = replace(plain, step_time=steps)  # type: ignore[arg-type]
    backend = SimBackend(SimOptions(stretched, seed=seed))
    engine = backend.warm_engine(configuration.spec, load.slo, load.workload)
    return RealInstance(engine, steps, num_gpus=configuration.tensor_parallel)
