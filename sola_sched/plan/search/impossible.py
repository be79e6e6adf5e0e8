"""Why nothing can be rented that attains: which target fails, and by how much."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from sola_sched.cluster.sharing.services import Service
from sola_sched.errors import ConfigError, InfeasibleError
from sola_sched.plan.inputs.load import Load
from sola_sched.plan.inputs.models import PlannedModel, profile
from sola_sched.plan.search.configurations import Configuration
from sola_sched.plan.search.evaluate import TARGETS, Outcome, excess
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.sharing.hardware import Hardware


class ImpossibleError(ConfigError):
    """No configuration meets a target; the message says which and by how much it is missed."""


def require_gpus(choices: Sequence[Configuration], max_gpus: int) -> None:
    """Refuse fewer GPUs than the smallest instance takes.

    Raises:
        ImpossibleError: Names both numbers.
    """
    least = min(choice.tensor_parallel for choice in choices)
    if max_gpus < least:
        raise ImpossibleError(
            f"'--max-gpus' must be at least {least}, what an instance takes that has memory for "
            f"the model and a degree of --tensor-parallel-size (got {max_gpus}); raise it, or name "
            "a smaller degree or GPUs with more memory."
        )


def require_possible(
    model: str | PlannedModel, choices: Sequence[Configuration], load: Load, goal: float
) -> None:
    """Refuse targets that a request misses even when it is alone on the fastest instance.

    Raises:
        ImpossibleError: Names the target, and what it would have to be.
    """
    requests = load.requests()
    lengths = [(one.request.num_prompt_tokens, one.request.output_len) for one in requests]
    places = dict.fromkeys((choice.gpu, choice.tensor_parallel) for choice in choices)
    alone = {
        place: _alone(BatchTime(profile(model, *place).step_time), lengths) for place in places
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


def require_possible_services(
    services: Sequence[Service], gpus: Collection[str], most_gpus: int, goal: float
) -> None:
    """Refuse targets that too many requests miss even when each is alone on the fastest GPUs.

    Args:
        services: All of them; those that fit nowhere are for the search to refuse.
        gpus: Kinds that there are.
        most_gpus: Of one engine.
        goal: Share of all requests that has to meet its targets.

    Raises:
        InfeasibleError: Names each such service, its target, and what it would have to be.
    """
    degrees = [1 << i for i in range(most_gpus.bit_length()) if 1 << i <= most_gpus]
    shares, reasons = [], []
    for service in services:
        places = {
            f"{degree} {gpu}": _alone(Hardware(gpu).steps(service.model, degree), service.lengths)
            for gpu in gpus
            for degree in degrees
            if Hardware(gpu).fits(degree, [service])
        }
        wanted = {name: getattr(service.slo, field) for name, field, _ in TARGETS}
        met = [
            np.mean(np.all([taken[name] <= wanted[name] for name in wanted], axis=0))
            for taken in places.values()
        ]
        shares.append(service.rate * (1.0 - service.refused) * max(met, default=1.0))
        if service.refused > 1.0 - goal:
            reasons.append(
                f"service {service.name!r}: engines refuse {service.refused:.1%} of its prompts, "
                "which are too long"
            )
        for name, target in wanted.items() if places else ():
            needs = {
                place: excess(taken[name], [target] * len(service.lengths), goal)
                for place, taken in places.items()
            }
            place = min(needs, key=needs.__getitem__)
            if needs[place] > 1.0:
                reasons.append(
                    f"service {service.name!r}: its {name} target must be at least "
                    f"{needs[place]:.3g} times what it is, so long take {goal:.0%} of its requests "
                    f"even alone on the fastest choice, {place}"
                )
    most = sum(shares) / sum(service.rate for service in services)
    if most < goal:
        raise InfeasibleError(
            f"at most {most:.1%} of the requests can meet their targets, {goal:.1%} must: "
            f"{'; '.join(reasons)}; raise the targets or name faster GPUs."
        )


def _alone(steps: BatchTime, lengths: Sequence[tuple[int, int]]) -> dict[str, np.ndarray]:
    """Least seconds of each request by target, with an instance for itself."""
    taken: dict[str, list[float]] = {name: [] for name, _, _ in TARGETS}
    for prompt, output in lengths:
        more = output - 1
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
