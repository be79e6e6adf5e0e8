"""Where the published schedulers are compared: loads, rates and machines."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.points import SYNTHETIC, Point, make_workload
from mixed.mixes import MIXES, Kind, Mix, mixed_workload
from simulation.setups import DATASETS
from sola_sched.bench.backends.base import SchedulerSpec
from sola_sched.bench.backends.simulation import SimBackend, SimOptions
from sola_sched.config.slo import SloTarget
from sola_sched.cost.model import CostModel, StepShape
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.rough import ROUGHNESSES, RoughStepTime
from sola_sched.simulator.steps.time import StepCounts
from sola_sched.workloads.datasets import ModelLimits
from sola_sched.workloads.workload import Workload

#: Step times: of measured kernels, and computed from public figures of the hardware.
MEASURED, COMPUTED = "llama-3-8b-a100-measured", "llama-3-8b-a100"
MAX_NUM_BATCHED_TOKENS = 8192
#: Machines on which steps take what the profile says.
EVEN = "even"
#: On these schedulers are given step times that are wrong by a factor.
WRONG = {"profile x 2": 2.0, "profile / 2": 0.5}
MACHINES = (EVEN, *ROUGHNESSES, *WRONG)
_TIGHT, _MEDIUM, _LOOSE = SloTarget(0.8, 0.06), SloTarget(2.0, 0.12), SloTarget(20.0, 0.5)


@dataclass(frozen=True)
class Load:
    """What arrives, at any rate.

    Attributes:
        dataset: Lengths.
        slo: Targets of all requests that are of no kind.
        mix: Kinds of requests with their own targets, in its place.
    """

    dataset: str
    slo: SloTarget = field(default_factory=SloTarget)
    mix: Mix | None = None

    def workload(
        self, limits: ModelLimits, data: Path | None, rate_per_s: float, count: int, seed: int
    ) -> Workload:
        """The requests, the same for every scheduler."""
        dataset = self.dataset if data else SYNTHETIC
        if self.mix is not None:
            mix = replace(self.mix, rate_per_s=rate_per_s, dataset=dataset)
            return mixed_workload(mix, limits, data, count, seed)
        targets = (self.slo.ttft_s, self.slo.tpot_s)
        point = Point("", dataset, rate_per_s, *targets, "", num_requests=count, seed=seed)
        return make_workload(point, limits, data)


_THREE = {name: Kind(1 / 3, slo) for name, slo in
          {"tight": _TIGHT, "medium": _MEDIUM, "loose": _LOOSE}.items()}  # fmt: skip
LOADS = {
    "azure-conv": Load(DATASETS["azure-conv"], SloTarget(0.8, 0.12)),
    "azure-code": Load(DATASETS["azure-code"], SloTarget(1.5, 0.15)),
    "sharegpt": Load(DATASETS["sharegpt"], SloTarget(2.0, 0.105)),
    "arxiv": Load(DATASETS["arxiv"], SloTarget(1.6, 0.12)),
    "mooncake": Load(DATASETS["mooncake"], SloTarget(0.8, 0.12)),
    "three classes": Load(DATASETS["azure-conv"], mix=Mix("a third each", _THREE, 0.0)),
    "40/40/20": Load(DATASETS["sharegpt"], mix=MIXES["40/40/20"]),
}


@dataclass(frozen=True)
class Place:
    """One line of the table.

    Attributes:
        load: Key of `LOADS`.
        share: Rate over the one at which stock vLLM attains 90 % on an even machine; 0 for a
            rate that is given.
        rate_per_s: Given.
        machine: One of `MACHINES`.
        profile: Of the machine.
    """

    load: str
    share: float = 0.0
    rate_per_s: float = 0.0
    machine: str = EVEN
    profile: str = MEASURED

    @property
    def name(self) -> str:
        """As in the table, and for ``--only``."""
        where = (
            f"{self.load} x {self.share:g}" if self.share else f"{self.load} {self.rate_per_s:g}/s"
        )
        return where if self.machine == EVEN else f"{where}, {self.machine}"


_SINGLE = ("azure-conv", "azure-code", "sharegpt", "arxiv", "mooncake")
PLACES = (
    *itertools.starmap(Place, itertools.product(_SINGLE, (0.9, 1.0, 1.25, 2.0))),
    *itertools.starmap(Place, itertools.product(("three classes", "40/40/20"), (1.0, 1.25))),
    *(Place("azure-conv", share, machine=m) for m in MACHINES[1:] for share in (0.9, 1.25)),
    Place("three classes", 1.0, machine="stalls"),
    # Near saturation, where published schedulers are closest.
    *(Place("azure-conv", 0.0, rate, profile=COMPUTED) for rate in (5.5, 7.0, 8.5, 10.0)),
    *(Place("three classes", 0.0, rate, profile=COMPUTED) for rate in (7.0, 9.0)),
    *(Place(load, 0.0, 4.0, profile=COMPUTED) for load in ("azure-code", "sharegpt")),
    *(Place("azure-conv", 0.0, 7.0, machine, COMPUTED) for machine in ("stalls", "drift")),
    Place("three classes", 0.0, 8.0, "stalls", COMPUTED),
)


def backend_on(name: str, machine: str, seed: int) -> tuple[SimBackend, RoughStepTime | None]:
    """The backend of a machine, and its step times where they change with the time."""
    profile = load_step_profile(name)
    rough = None
    if machine in ROUGHNESSES:
        rough = RoughStepTime(profile.step_time, ROUGHNESSES[machine], seed)
        step_time: Any = rough
        profile = replace(profile, step_time=step_time)
    args = {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    return SimBackend(SimOptions(profile, engine_args=args)), rough


def told(spec: SchedulerSpec, profile: str, machine: str) -> SchedulerSpec:
    """The scheduler with what it is told of a machine's step times."""
    factor = WRONG.get(machine)
    if factor is None or spec.kind != "sola":
        return spec
    options = dict(spec.options)
    if "policy_options" in options:
        options["policy_options"] = options["policy_options"] | {"scale": factor}
    else:
        options["profile"] = str(_wrong_profile(profile, factor))
    return replace(spec, options=options)


@functools.cache
def _wrong_profile(profile: str, factor: float) -> Path:
    """A profile for our scheduler whose step times are all off by a factor."""
    step_time: Any = load_step_profile(profile).step_time
    steps = []
    for decodes, ctx, tokens in itertools.product(
        (0, 1, 16, 64, 256), (200, 2000), (0, 64, 512, 4096)
    ):
        counts = StepCounts(decodes, decodes * ctx, int(tokens > 0), tokens, 0.5 * tokens * tokens)
        shape = StepShape(decodes, decodes * ctx, tokens, float(tokens * tokens), 0.0)
        if decodes or tokens:
            steps.append((shape, factor * float(step_time.seconds(counts))))
    path = Path(tempfile.mkdtemp(prefix="sola-wrong-profile-")) / f"{factor:g}.json"
    CostModel.fit(steps).save(path, meta={})
    return path
