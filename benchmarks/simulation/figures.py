"""Figures of the experiments: attainment over rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.points import BOUND
from harness.resumable import Row
from harness.setup import Outcome, Setup
from simulation.setups import NAMES
from simulation.tables import best_stock_rows, rule_of
from sola_sched.bench.report.plots import pyplot, save

_STYLE: dict[str, dict[str, Any]] = {
    "stock": {"color": "#1f5f8b", "marker": "s", "label": "vLLM, best chunk size"},
    "reject": {"color": "#6c757d", "marker": "v", "label": "reject"},
    "spf": {"color": "#2a9d8f", "marker": "^", "label": "shortest prompt first"},
    "sjf": {"color": "#b0a160", "marker": "P", "label": "shortest job first"},
    "prefill-first": {"color": "#5aa9c9", "marker": "D", "label": "prefill first"},
    "paper": {"color": "#e07a1f", "marker": "D", "label": "SOLA as published"},
    "sola": {"color": "#d1495b", "marker": "o", "label": "sola_sched", "linewidth": 2.4},
}
#: Columns that part the rows of an experiment into panels.
_PANEL = ("dataset", "profile", "ttft_s", "tpot_s", "arrivals", "dataset_after")
_MAX_COLUMNS = 3
_DPI = 100


def draw_lines(name: str, setup: Setup, outcome: Outcome, folder: Path) -> Path:
    """`plot_lines` of an experiment's rows, into a folder."""
    return plot_lines(outcome.rows, folder / f"simulation-{name}.png")


def plot_lines(rows: Sequence[Row], path: Path) -> Path:
    """Attainment over rate, the bound dashed; a panel per data set, profile and target."""
    plt = pyplot()
    panels: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        panels.setdefault(tuple(row[name] for name in _PANEL), []).append(row)
    profiles = dict.fromkeys(row["profile"] for row in rows)
    num_columns = min(_MAX_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(0.8 + 3.0 * num_columns, 0.5 + 2.8 * num_rows),
        sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, group in zip(axes.flat, panels.values(), strict=False):
        for name, style in _STYLE.items():
            chosen = [row for row in group if rule_of(row["scheduler"]) == name]
            if name == "stock":
                chosen = best_stock_rows(chosen)
            if chosen:
                _line(axis, chosen, "attainment", **style)
        _line(axis, group, BOUND, color="#222222", linestyle="--", label="bound", zorder=1)
        axis.axhline(90, color="#9aa0a6", linewidth=0.8, zorder=0)
        axis.set_title(_title(group[0], len(profiles) > 1), fontsize=9)
        axis.set_xlabel("requests/s")
        axis.set_ylim(-3, 103)
        axis.grid(True, color="#e3e6ea", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    for line in axes:
        line[0].set_ylabel("requests within both SLOs (%)", fontsize=9)
    if len(profiles) == 1:
        figure.suptitle(rows[0]["profile"], fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=4)
    return save(plt, figure, path, _DPI)


def _title(row: Row, has_profile: bool) -> str:
    arrivals = "" if row["arrivals"] == "poisson" else f", {row['arrivals']}"
    lines = [row["profile"]] if has_profile else []
    lines += [
        f"{NAMES[row['dataset']]}{arrivals}",
        f"TTFT {row['ttft_s']:g} s, TPOT {1e3 * row['tpot_s']:g} ms",
    ]
    return "\n".join(lines)


def _line(axis: Any, rows: Sequence[Row], column: str, **style: Any) -> None:
    rates = sorted({row["rate_per_s"] for row in rows})
    means = [np.mean([r[column] for r in rows if r["rate_per_s"] == rate]) for rate in rates]
    axis.plot(rates, [100 * value for value in means], **({"markersize": 4} | style))
