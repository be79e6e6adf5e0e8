"""Normalized latency over request rate, one panel per model and data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alise.experiments import lines_of
from sola_sched.bench.report.plots import pyplot, save

_STYLE: dict[str, dict[str, Any]] = {
    "FCFS": {"color": "#6c757d", "marker": "s"},
    "vLLM, best chunk": {"color": "#1f5f8b", "marker": "D"},
    "SJF": {"color": "#b0a160", "marker": "P"},
    "attain, histogram": {"color": "#2a9d8f", "marker": "v"},
    "alise, histogram": {"color": "#e9b44c", "marker": "^"},
    "alise, lexical": {"color": "#e07a1f", "marker": "<"},
    "alise, retrieval": {"color": "#d1495b", "marker": "o", "linewidth": 2.4},
    "alise, oracle": {"color": "#222222", "marker": "x", "linestyle": "--"},
}
_DPI = 100


def plot(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw the rows of `rates`."""
    plt = pyplot()
    panels = list(dict.fromkeys((row["profile"], row["dataset"]) for row in rows))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(0.8 + 3.1 * len(panels), 3.6), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        group = [row for row in rows if (row["profile"], row["dataset"]) == panel]
        lines = lines_of(group, "normalized_latency_s")
        for name, style in _STYLE.items():
            line = lines.get(name, [])
            axis.plot(
                [row["rate_per_s"] for row in line],
                [row["normalized_latency_s"] for row in line],
                label=name, markersize=5, **style,
            )  # fmt: skip
        axis.set_yscale("log")
        axis.set_title(f"{panel[0]}, {panel[1]}", fontsize=9)
        axis.set_xlabel("requests/s")
        axis.grid(True, color="#e3e6ea", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("normalized latency, s/token", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return save(plt, figure, path, _DPI)
