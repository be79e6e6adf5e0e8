"""The two figures of a benchmark: the TTFT-TPOT plane and attainment over request rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sola_sched.bench.report.results import Result
from sola_sched.bench.report.table import ATTAINMENT_LEVEL, BOUND_LABEL, bounds, in_ms
from sola_sched.config.slo import SloTarget

_OURS = ("#d1495b", "#7b2d8b", "#e07a1f")
_OTHERS = ("#1f5f8b", "#5aa9c9", "#6c757d", "#2a9d8f", "#b0a160")
_MARKERS = ("s", "^", "D", "v", "P")
_GRID = {"color": "#e3e6ea", "linewidth": 0.8}
_DPI = 150
_SHORT_RANGE_DECADES = 2.3


class NoPlotError(OSError):
    """Nothing can be drawn here."""


def pyplot() -> Any:
    """matplotlib without a display.

    Raises:
        NoPlotError: It is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise NoPlotError("plots need matplotlib: pip install 'sola-sched[bench]'") from None

    matplotlib.use("Agg", force=True)
    import matplotlib.pyplot as plt

    return plt


def drawn(draw: Callable[[], Path]) -> str:
    """Where the picture is that `draw` makes, or why there is none."""
    try:
        return str(draw())
    except NoPlotError as error:
        return f"none, {error}"


