"""The cheapest configuration that attains, and why none does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sola_sched.errors import ConfigError
from sola_sched.plan.configurations import Configuration, profile
from sola_sched.plan.evaluate import Outcome, excess
from sola_sched.plan.load import Load
from sola_sched.simulator.cluster.step_model import BatchTime

#: A configuration to what it does.
Evaluate = Callable[[Configuration], Outcome]


class ImpossibleError(ConfigError):
    """No configuration meets a target; the message says which and by how much it is missed."""


def require_possible(model: str, choices: Sequence[Configuration], load: Load, goal: float) -> None:
    """Refuse targets that a request misses even when it is alone on the fastest instance.

    Raises:
        ImpossibleError: Names the target, and what it would have to be.
    """
    requests = load.requests()
    for name, is_ttft in (("ttft", True), ("tpot", False)):
        needs = {}
        for choice in choices:
            key = (choice.gpu, choice.tensor_parallel)
            if key not in needs:
                steps = BatchTime(profile(model, *key).step_time)
                values, targets = [], []
                for request in requests:
                    prompt = request.request.num_prompt_tokens
                    alone_s = steps.prefill_s(prompt) if is_ttft else steps.decode_s(1, prompt)
                    is_free = not is_ttft and request.request.output_len == 1
                    values.append(0.0 if is_free else float(alone_s))
                    targets.append(request.slo.ttft_s if is_ttft else request.slo.tpot_s)
                needs[key] = excess(np.array(values), targets, goal)
        (gpu, degree), least = min(needs.items(), key=lambda item: item[1])
        if least > 1.0:
            raise ImpossibleError(
                f"the {name} target must be at least {least:.3g} times what it is: so long take "
                f"{goal:.0%} of the requests even alone on the fastest choice, {degree} {gpu}; "
                f"raise --slo {name} or name faster GPUs."
            )


def search(
    choices: Sequence[Configuration], evaluate: Evaluate, goal: float, max_gpus: int
) -> list[Outcome]:
    """Outcomes of the configurations that matter, cheapest first, the better first at one price.

    For each GPU type and degree the first scheduler and router find the least number of instances;
    every other choice is tried for no more than the cheapest that has attained so far costs.
    """
    seen: dict[Configuration, Outcome] = {}

    def attains(configuration: Configuration) -> bool:
        if configuration not in seen:
            seen[configuration] = evaluate(configuration)
        return seen[configuration].attainment >= goal

    best_cost = math.inf
    places = itertools.groupby(choices, key=lambda c: (c.gpu, c.tensor_parallel))
    firsts = [next(iter(group)) for _, group in places]
    for choice in [*firsts, *(choice for choice in choices if choice not in firsts)]:
        most = max_gpus // choice.tensor_parallel
        unit = choice.cost_per_hour
        is_first = choice in firsts
        if not is_first and math.isfinite(best_cost):
            most = min(most, int(best_cost / unit + 1e-9))
        is_known = any(replace(c, router=choice.router) == choice for c in seen)
        if most < 1 or (most == 1 and is_known):
            continue  # before one instance all routers are the same
        found = _least(choice, most, attains, jumps=not is_first and math.isfinite(best_cost))
        if found is not None:
            best_cost = min(best_cost, found * unit)
    return sorted(seen.values(), key=lambda o: (o.configuration.cost_per_hour, -o.attainment))


def _least(
    choice: Configuration, most: int, attains: Callable[[Configuration], bool], jumps: bool
) -> int | None:
    """The least number of instances up to `most` that attains.

    Args:
        choice: With any number.
        most: Largest number allowed.
        attains: The test; taken to be monotone.
        jumps: Begin with the largest number, which is likely to miss, instead of with one.
    """
    low, high = 0, most if jumps else 1
    while not attains(choice.times(high)):
        low = high
        if high == most:
            return None
        high = min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if attains(choice.times(middle)):
            high = middle
        else:
            low = middle
    return high


def rate_margin(evaluate_at: Callable[[float], Outcome], goal: float) -> float:
    """How many times the rate still attains, at most 2, to a sixteenth."""
    low, high = 1.0, 2.0
    if evaluate_at(high).attainment >= goal:
        return high
    while high - low > 1 / 16:
        middle = (low + high) / 2
        if evaluate_at(middle).attainment >= goal:
            low = middle
        else:
            high = middle
    return low


def explain(outcomes: Sequence[Outcome], goal: float, max_gpus: int) -> str:
    """Why none attains: the best of them, its worse target and by how much."""
    best = max(outcomes, key=lambda o: o.attainment)
    is_ttft = best.ttft_attainment <= best.tpot_attainment
    name = "ttft" if is_ttft else "tpot"
    share = best.ttft_attainment if is_ttft else best.tpot_attainment
    factor = best.ttft_excess if is_ttft else best.tpot_excess
    return (
        f"no configuration of up to {max_gpus} GPUs attains {goal:.1%}: the best, "
        f"{best.configuration.name}, attains {best.attainment:.1%}, "
        f"{100 * (goal - best.attainment):.1f} points less; its {name} target is met by "
        f"{share:.1%}, and would have to be {factor:.3g} times what it is; raise --max-gpus or "
        "the targets, or lower --request-rate or --attainment."
    )
