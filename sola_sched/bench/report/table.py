"""Plain-text table of the runs and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from sola_sched.bench.report.results import BOUND_KEY, Result
from sola_sched.core import metrics

#: Attainment at which the sustained rate is read off.
ATTAINMENT_LEVEL = 0.9
#: Name of the upper bound in tables and figures.
BOUND_LABEL = "bound"
_BEST_MARK = "*"

_COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("req/s", lambda r: _rate(r["request_rate"])),
    ("scheduler", lambda r: r["scheduler"]["label"] + (_BEST_MARK if r.get("best") else "")),
    ("done", lambda r: f"{r['completed']}/{r['num_prompts']}"),
    ("attained", lambda r: _number(r["attainment"] * 100, 1, " %")),
    ("goodput", lambda r: _number(r["request_goodput"], 2)),
    ("TTFT mean", lambda r: _number(r.get("mean_ttft_ms"), 0)),
    ("p50", lambda r: _number(r.get("p50_ttft_ms"), 0)),
    ("p99", lambda r: _number(r.get("p99_ttft_ms"), 0)),
    ("max", lambda r: _number(r.get("max_ttft_ms"), 0)),
    ("TPOT mean", lambda r: _number(r.get("mean_tpot_ms"), 1)),
    ("p50", lambda r: _number(r.get("p50_tpot_ms"), 1)),
    ("p99", lambda r: _number(r.get("p99_tpot_ms"), 1)),
    ("latency/token", lambda r: _number(r.get("mean_normalized_latency_ms"), 1)),
    ("tokens/s", lambda r: _number(r["output_throughput"], 0)),
    ("sched/step", lambda r: _number(r["scheduler"].get("mean_step_cpu_ms"), 3)),
    ("preempt", lambda r: str(r["scheduler"].get("num_preemptions", "-"))),
)


def cells(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """The head of the table, and a row per run, by rate; the best stock vLLM of each is marked."""
    best = {id(r) for r in best_stock(results).values()}
    rows = []
    for _, group in groupby(
        sorted(results, key=lambda r: _as_float(r["request_rate"])), key=lambda r: r["request_rate"]
    ):
        runs = list(group)
        rows += [[cell(r | {"best": id(r) in best}) for _, cell in _COLUMNS] for r in runs]
        rows += _bound_row(runs)
    return [name for name, _ in _COLUMNS], rows


def table(results: Sequence[Result]) -> str:
    """One aligned row per run, grouped by rate; the best stock vLLM of each rate is marked."""
    header, rows = cells(results)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [_aligned(header, widths), "  ".join("-" * width for width in widths)]
    previous = None
    for row in rows:
        if previous is not None and row[0] != previous:
            lines.append("")
        previous = row[0]
        lines.append(_aligned(row, widths))
    return "\n".join([*lines, *legend(results)])


def legend(results: Sequence[Result]) -> list[str]:
    """What the columns and marks of the table mean, in lines."""
    lines = [
        "TTFT, TPOT, latency/token (mean over requests of latency / output tokens) and",
        "sched/step (CPU time of the scheduler per step) in ms; goodput = requests within",
        "all their SLOs per second.",
    ]
    if best_stock(results):
        lines[-1] += f" {_BEST_MARK} best stock setting at this rate."
    if bounds(results):
        lines.append(f"{BOUND_LABEL}: no scheduler attains more of these requests.")
    return lines


def class_table(results: Sequence[Result]) -> str:
    """One aligned row per run: what each SLO class has attained, the worst, and all by weight.

    Empty where no run has two classes.
    """
    runs = [r for r in results if len(r["attainment_by_class"]) > 1]
    names = sorted({name for r in runs for name in r["attainment_by_class"]})
    if not names:
        return ""
    header = ["req/s", "scheduler", *names, "all", "weighted", "weighted goodput", "worst"]
    rows = []
    for run in sorted(runs, key=lambda r: _as_float(r["request_rate"])):
        classes = run["attainment_by_class"]
        shares = [classes.get(name, {}).get("attainment") for name in names]
        shares += [run["attainment"], run["weighted_attainment"]]
        rows.append(
            [
                _rate(run["request_rate"]),
                run["scheduler"]["label"],
                *(_number(None if share is None else 100 * share, 1, " %") for share in shares),
                _number(run["weighted_goodput"], 2),
                metrics.worst_class(classes),
            ]
        )
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["Attained by SLO class, by requests and by what they are worth:"]
    lines += [_aligned(header, widths), "  ".join("-" * width for width in widths)]
    return "\n".join([*lines, *(_aligned(row, widths) for row in rows)])


def bounds(results: Sequence[Result]) -> dict[float, float]:
    """At each rate, ascending, the attainment that no scheduler exceeds, where it is known."""
    known = {_as_float(r["request_rate"]): r[BOUND_KEY] for r in results if BOUND_KEY in r}
    return dict(sorted(known.items()))


def _bound_row(runs: Sequence[Result]) -> list[list[str]]:
    """The bound of one rate as a row without latencies; none if it is unknown."""
    ratio = next(iter(bounds(runs).values()), None)
    if ratio is None:
        return []
    cells = {
        "req/s": _rate(runs[0]["request_rate"]),
        "scheduler": BOUND_LABEL,
        "attained": _number(100 * ratio, 1, " %"),
    }
    return [[cells.get(name, "-") for name, _ in _COLUMNS]]


def best_stock(results: Sequence[Result]) -> dict[float, Result]:
    """At each rate the stock run with the highest attainment, ties broken by mean TTFT."""
    best: dict[float, Result] = {}
    for result in results:
        if result["scheduler"]["kind"] != "stock":
            continue
        rate = _as_float(result["request_rate"])
        if rate not in best or _rank(result) > _rank(best[rate]):
            best[rate] = result
    return best


def conclusions(results: Sequence[Result]) -> list[str]:
    """Ours over the best stock run per rate, and the rate each scheduler sustains."""
    lines = []
    stock = best_stock(results)
    for result in sorted(results, key=lambda r: _as_float(r["request_rate"])):
        rival = stock.get(_as_float(result["request_rate"]))
        if result["scheduler"]["kind"] != "sola" or rival is None:
            continue
        if not result["attainment"] and not rival["attainment"]:
            lines.append(
                f"{_rate(result['request_rate'])} req/s: no request attains, neither with "
                f"{result['scheduler']['label']} nor with {rival['scheduler']['label']}; the "
                "targets are too short for this engine, or the rate is far too high."
            )
            continue
        ratio = (
            result["request_goodput"] / rival["request_goodput"]
            if (rival["request_goodput"])
            else math.inf
        )
        lines.append(
            f"{_rate(result['request_rate'])} req/s: {result['scheduler']['label']} / "
            f"{rival['scheduler']['label']} = "
            f"{_ratio(ratio)} goodput ({result['attainment']:.1%} against "
            f"{rival['attainment']:.1%} attained)."
        )
    sustained = sustained_rates(results)
    if sustained:
        parts = [f"{label} {_bounded(*value)}" for label, value in sustained.items()]
        lines.append(f"Rate at {ATTAINMENT_LEVEL:.0%} attainment, req/s: {', '.join(parts)}.")
    return lines


def sustained_rates(results: Sequence[Result]) -> dict[str, tuple[float, float, float]]:
    """Per scheduler: the rate at ``ATTAINMENT_LEVEL``, and the lowest and highest rate run."""
    points: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        rate = _as_float(result["request_rate"])
        if math.isfinite(rate) and math.isfinite(result["attainment"]):
            label = result["scheduler"]["label"]
            points.setdefault(label, []).append((rate, result["attainment"]))
    sustained = {}
    for label, pairs in points.items():
        if len(pairs) > 1:
            rates, ratios = zip(*pairs, strict=True)
            crossing = metrics.crossing_rate(rates, ratios, ATTAINMENT_LEVEL)
            sustained[label] = (crossing, min(rates), max(rates))
    return sustained


def in_ms(seconds: float) -> str:
    """A time to three digits; from a second on all digits of its milliseconds."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _bounded(crossing: float, lowest: float, highest: float) -> str:
    if math.isinf(crossing):
        return f"> {highest:.3g}"
    return f"< {lowest:.3g}" if crossing == 0 else f"{crossing:.3g}"


def _rank(result: Result) -> tuple[float, float]:
    return result["attainment"], -(result.get("mean_ttft_ms") or 0.0)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        cell.ljust(width) if index == 1 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def _number(value: Any, digits: int, unit: str = "") -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.{digits}f}{unit}"


def _ratio(value: float) -> str:
    return "inf x" if math.isinf(value) else f"{value:.2f} x"


def _rate(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _as_float(value: float | str) -> float:
    return math.inf if value == "inf" else float(value)
