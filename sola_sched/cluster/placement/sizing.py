"""How many instances a request rate needs, by packing what is under way at a random moment.

Source: Aladdin, section 5.2: Eq. 7 is fitted to what Algorithm 1 needs at several rates. By
Little's law rate x mean time under way requests are on the instances at once; which lengths they
have and how far they are follows from the workload, long ones being met more often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sola_sched.cluster.performance.model import PerformanceModel
from sola_sched.cluster.placement.best_fit import best_fit, why_infeasible
from sola_sched.cluster.placement.demand import Demand
from sola_sched.cluster.placement.fleet import Fleet, Tightness
from sola_sched.errors import ConfigError, InfeasibleError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """Lengths of past requests, and the targets.

    Attributes:
        prompts, outputs: Tokens of each request [n].
        ttft_s, tpot_s: Targets, seconds.
    """

    prompts: FloatArray
    outputs: FloatArray
    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        lengths = (self.prompts, self.outputs)
        if not len(self.prompts) or len(self.prompts) != len(self.outputs):
            raise ConfigError(
                f"'prompts' and 'outputs' must have one length for each request (got "
                f"{len(self.prompts)} and {len(self.outputs)})."
            )
        for values in lengths:
            if not (np.isfinite(values) & (values >= 1)).all():
                raise ConfigError("Lengths must be finite and >= 1 token; drop empty requests.")
        if not (self.ttft_s > 0.0 and 0.0 < self.tpot_s < math.inf):
            raise ConfigError(
                f"'ttft_s' must be > 0 and 'tpot_s' finite and > 0 (got {self.ttft_s!r}, "
                f"{self.tpot_s!r})."
            )


def instances_needed(
    model: PerformanceModel,
    workload: Workload,
    rate_per_s: float,
    *,
    max_requests: int = 256,
    tightness: Tightness | None = None,
    heartbeat_s: float = 1.0,
    seed: int = 0,
) -> int:
    """Instances on which best fit places what is under way and the arrivals of one heartbeat.

    A request is under way for its TTFT target and its outputs at the TPOT target: the longest that
    it may take.

    Raises:
        InfeasibleError: A request fits on no instance even alone.
    """
    if not 0.0 < rate_per_s < math.inf:
        raise ConfigError(f"'rate_per_s' must be finite and > 0 (got {rate_per_s!r}).")
    rng = np.random.default_rng(seed)
    decoding_s = workload.outputs * workload.tpot_s
    num_running = int(rng.poisson(rate_per_s * float(decoding_s.mean())))
    running = rng.choice(len(decoding_s), num_running, p=decoding_s / decoding_s.sum())
    done = rng.random(num_running)
    num_new = max(1, int(rng.poisson(rate_per_s * heartbeat_s)))
    new = rng.integers(0, len(decoding_s), num_new)
    fleet = Fleet([model] * (num_running + num_new), max_requests, tightness=tightness)
    for j, share in zip(running, done, strict=True):
        generated = share * workload.outputs[j]
        held, left = workload.prompts[j] + generated, workload.outputs[j] - generated
        _put(fleet, Demand(max(1, round(held)), max(left, 1e-3), tpot_s=workload.tpot_s))
    # Those that run have their prompts behind them.
    fleet.new_tokens[:] = 0.0
    for j in new:
        prompt, output = round(float(workload.prompts[j])), float(workload.outputs[j])
        _put(fleet, Demand(prompt, output, workload.ttft_s, workload.tpot_s))
    return int(np.count_nonzero(fleet.num_requests))


def rates_needed(
    model: PerformanceModel, workload: Workload, rates_per_s: Sequence[float], **options: object
) -> list[int]:
    """`instances_needed` at each rate, for the fit of Eq. 7."""
    return [instances_needed(model, workload, rate, **options) for rate in rates_per_s]  # type: ignore[arg-type]


def _put(fleet: Fleet, demand: Demand) -> None:
    i = best_fit(fleet, demand)
    if i is None:
        raise InfeasibleError(
            f"A request of {demand.prompt_tokens} prompt tokens fits on no instance: "
            f"{why_infeasible(fleet, demand)}."
        )
    fleet.add(i, demand)
