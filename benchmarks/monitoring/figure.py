"""The dashboard's panels of `overload`, before planning and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.setup import Outcome, Setup

_SHOWN = (
    "In time", "Time to first token", "Time per output token",
    "Requests", "Time until the next deadline", "Ends of requests",
    "Tokens", "Steps", "Processor time of a plan",
)  # fmt: skip
_COLOURS = ("#1f5f8b", "#d1495b", "#2a9d8f", "#e07a1f", "#8a5ba8", "#6c757d")
_UNITS = {"percentunit": ("%", 100.0), "s": ("s", 1.0), "reqps": ("requests/s", 1.0),
          "ops": ("steps/s", 1.0)}  # fmt: skip


def draw(name: str, setup: Setup, outcome: Outcome, folder: Path) -> Path:
    """Nine panels, into a folder."""
    from sola_sched.bench.report.plots import pyplot, save

    plt = pyplot()
    figure, grid = plt.subplots(3, 3, figsize=(12.0, 8.0), layout="constrained", sharex=True)
    for axes, title in zip(grid.flat, _SHOWN, strict=True):
        shown = [row for row in outcome.rows if row["panel"] == title and any(row["values"])]
        _panel(axes, title, shown)
        axes.axvline(outcome.rows[0]["switched_s"], color="#444444", linestyle="--", linewidth=1)
    for axes in grid[-1]:
        axes.set_xlabel("seconds; planned from the dashed line on")
    return save(plt, figure, folder / f"{name}.png")


def _panel(axes: Any, title: str, rows: Sequence[Any]) -> None:
    label, factor = _UNITS.get(rows[0]["unit"] if rows else "", ("", 1.0))
    for place, row in enumerate(rows):
        values = [None if value is None else factor * value for value in row["values"]]
        axes.plot(
            row["at_s"], [float("nan") if value is None else value for value in values],
            color=_COLOURS[place % len(_COLOURS)], label=row["series"],
            linestyle="-" if place < len(_COLOURS) else ":",
        )  # fmt: skip
    axes.set_title(f"{title}, {label}" if label else title, loc="left", fontsize=10)
    axes.set_ylim(bottom=0, top=102 if label == "%" else None)
    axes.grid(color="#e3e6e8", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if rows:
        axes.legend(fontsize=7, frameon=False, loc="best")
