"""Why nothing can be rented that attains: which target fails, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sola_sched.errors import ConfigError
from sola_sched.plan.configurations import Configuration, profile
from sola_sched.plan.evaluate import TARGETS, Outcome, excess
from sola_sched.plan.load import Load
from sola_sched.simulator.cluster.engine import ClusterRequest
from sola_sched.simulator.cluster.step_model import BatchTime


class ImpossibleError(ConfigError):
    """No configuration meets a target; the message says which and by how much it is missed."""


def require_possible(model: str, choices: Sequence[Configuration], load: Load, goal: float) -> None:
    """Refuse targets that a request misses even when it is alone on the fastest instance.

    Raises:
        ImpossibleError: Names the target, and what it would have to be.
    """
    requests = load.requests()
    places = dict.fromkeys((choice.gpu, choice.tensor_parallel) for choice in choices)
    alone = {
        place: _alone(BatchTime(profile(model, *place).step_time), requests) for place in places
    }
    for name, field, _ in TARGETS:
        targets = [getattr(request.slo, field) for request in requests]
        needs = {place: excess(taken[name], targets, goal) for place, taken in alone.items()}
        (gpu, degree), least = min(needs.items(), key=lambda item: item[1])
        if least > 1.0:
            raise ImpossibleError(
                f"the {name} target must be at least {least:.3g} times what it is: so long take "
                f"{goal:.0%} of the requests even alone on the fastest choice, {degree} {gpu}; "
                f"raise --slo {name} or name faster GPUs."
            )


def _alone(steps: BatchTime, requests: Sequence[ClusterRequest]) -> dict[str, np.ndarray]:
    """Least seconds of each request by target, with an instance for itself."""
    taken: dict[str, list[float]] = {name: [] for name, _, _ in TARGETS}
    for request in requests:
        prompt, more = request.request.num_prompt_tokens, request.request.output_len - 1
        ttft_s, step_s = float(steps.prefill_s(prompt)), float(steps.decode_s(1, prompt))
        taken["ttft"].append(ttft_s)
        taken["tpot"].append(step_s if more else 0.0)
        taken["e2e"].append(ttft_s + more * step_s)
    return {name: np.array(values) for name, values in taken.items()}


def explain(outcomes: Sequence[Outcome], goal: float, max_gpus: int) -> str:
    """Why none attains: the best of them, its worst target and by how much."""
    best = max(outcomes, key=lambda o: o.attainment)
    name = best.worst
    return (
        f"no configuration of up to {max_gpus} GPUs attains {goal:.1%}: the best, "
        f"{best.configuration.name}, attains {best.attainment:.1%}, "
        f"{100 * (goal - best.attainment):.1f} points less; its {name} target is met by "
        f"{best.met[name]:.1%}, and would have to be {best.excess[name]:.3g} times what it is; "
        "raise --max-gpus or the targets, or lower --request-rate or --attainment."
    )
