"""How far the fast engine model is off, for the heads of tables that rest on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import numpy as np

from cluster.cases import Case
from harness import resumable
from harness.resumable import Row
from harness.setup import Setup

_COLUMNS = [field.name for field in fields(Case) if field.name != "is_real"]
_ENGINES = {"stock": "vLLM", "sola": "`sola_sched`"}


def error_of(setup: Setup, value: str = "attainment") -> str:
    """A sentence: the error of a column against the same runs with real schedulers.

    Args:
        setup: With the file of rows; `cluster-fast` and `cluster-checked` make the real ones.
        value: ``attainment``, told in points, or ``tokens_per_s``, told in %.
    """
    parts = []
    found = pairs(resumable.load(setup.path))
    for kind, name in _ENGINES.items():
        own = [pair for pair in found if pair[0]["scheduler"].startswith(kind)]
        if not own:
            continue
        real, fast = (np.array([row[value] for row in rows]) for rows in zip(*own, strict=True))
        off = 100.0 * ((fast - real) if value == "attainment" else (fast / real - 1.0))
        unit = "points" if value == "attainment" else "%"
        parts.append(
            f"{name} {off.mean():+.1f} {unit} on average, {np.abs(off).max():.1f} at most "
            f"({len(off)} runs)"
        )
    if not parts:
        return "By the fast engine model; its error is not measured here, `cluster-fast` does it."
    return f"By the fast engine model, against real schedulers off by: {'; '.join(parts)}."


def pairs(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Rows of the same case with real schedulers and with the fast model, the last of each."""
    last: dict[bool, dict[tuple[object, ...], Row]] = {True: {}, False: {}}
    for row in rows:
        # Rows of other experiments are no cases; quick ones have too few requests to say much.
        if all(name in row for name in _COLUMNS) and row["num_requests"] >= 100:
            last[row["is_real"]][tuple(row[name] for name in _COLUMNS)] = row
    return [(real, last[False][key]) for key, real in last[True].items() if key in last[False]]
