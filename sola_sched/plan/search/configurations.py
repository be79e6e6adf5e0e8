"""What can be rented: engines of a model on GPUs, how many of them, and the router before them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sola_sched.bench.backends.base import SchedulerSpec, parse_scheduler
from sola_sched.errors import ConfigError
from sola_sched.plan.inputs.models import (
    COMPUTED,
    KERNELS,
    MEASURED_HERE,
    PlannedModel,
    origin,
    planned,
)
from sola_sched.simulator.steps.gpus import ALL_GPUS
from sola_sched.simulator.steps.roofline import Assumptions, fits, num_blocks, on_gpus

_BYTES = 2
_SOLA_CHUNK = 8192
_STOCK_CHUNK = 2048


@dataclass(frozen=True)
class Configuration:
    """One answer to what to rent.

    Attributes:
        gpu: A key of `GPUS`.
        price: Of one GPU and hour.
        tensor_parallel: GPUs of an instance.
        scheduler: What runs in it, as on the benchmark's command line.
        max_num_seqs, max_num_batched_tokens: Its slots and tokens of a step.
        router: A key of `ALL_ROUTERS`; before the prefill pool, where there is one.
        num_instances: How many; with a prefill pool, of the decode pool.
        num_prefill: Instances of the prefill pool; 0 if each instance does both.
    """

    gpu: str
    price: float
    tensor_parallel: int
    scheduler: str
    max_num_seqs: int
    max_num_batched_tokens: int
    router: str
    num_instances: int = 1
    num_prefill: int = 0

    @property
    def num_gpus(self) -> int:
        """In all."""
        return self.tensor_parallel * (self.num_instances + self.num_prefill)

    @property
    def cost_per_hour(self) -> float:
        """Of all GPUs."""
        return self.price * self.num_gpus

    @property
    def spec(self) -> SchedulerSpec:
        """The scheduler with its engine arguments."""
        spec = parse_scheduler(self.scheduler)
        spec.engine_args["max_num_seqs"] = self.max_num_seqs
        spec.engine_args["max_num_batched_tokens"] = self.max_num_batched_tokens
        return spec

    @property
    def name(self) -> str:
        """For tables."""
        number = str(self.num_instances)
        if self.num_prefill:
            number = f"({self.num_prefill} prefill + {self.num_instances} decode)"
        scheduler = self.scheduler.partition(":")[0]
        return (
            f"{number} x {self.tensor_parallel} {self.gpu}, {scheduler}, chunk "
            f"{self.max_num_batched_tokens}, {self.max_num_seqs} seqs, {self.router}"
        )

    def times(self, num_instances: int, num_prefill: int = 0) -> Configuration:
        """The same with so many instances."""
        return replace(self, num_instances=num_instances, num_prefill=num_prefill)


def configurations(
    model: str | PlannedModel,
    prices: Mapping[str, float],
    degrees: Sequence[int],
    schedulers: Sequence[str],
    max_num_seqs: Sequence[int],
    routers: Sequence[str],
) -> list[Configuration]:
    """Every combination that fits into memory, with one instance each.

    Raises:
        ConfigError: A scheduler is of another kind, or the model fits on no combination.
    """
    shape = planned(model).shape
    places = [
        (gpu, degree)
        for gpu, degree in itertools.product(prices, degrees)
        if not shape.unshared(degree) and fits(on_gpus(shape, degree), ALL_GPUS[gpu], Assumptions())
    ]
    if not places:
        raise ConfigError(_fits_nowhere(model, prices, degrees))
    found = []
    for (gpu, degree), scheduler, seqs, router in itertools.product(
        places, schedulers, max_num_seqs, routers
    ):
        spec = parse_scheduler(scheduler)
        if spec.kind not in ("sola", "stock"):
            raise ConfigError(f"'--schedulers' takes sola and stock here (got {scheduler!r}).")
        default = _SOLA_CHUNK if spec.kind == "sola" else _STOCK_CHUNK
        chunk = int(spec.max_num_batched_tokens or default)
        if chunk < min(max_num_seqs):
            raise ConfigError(
                f"the chunk of '--schedulers {scheduler}' must be >= --max-num-seqs "
                f"(got {chunk} < {min(max_num_seqs)})."
            )
        if chunk < seqs:
            continue
        found.append(Configuration(gpu, prices[gpu], degree, scheduler, seqs, chunk, router))
    return found


def _fits_nowhere(
    model: str | PlannedModel, prices: Mapping[str, float], degrees: Sequence[int]
) -> str:
    assumed, sizes = Assumptions(), []
    for gpu, degree in itertools.product(prices, degrees):
        shape = on_gpus(planned(model).shape, degree)
        if what := shape.unshared(degree):
            sizes.append(f"{degree} {gpu}: {what} cannot be shared by {degree}")
            continue
        need_gb = shape.num_parameters * _BYTES / degree / 1e9
        have_gb = assumed.memory_utilization * ALL_GPUS[gpu].memory_gib * 2**30 / 1e9
        tokens = max(0, num_blocks(shape, ALL_GPUS[gpu], assumed) - 1) * 16
        sizes.append(
            f"{degree} {gpu}: {need_gb:.1f} GB of weights on each, {have_gb:.1f} GB usable, room "
            f"for {tokens} of {shape.max_model_len} KV tokens"
        )
    return (
        f"'--model {planned(model).name}' must fit into memory with one request of full length (it "
        f"fits on none: {'; '.join(sizes)}); add larger GPUs or a higher --tensor-parallel-size, "
        "or name the longest request with --max-model-len."
    )


def steps_said(model: str | PlannedModel, choices: Sequence[Configuration]) -> str:
    """Where the step times of these come from, in a sentence."""
    places = dict.fromkeys((choice.gpu, choice.tensor_parallel) for choice in choices)
    words = {
        MEASURED_HERE: "as measured by --profile",
        KERNELS: "of measured kernels",
        COMPUTED: "computed from hardware figures, corrected by kernels",
    }
    parts = []
    for kind, said in words.items():
        own = [f"{degree} {gpu}" for gpu, degree in places if origin(model, gpu, degree) == kind]
        if own:
            parts.append(f"{', '.join(own)} {said}")
    return f"Step times: {'; '.join(parts)}."


def to_json(configuration: Configuration) -> dict[str, Any]:
    """Plain data."""
    return {
        "name": configuration.name,
        **vars(configuration),
        "num_gpus": configuration.num_gpus,
        "cost_per_hour": configuration.cost_per_hour,
    }
