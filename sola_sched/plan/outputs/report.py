"""The table, the file and the plot of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from sola_sched.bench.report.plots import pyplot, save
from sola_sched.plan.search.evaluate import Outcome

#: Of GPU types, told apart by their marks too.
_COLOURS = ("#1f5f8b", "#d1495b", "#2a9d8f", "#e07a1f", "#6c757d")
_MARKS = ("o", "s", "^")
_MOST_ROWS = 16
_NEAR = 0.2


LEGEND = (
    "3 x 2 h100: three engines of two GPUs each. chunk: --max-num-batched-tokens; seqs: "
    "--max-num-seqs; at the end the gateway's --router; *: the answer."
)
"""How to read a configuration's name."""
HEAD = ("cost/h", "attained", "TTFT p99", "TPOT p99", "configuration")


def shown(outcomes: Sequence[Outcome], goal: float, best: Outcome | None) -> list[Outcome]:
    """The best variant for each number of GPUs, of vLLM's scheduler and of `sola_sched`.

    Args:
        outcomes: By cost, then by attainment, the most first.
        goal: Attainment to reach; what misses it by far is left out if anything is near.
        best: The answer; it is among them.
    """
    chosen = None if best is None else best.configuration
    of_kind: dict[tuple[object, ...], Outcome] = {}
    for o in outcomes:
        c = o.configuration
        scheduler = c.scheduler.partition(":")[0]
        kind = (c.gpu, c.tensor_parallel, c.num_instances, c.num_prefill, scheduler)
        if c == chosen or kind not in of_kind:
            of_kind[kind] = o
    kinds = list(of_kind.values())
    near = [o for o in kinds if o.configuration == chosen or o.attainment >= goal - _NEAR] or kinds
    place = next((i for i, o in enumerate(near) if o.configuration == chosen), 0)
    first = max(0, place - _MOST_ROWS // 2)
    return near[first : first + _MOST_ROWS]


def cells(o: Outcome) -> list[str]:
    """Its line of the table, a cell for each of `HEAD`."""
    return [
        f"{o.configuration.cost_per_hour:.2f}",
        f"{o.attainment:.1%}",
        _ms(o.ttft_ms[1]),
        _ms(o.tpot_ms[1]),
        o.configuration.name,
    ]


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f} ms"


def table(outcomes: Sequence[Outcome], goal: float, best: Outcome | None) -> str:
    """What is `shown`, a line for each; the answer is marked."""
    lines = ["  ".join(HEAD)]
    for o in shown(outcomes, goal, best):
        cost, attained, ttft, tpot, name = cells(o)
        mark = "*" if best is not None and o.configuration == best.configuration else " "
        lines.append(f"{cost:>6}  {attained:>7}{mark}  {ttft:>9}  {tpot:>8}  {name}")
    return "\n".join(lines)


def plot(outcomes: Sequence[Outcome], goal: float, best: Outcome | None, path: Path) -> Path:
    """Attainment over cost, a colour for each GPU type."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    gpus = sorted({o.configuration.gpu for o in outcomes})
    for gpu, colour, mark in zip(gpus, cycle(_COLOURS), cycle(_MARKS), strict=False):
        own = [o for o in outcomes if o.configuration.gpu == gpu]
        axes.scatter(
            [o.configuration.cost_per_hour for o in own],
            [100 * o.attainment for o in own],
            s=24, color=colour, marker=mark, label=gpu, alpha=0.8,
        )  # fmt: skip
    axes.axhline(100 * goal, color="#6c757d", linestyle="--", linewidth=1)
    if best is not None:
        where = (best.configuration.cost_per_hour, 100 * best.attainment)
        axes.scatter(*where, s=140, facecolors="none", edgecolors="black", label="best")
    axes.set(xlabel="cost per hour", ylabel="requests within both targets, %", ylim=(0, 102))
    axes.legend(frameon=False)
    return save(plt, figure, path)
