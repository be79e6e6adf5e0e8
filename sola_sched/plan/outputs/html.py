"""A plan as an HTML report: what it says, the choices, and attainment over cost and over rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from sola_sched.bench.report import page
from sola_sched.bench.report.page import Figure, Lines, Section, Table, axis
from sola_sched.bench.report.results import environment
from sola_sched.plan.outputs.report import HEAD, LEGEND, cells, shown
from sola_sched.plan.search.evaluate import Outcome

#: Of GPU types; neighbours in the list are told apart by anybody, by their marks too.
_COLOURS = (page.OTHERS[0], page.OURS[2], page.OTHERS[1], page.OURS[1], page.OTHERS[2])
#: Entries of the JSON file, as the report has them.
_SETTINGS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("model", "model", str),
    ("dataset", "data set", str),
    ("num_requests", "requests", "{:,}".format),
    ("request_rate", "requests/s", lambda rate: "as recorded" if rate is None else f"{rate:g}"),
    ("slo_ms", "targets", lambda targets: ", ".join(_targets(targets)) or "none"),
    ("attainment_goal", "share that must meet them", lambda share: f"{100 * share:g} %"),
    ("seed", "seed", str),
)
_MARKS = ("circle", "square", "triangle-up", "diamond", "cross")


def write(
    document: Mapping[str, Any],
    said: Sequence[str],
    outcomes: Sequence[Outcome],
    best: Outcome | None,
    path: Path,
) -> Path:
    """Write the report.

    Args:
        document: What the JSON file holds.
        said: What the command printed beside the table, a sentence each.
        outcomes: All that was tried, by cost, then by attainment.
        best: The answer, if there is one.
    """
    goal = document["attainment_goal"]
    rows = shown(outcomes, goal, best)
    chosen = [i for i, o in enumerate(rows) if best and o.configuration == best.configuration]
    parts = [
        Section("Answer", [Lines(said)]),
        Section(
            "Choices",
            [
                "The best variant for each number of GPUs, of vLLM's scheduler and of sola_sched.",
                LEGEND,
                Table(HEAD, [cells(o) for o in rows], ("configuration",), chosen=chosen),
                _over_cost(outcomes, goal, best),
                Table(HEAD, [cells(o) for o in outcomes], ("configuration",),
                      f"All {len(outcomes):,} configurations that were tried"),
            ],
        ),
    ]  # fmt: skip
    if rates := document.get("margin", {}).get("rates"):
        parts.append(Section("Attainment over rate", [_over_rate(rates, goal)]))
    parts.append(Section("Settings and versions", [_settings(document)]))
    return page.write(path, f"What to rent for {document['model']}", parts)


def write_services(document: Mapping[str, Any], goal: float, path: Path) -> Path:
    """Write the report of a plan for several services: the groups, and what was tried."""
    groups = [
        [str(number), str(group["degree"]), ", ".join(group["services"])]
        for number, group in enumerate(document["groups"])
    ]
    attained = [[name, f"{share:.1%}"] for name, share in document["attained"].items()]
    tried = document["tried"]
    rows = [
        [f"{one['cost']:.2f}", f"{one['num_gpus']} {one['gpu']}", f"{one['attainment']:.1%}",
         f"{one['real_attainment']:.1%}" if "real_attainment" in one else "",
         f"{one['worst_service']} {one['worst_attained']:.1%}"]
        for one in tried
    ]  # fmt: skip
    head = ("cost/h", "GPUs", "attained", "real schedulers", "worst service")
    best = f"{document['num_gpus']} {document['gpu']}, {document['cost_per_hour']:.2f} per hour"
    parts = [
        Section(
            "Answer",
            [
                f"{best}, by the {document['schedulers']} "
                f"{'schedulers' if document['schedulers'] == 'real' else 'model'}.",
                Table(("group", "GPUs", "services"), groups, ("services",)),
                Table(("service", "within its targets"), attained, ("service",)),
            ],
        ),
        Section(
            "What was tried", [_of_services(tried, goal), Table(head, rows, (head[1], head[4]))]
        ),
        Section("Settings and versions", [_settings({"attainment_goal": goal})]),
    ]
    return page.write(path, f"GPUs for {len(attained)} services", parts)


def _of_services(tried: Sequence[Mapping[str, Any]], goal: float) -> Figure:
    data = []
    kinds = list(dict.fromkeys(one["gpu"] for one in tried))
    for gpu, colour, mark in zip(kinds, cycle(_COLOURS), cycle(_MARKS), strict=False):
        own = [one for one in tried if one["gpu"] == gpu]
        data.append(
            {
                "name": gpu,
                "x": [one["cost"] for one in own],
                "y": [100 * one.get("real_attainment", one["attainment"]) for one in own],
                "text": [f"{one['num_gpus']} {gpu}" for one in own],
                "mode": "lines+markers",
                "line": {"color": colour},
                "marker": {"symbol": mark, "size": 8},
                "cliponaxis": False,
                "hovertemplate": "%{text}<br>%{y:.1f} % for %{x:.2f} an hour",
            }
        )
    layout = {
        "xaxis": axis("cost per hour", rangemode="tozero"),
        "yaxis": axis("requests within all targets, %", range=[0, 102]),
        "shapes": [_goal(goal)],
    }
    return Figure(
        "A dot is a number of GPUs, with the best placement that was found.", data, layout
    )


def _over_cost(outcomes: Sequence[Outcome], goal: float, best: Outcome | None) -> Figure:
    gpus = sorted({o.configuration.gpu for o in outcomes})
    data: list[dict[str, Any]] = []
    for gpu, colour, mark in zip(gpus, cycle(_COLOURS), cycle(_MARKS), strict=False):
        own = [o for o in outcomes if o.configuration.gpu == gpu]
        data.append(
            {
                "name": gpu,
                "x": [o.configuration.cost_per_hour for o in own],
                "y": [100 * o.attainment for o in own],
                "text": [o.configuration.name for o in own],
                "mode": "markers",
                "marker": {"color": colour, "symbol": mark, "size": 8, "opacity": 0.8},
                "cliponaxis": False,
                "hovertemplate": "%{text}<br>%{y:.1f} % for %{x:.2f} an hour",
            }
        )
    most: dict[float, float] = {}
    for o in outcomes:
        reached = max(100 * o.attainment, max(most.values(), default=0.0))
        most[o.configuration.cost_per_hour] = reached
    data.append(
        {"name": "the most for the cost", "x": list(most), "y": list(most.values()),
         "mode": "lines", "line": {"shape": "hv", "color": "#8a929a"}, "hoverinfo": "skip"}
    )  # fmt: skip
    if best is not None:
        data.append(
            {
                "name": "the answer",
                "x": [best.configuration.cost_per_hour],
                "y": [100 * best.attainment],
                "mode": "markers",
                "marker": {"symbol": "circle-open", "size": 16, "color": page.MET},
                "cliponaxis": False,
                "hoverinfo": "skip",
            }
        )
    layout = {
        "xaxis": axis("cost per hour", rangemode="tozero"),
        "yaxis": axis("requests within all targets, %", range=[0, 102]),
        "shapes": [_goal(goal)],
    }
    caption = (
        "A dot is a configuration; point at one to see which. The dashed line is the attainment "
        "that was asked for. All dots are in the table below."
    )
    return Figure(caption, data, layout)


def _over_rate(rates: Sequence[tuple[float, float]], goal: float) -> Figure:
    ordered = sorted(rates)
    data = [
        {
            "x": [factor for factor, _ in ordered],
            "y": [100 * share for _, share in ordered],
            "mode": "lines+markers",
            "line": {"color": page.OURS[0]},
            "hovertemplate": "%{y:.1f} % at %{x:.3g} times the rate",
        }
    ]
    layout = {
        "xaxis": axis("times the rate that was asked for"),
        "yaxis": axis("requests within all targets, %", range=[0, 102]),
        "shapes": [_goal(goal)],
    }
    return Figure("The answer at higher rates, by the fast model.", data, layout)


def _goal(goal: float) -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 100 * goal, "y1": 100 * goal,
        "line": {"dash": "dash", "color": "#8a929a", "width": 1},
    }  # fmt: skip


def _settings(document: Mapping[str, Any]) -> Table:
    rows = [
        [said, as_text(document[name])] for name, said, as_text in _SETTINGS if name in document
    ]
    versions = environment()["versions"]
    rows += [[f"version of {name}", version] for name, version in versions.items()]
    return Table(("", "value"), rows, ("", "value"))


def _targets(slo_ms: Mapping[str, float]) -> Iterator[str]:
    for name, value in slo_ms.items():
        if math.isfinite(value):
            yield f"{name.upper()} {value:,.6g} ms"