def save(plt: Any, figure: Any, path: Path, dpi: int = _DPI) -> Path:
    """Write the figure, making its folder, and forget it; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    return path


def plot_plane(results: Sequence[Result], slo: SloTarget, path: Path) -> Path:
    """Draw each request of each scheduler in the TTFT-TPOT plane, one panel per rate.

    A request inside the shaded box met both targets. Needs the per-request arrays.
    """
    plt = pyplot()
    rates = sorted({_as_float(r["request_rate"]) for r in results})
    colors = _colors(results)
    figure, axes = plt.subplots(
        1, len(rates), figsize=(1.2 + 4.1 * len(rates), 4.4), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, rate in zip(axes[0], rates, strict=True):
        for result in results:
            if _as_float(result["request_rate"]) != rate:
                continue
            label = result["scheduler"]["label"]
            points = _points(result)
            is_ours = result["scheduler"]["kind"] == "sola"
            axis.scatter(
                [x for x, _ in points], [y for _, y in points], s=15, linewidths=0,
                alpha=0.75 if is_ours else 0.5, color=colors[label], zorder=3 if is_ours else 2,
                marker="o" if is_ours else _MARKERS[list(colors).index(label) % len(_MARKERS)],
                label=f"{label}  {result['attainment']:.0%} attained",
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(_rate_title(rate), fontsize=10)
        axis.set_xlabel("TTFT (ms)")
        axis.grid(True, which="major", **_GRID)
        axis.legend(fontsize=7.5, loc="upper left", framealpha=0.9, handletextpad=0.3)
    axes[0][0].set_ylabel("TPOT (ms)")
    _room_for_legend(axes[0][0])
    for axis in axes[0]:
        _label_ticks(axis)
        _draw_box(axis, slo)
    figure.suptitle(
        f"Latency of each request, SLO: TTFT ≤ {_ms(slo.ttft_s)}, TPOT ≤ {_ms(slo.tpot_s)}",
        fontsize=11,
    )
    return save(plt, figure, path)


def plot_attainment(results: Sequence[Result], path: Path) -> Path:
    """Draw attainment and goodput over the request rate, one line per scheduler."""
    plt = pyplot()
    colors = _colors(results)
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.2), layout="constrained")
    for label, color in colors.items():
        runs = sorted(
            (r for r in results if r["scheduler"]["label"] == label),
            key=lambda r: _as_float(r["request_rate"]),
        )
        is_ours = runs[0]["scheduler"]["kind"] == "sola"
        # A run that sends everything at once has no rate; its throughput stands in.
        rates = [
            r["request_throughput"] if r["request_rate"] == "inf" else r["request_rate"]
            for r in runs
        ]
        style: dict[str, Any] = {
            "color": color, "marker": "o" if is_ours else "s", "markersize": 5,
            "linewidth": 2.2 if is_ours else 1.4, "zorder": 3 if is_ours else 2, "label": label,
        }  # fmt: skip
        if not is_ours:
            style["marker"] = _MARKERS[list(colors).index(label) % len(_MARKERS)]
        axes[0].plot(rates, [100 * r["attainment"] for r in runs], **style)
        axes[1].plot(rates, [r["request_goodput"] for r in runs], **style)
    limits = {rate: ratio for rate, ratio in bounds(results).items() if math.isfinite(rate)}
    if limits:
        axes[0].plot(
            list(limits), [100 * ratio for ratio in limits.values()], color="#222222",
            linestyle="--", linewidth=1.4, zorder=1, label=f"{BOUND_LABEL} (no scheduler above)",
        )  # fmt: skip
    axes[0].axhline(100 * ATTAINMENT_LEVEL, color="#9aa0a6", linewidth=1, linestyle="--", zorder=1)
    axes[0].set_ylim(-3, 103)
    axes[0].set_ylabel("requests within both SLOs (%)")
    axes[1].set_ylabel("goodput (requests/s within both SLOs)")
    axes[1].set_ylim(bottom=0)
    for axis in axes:
        axis.set_xlabel("request rate (requests/s)")
        axis.grid(True, **_GRID)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8.5, loc="lower left", framealpha=0.9)
    first = results[0]
    figure.suptitle(
        f"{first['model_id']}, {first['dataset_name']}, {first['num_prompts']} requests a run",
        fontsize=11,
    )
    return save(plt, figure, path)


def _points(result: Result) -> list[tuple[float, float]]:
    """(TTFT, TPOT) in ms of requests that have both and are complete."""
    points = []
    for ttft_s, tpot_s, error in zip(
        result["ttfts"], result["tpots"], result["errors"], strict=True
    ):
        if not error and tpot_s > 0:  # NaN, a one-token output, has no place in the plane
            points.append((ttft_s * 1e3, tpot_s * 1e3))
    return points


def _draw_box(axis: Any, slo: SloTarget) -> None:
    low_x, high_x = axis.get_xlim()
    low_y, high_y = axis.get_ylim()
    right = min(slo.ttft_s * 1e3, high_x) if math.isfinite(slo.ttft_s) else high_x
    top = min(slo.tpot_s * 1e3, high_y) if math.isfinite(slo.tpot_s) else high_y
    axis.fill_between([low_x, right], low_y, top, color="#2a9d4a", alpha=0.08, zorder=0, lw=0)
    axis.plot([low_x, right, right], [top, top, low_y], color="#2a9d4a", lw=1.3, zorder=1)
    axis.set_xlim(low_x, high_x)
    axis.set_ylim(low_y, high_y)


def _label_ticks(axis: Any) -> None:
    """Tick labels in plain numbers: 1, 2, 5, 10 over a short range, 1, 10, 100 over a long one."""
    from matplotlib import ticker

    for side in (axis.xaxis, axis.yaxis):
        low, high = side.get_view_interval()
        is_short = math.log10(high / low) < _SHORT_RANGE_DECADES
        side.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5) if is_short else (1,)))
        side.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        side.set_minor_locator(
            ticker.NullLocator() if is_short else ticker.LogLocator(base=10, subs=range(2, 10))
        )
        side.set_minor_formatter(ticker.NullFormatter())


def _room_for_legend(axis: Any) -> None:
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.28)


def _colors(results: Sequence[Result]) -> dict[str, str]:
    colors: dict[str, str] = {}
    counts = {"ours": 0, "others": 0}
    for result in results:
        scheduler = result["scheduler"]
        if scheduler["label"] in colors:
            continue
        group, palette = ("ours", _OURS) if scheduler["kind"] == "sola" else ("others", _OTHERS)
        colors[scheduler["label"]] = palette[counts[group] % len(palette)]
        counts[group] += 1
    return colors


def _rate_title(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:.3g} requests/s"


def _ms(target_s: float) -> str:
    return in_ms(target_s) if math.isfinite(target_s) else "no limit"


def _as_float(value: float | str) -> float:
    return math.inf if value == "inf" else float(value)
