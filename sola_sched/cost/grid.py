"""What a profile measures, and how good the model fitted to it is; no engine needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sola_sched.cost.fit import DECODE, MIXED, PREFILL, StepShape, kind_of
from sola_sched.cost.model import CostModel
from sola_sched.errors import ProfileError

#: Shape and time in seconds.
Step = tuple[StepShape, float]
#: The steps of one scenario, by pass.
Measured = list[list[Step]]

#: Steps that a scenario's decodes run alone.
DECODE_STEPS = 8
_KIND_NAMES = {PREFILL: "prefill only", DECODE: "decode only", MIXED: "mixed"}
_HOLD_OUT_EVERY = 3
_SHORTEST = 8
# Tokens that a decode may add to its context within a scenario.
_GROWTH = 4 * DECODE_STEPS
_MOST_CONTEXT_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests that bring about steps of one sort.

    Attributes:
        num_decodes: Requests that decode in the background.
        context: Their prompt length, tokens.
        prefills: Prompt lengths of requests that arrive one after the other, together if there
            are no decodes; each is prefilled and ends with its first token.
        chunk: Most tokens of a step.
    """

    num_decodes: int
    context: int
    prefills: tuple[int, ...]
    chunk: int


def make_grid(
    *, max_len: int, max_chunk: int, max_batch: int, max_kv_tokens: int
) -> list[Scenario]:
    """The scenarios to measure, small and large ones in a fixed random order.

    Args:
        max_len: Longest prompt plus output, tokens.
        max_chunk: Most tokens of a step.
        max_batch: Most requests at once.
        max_kv_tokens: Tokens that the KV cache holds.

    Raises:
        ProfileError: There is no room for the smallest scenario.
    """
    longest = min(max_len, max_kv_tokens) - _GROWTH
    if longest < _SHORTEST or max_batch < 1 or max_chunk < 1:
        raise ProfileError(
            f"A profile needs a model length and a KV cache of {_SHORTEST + _GROWTH} tokens and a "
            f"batch of 1 (got {max_len} and {max_kv_tokens} tokens, batch {max_batch})."
        )
    chunk = min(max_chunk, longest)
    longest = min(longest, _MOST_CONTEXT_CHUNKS * chunk)
    half = max(1, chunk // 2)
    scenarios = [Scenario(0, 0, (length,), chunk) for length in _spread(_SHORTEST, chunk, 8)]
    # Several prompts in a step: their sum of squares is smaller than one prompt's.
    scenarios += [
        Scenario(0, 0, (max(1, chunk // parts),) * parts, chunk)
        for parts in (2, 4, 8)
        if parts <= max_batch
    ]
    # Longer than a step: chunks that find tokens computed already.
    scenarios += [
        Scenario(0, 0, (longest,), part) for part in sorted({chunk, half, max(1, chunk // 4)})
    ]
    for batch in _spread(1, max_batch, 8):
        most = min(longest, _most_context(max_kv_tokens, chunk) // batch - _GROWTH)
        if most >= _SHORTEST:
            scenarios += [
                Scenario(batch, context, (), chunk) for context in _spread(_SHORTEST, most, 3)
            ]
    for batch in _spread(1, min(max_batch - 1, half), 4) if max_batch > 1 else []:
        most = _most_context(max_kv_tokens - longest, chunk) // batch - _GROWTH
        most = min(longest, most) // 2
        if most >= _SHORTEST:
            for context, part in itertools.product(
                _spread(_SHORTEST, most, 2), sorted({chunk, half})
            ):
                lengths = _spread(_SHORTEST, max(_SHORTEST, part - batch), 5)
                scenarios.append(Scenario(batch, context, (*lengths, longest), part))
    order = np.random.default_rng(0).permutation(len(scenarios))
    return [scenarios[index] for index in order]


def _most_context(max_kv_tokens: int, chunk: int) -> int:
    # Filling all of a large GPU's cache would take longer than the rest of the grid.
    return min(int(0.9 * max_kv_tokens), _MOST_CONTEXT_CHUNKS * chunk)


def _spread(low: int, high: int, count: int) -> list[int]:
    """At most ``count`` integers from ``low`` to ``high``, evenly on a log scale."""
    if high <= low:
        return [max(1, high)]
    return sorted({round(value) for value in np.geomspace(low, high, count).tolist()})


def typical_steps(scenarios: Sequence[Measured]) -> list[list[Step]]:
    """One list of steps per scenario, each with the median of its times over the passes.

    A neighbour on the machine that disturbs one pass of three leaves no trace. Passes whose
    shapes differ from the first one's (asynchronous scheduling) are left out.
    """
    typical = []
    for passes in scenarios:
        shapes = [shape for shape, _ in passes[0]]
        times = [
            [time_s for _, time_s in steps]
            for steps in passes
            if [shape for shape, _ in steps] == shapes
        ]
        typical.append(list(zip(shapes, np.median(times, axis=0).tolist(), strict=True)))
    return typical


def held_out_errors(scenarios: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Errors on every third scenario of a model fitted to the others, by kind of step.

    Returns:
        Per kind ("all" included): ``num_steps``; ``mean_ms``; the mean of
        |predicted - measured| / measured over single steps as ``mean_abs_error``, and over the
        medians of repeated steps, free of most of the machine's noise, as ``median_step_error``.
    """
    typical = typical_steps(scenarios)
    train = [
        step for index, steps in enumerate(typical) if index % _HOLD_OUT_EVERY for step in steps
    ]
    held_out = range(0, len(scenarios), _HOLD_OUT_EVERY)
    medians = [step for index in held_out for step in typical[index]]
    singles = [step for index in held_out for steps in scenarios[index] for step in steps]
    model = CostModel.fit(train or medians)
    errors = {}
    for kind, name in [*_KIND_NAMES.items(), (None, "all")]:
        chosen = [step for step in singles if kind is None or kind_of(step[0]) == kind]
        if chosen:
            errors[name] = {
                "num_steps": len(chosen),
                "mean_ms": round(1e3 * float(np.mean([time_s for _, time_s in chosen])), 4),
                "mean_abs_error": _mean_error(model, chosen),
                "median_step_error": _mean_error(
                    model, [step for step in medians if kind is None or kind_of(step[0]) == kind]
                ),
            }
    return errors


def _mean_error(model: CostModel, steps: Sequence[Step]) -> float:
    relative = [abs(model.step_s(shape) - time_s) / time_s for shape, time_s in steps]
    return round(float(np.mean(relative)), 4)
