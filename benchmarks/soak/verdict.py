"""What the samples of a soak say: what has grown, and which requests were not answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: Growth over the second half that says nothing, in parts of the value and absolute.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "memory_kib": (0.02, 4096.0), "threads": (0.0, 0.0), "files": (0.0, 2.0), "tasks": (0.0, 0.0),
    "objects": (0.02, 2000.0), "tables": (0.02, 128.0),
}  # fmt: skip
#: Of shorter soaks these alone are judged: memory and tables are filled in the first minutes.
LEAST_MINUTES, AT_ONCE = 5.0, ("threads", "files", "tasks")
#: Outcomes that a request may have.
PROPER = ("answered", "refused", "left")


def slope(values: Sequence[float]) -> float:
    """Growth from one value to the next: the median of what every two of them say."""
    places = np.arange(len(values))
    first, second = np.triu_indices(len(values), 1)
    growth = (np.asarray(values)[second] - np.asarray(values)[first]) / (
        places[second] - places[first]
    )
    return float(np.median(growth)) if growth.size else 0.0


def growths(idle: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float, float, float]]:
    """What has grown in the second half of the samples that were taken without requests.

    What is kept for ever is never given back, so that the least of it rises as well: a value that
    goes up and down, as that of a pool does, has grown by no more than its least has.

    Returns:
        Process, what of it, its first and last value, and how much it grew.
    """
    half = list(idle)[len(idle) // 2 :] if len(idle) > 3 else list(idle)[1:]
    found = []
    for process in half[0]["processes"]:
        for name in _names(half, process):
            values = [_value(sample, process, name) for sample in half]
            grown = slope(values) * (len(values) - 1)
            if len(values) > 3:
                grown = min(grown, _rise_of_least(values))
            found.append((process, name, values[0], values[-1], grown))
    return found


def _rise_of_least(values: Sequence[float]) -> float:
    """From the least of the first half to that of the second, as if over all of them."""
    half = len(values) // 2
    return 2.0 * (min(values[-half:]) - min(values[:half]))


def _names(half: Sequence[Mapping[str, Any]], process: str) -> list[str]:
    names: dict[str, None] = {}
    for sample in half:
        held = sample["processes"][process]
        names |= dict.fromkeys(name for name in held if name != "tables")
        names |= dict.fromkeys(f"tables/{name}" for name in held.get("tables", ()))
    return list(names)


def _value(sample: Mapping[str, Any], process: str, name: str) -> float:
    held = sample["processes"][process]
    kind, _, table = name.partition("/")
    return float(held.get("tables", {}).get(table, 0) if table else held.get(kind, 0))


def problems(outcome: Mapping[str, Any], idle: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the soak has failed, a line each; empty if it has not."""
    found = []
    for name, count in outcome["outcomes"].items():
        if name not in PROPER:
            example = outcome["examples"].get(name, "")
            found.append(f"{count} requests: {name} ({example[:300]})")
    num_ended = sum(outcome["outcomes"].values())
    if num_ended != outcome["num_sent"]:
        found.append(f"{outcome['num_sent'] - num_ended} of {outcome['num_sent']} have no outcome")
    for process, name, first, last, grown in growths(idle):
        if outcome["minutes"] < LEAST_MINUTES and name not in AT_ONCE:
            continue
        share, least = BOUNDS[name.partition("/")[0]]
        if grown > share * first + least:
            found.append(f"{process}: {name} grew from {first:,.0f} to {last:,.0f}")
    found += [f"{name} stepped aside" for name, count in outcome["aside"].items() if count]
    return found
