"""Runs a load on a configuration: by the fast model, or with the real schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.core import metrics
from sola_sched.plan.inputs.load import Load
from sola_sched.plan.inputs.models import PlannedModel, profile
from sola_sched.plan.search import pools
from sola_sched.plan.search.configurations import Configuration, to_json
from sola_sched.simulator.cluster.cluster import VirtualCluster
from sola_sched.simulator.cluster.engine import ClusterEngine, ClusterRequest
from sola_sched.simulator.cluster.fast.instance import FastInstance, FastSloInstance
from sola_sched.simulator.cluster.records import ClusterRecord, ClusterRun
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.steps.profile import StepProfile

if TYPE_CHECKING:
    from sola_sched.simulator.cluster.real import RealInstance

#: What a target is of: name on the command line, field of `SloTarget`, property of a record.
TARGETS = (
    ("ttft", "ttft_s", "ttft_s"),
    ("tpot", "tpot_s", "tpot_s"),
    ("e2e", "e2e_s", "latency_s"),
)
OnDone = Callable[[ClusterRecord], None]
#: Makes engines: so many, of the prefill and the decode pool or (both False) for whole requests.
_Make = Callable[[Configuration, bool], ClusterEngine]


@dataclass(frozen=True)
class Outcome:
    """What a configuration does to a load; the requests of the first fifth are not counted.

    Attributes:
        attainment: Share that met all targets.
        met: Share that met each target, by its name.
        ttft_ms, tpot_ms: 50th and 99th percentile; NaN where no request has such a time.
        excess: What the share asked for needs at least, over the target, by its name.
    """

    configuration: Configuration
    attainment: float
    met: dict[str, float]
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    excess: dict[str, float]

    @property
    def worst(self) -> str:
        """The target that the fewest met."""
        return min(self.met, key=self.met.__getitem__)

    def to_json(self, goal: float) -> dict[str, Any]:
        """Plain data."""
        return to_json(self.configuration) | {
            "attained": self.attainment >= goal,
            "attainment": self.attainment,
            **{f"{name}_attainment": share for name, share in self.met.items()},
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            **{f"{name}_excess": factor for name, factor in self.excess.items()},
        }


def run_fast(
    model: str | PlannedModel,
    configuration: Configuration,
    load: Load,
    seed: int,
    goal: float,
    faster: float = 1,
) -> Outcome:
    """By the fast model."""
    requests = load.requests(faster=faster)

    def make(configuration: Configuration, is_decode: bool) -> ClusterEngine:
        return fast_engine(model, configuration, load, seed, is_decode)

    records, _ = _serve(model, configuration, requests, make, seed)
    return outcome(configuration, records, load.counted_from_s / faster, goal)


def run_real(
    model: str | PlannedModel,
    configuration: Configuration,
    load: Load,
    seed: int,
    goal: float,
    on_done: OnDone | None = None,
) -> Outcome:
    """With the real schedulers inside."""

    def make(configuration: Configuration, is_decode: bool) -> ClusterEngine:
        return real_engine(model, configuration, load, seed, is_decode)

    records, start_s = _serve(model, configuration, load.requests(), make, seed, on_done)
    return outcome(configuration, records, start_s + load.counted_from_s, goal)


def prefill_share(
    model: str | PlannedModel, configuration: Configuration, load: Load, seed: int, goal: float
) -> float:
    """Share of the requests whose first token a prefill pool delivers in time, by the fast model.

    Args:
        configuration: Whose `num_prefill` counts.
    """
    pool = configuration.times(configuration.num_prefill)
    engines = [fast_engine(model, pool, load, seed) for _ in range(pool.num_instances)]
    cluster = VirtualCluster(
        engines, ALL_ROUTERS[pool.router](seed), seed=seed, has_reports=_has_reports(pool)
    )
    run = cluster.run(pools.prefill_requests(load.requests()))
    return outcome(pool, run.records, load.counted_from_s, goal).met["ttft"]


def _serve(
    model: str | PlannedModel,
    configuration: Configuration,
    requests: Sequence[ClusterRequest],
    make: _Make,
    seed: int,
    on_done: OnDone | None = None,
) -> tuple[Sequence[ClusterRecord], float]:
    """All requests on all instances: the records, and when the requests began."""
    router = ALL_ROUTERS[configuration.router](seed)
    num_prefill = configuration.num_prefill
    if not num_prefill:
        run, start_s = _pool(configuration, False, requests, router, make, seed, on_done)
        return run.records, start_s
    pool = configuration.times(num_prefill)
    first, start_s = _pool(pool, False, pools.prefill_requests(requests), router, make, seed)
    shape = profile(model, configuration.gpu, configuration.tensor_parallel)
    rest = pools.decode_requests(requests, first.records, shape)
    if not rest:
        return pools.whole(requests, first.records, ()), start_s
    router = ALL_ROUTERS[pools.DECODE_ROUTER](seed)
    pool = replace(
        configuration.times(configuration.num_instances),
        max_num_batched_tokens=pools.WHOLE_PROMPT,
    )
    second, later_s = _pool(pool, True, rest, router, make, seed, on_done)
    return pools.whole(requests, first.records, second.records, later_s), start_s


def _pool(
    configuration: Configuration,
    is_decode: bool,
    requests: Sequence[ClusterRequest],
    router: Any,
    make: _Make,
    seed: int,
    on_done: OnDone | None = None,
) -> tuple[ClusterRun, float]:
    """One pool: what it did, and by how much the requests were put off for its warm-up."""
    engines = [make(configuration, is_decode) for _ in range(configuration.num_instances)]
    clocks = [getattr(getattr(engine, "engine", None), "clock", None) for engine in engines]
    start_s = float(math.ceil(max((clock.now for clock in clocks if clock is not None), default=0)))
    cluster = VirtualCluster(
        engines, router, seed=seed, start_s=start_s, has_reports=_has_reports(configuration),
        on_done=on_done,
    )  # fmt: skip
    later = [
        replace(each, request=replace(each.request, arrival_s=start_s + each.request.arrival_s))
        for each in requests
    ]
    return cluster.run(later if start_s else requests), start_s


def _has_reports(configuration: Configuration) -> bool:
    """Whether its engines tell a gateway their load: those of stock vLLM do not."""
    return configuration.spec.kind == "sola"


def outcome(
    configuration: Configuration,
    records: Sequence[ClusterRecord],
    counted_from_s: float,
    goal: float,
) -> Outcome:
    """Count what came after the filling."""
    counted = [record for record in records if record.arrival_s >= counted_from_s]
    values, met, factors = {}, {}, {}
    for name, field, measure in TARGETS:
        targets = [getattr(record.slo, field) for record in counted]
        taken = np.array(
            [getattr(record, measure) if record.completed else math.inf for record in counted]
        )
        values[name] = taken  # NaN: there is none, as of a token after the first of only one
        taken = np.where(np.isnan(taken), 0.0, taken)  # counts as met
        if name != "e2e" or any(map(math.isfinite, targets)):
            met[name] = float(np.mean(taken <= np.array(targets)))
            factors[name] = excess(taken, targets, goal)
    return Outcome(
        configuration,
        attainment=metrics.attainment_ratio([record.attains for record in counted]),
        met=met,
        ttft_ms=_percentiles_ms(values["ttft"]),
        tpot_ms=_percentiles_ms(values["tpot"]),
        excess=factors,
    )


def excess(values: Any, targets: Sequence[float], goal: float) -> float:
    """The factor on the targets with which a share `goal` of the values would meet them."""
    with np.errstate(invalid="ignore"):  # a request that failed, and no target: inf / inf
        ratios = np.sort(
            np.nan_to_num(np.asarray(values) / np.asarray(targets), nan=math.inf, posinf=math.inf)
        )
    return float(ratios[min(len(ratios) - 1, math.ceil(goal * len(ratios)) - 1)])


def _percentiles_ms(values: Any) -> tuple[float, float]:
    finite = values[np.isfinite(values)] * 1e3
    if not len(finite):
        missing = math.nan if np.all(np.isnan(values)) else math.inf
        return missing, missing
    return float(np.percentile(finite, 50)), float(np.percentile(finite, 99))


def _shape(model: str | PlannedModel, configuration: Configuration, is_decode: bool) -> StepProfile:
    shape = profile(model, configuration.gpu, configuration.tensor_parallel)
    return pools.decode_profile(shape) if is_decode else shape


def fast_engine(
    model: str | PlannedModel,
    configuration: Configuration,
    load: Load,
    seed: int,
    is_decode: bool = False,
) -> ClusterEngine:
    """One instance by the fast model."""
    shape = _shape(model, configuration, is_decode)
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


def real_engine(
    model: str | PlannedModel,
    configuration: Configuration,
    load: Load,
    seed: int,
    is_decode: bool = False,
) -> RealInstance:
    """One instance with the real scheduler inside, that has served its warm-up."""
    from sola_sched.bench.backends.simulation import SimBackend, SimOptions
    from sola_sched.simulator.cluster.real import RealInstance, Slowed

    plain = _shape(model, configuration, is_decode)
    steps = Slowed(BatchTime(plain.step_time))
    stretched = replace(plain, step_time=steps)  # type: ignore[arg-type]
    backend = SimBackend(SimOptions(stretched, seed=seed))
    engine = backend.warm_engine(configuration.spec, load.slo, load.workload)
    return RealInstance(engine, steps, num_gpus=configuration.tensor_parallel)
