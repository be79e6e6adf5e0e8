"""What became of requests as an HTML report: one request's time, or all of them, and the replay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sola_sched.bench.report import page
from sola_sched.bench.report.page import Figure, Lines, Section, Table, axis
from sola_sched.bench.report.results import environment
from sola_sched.explain.source import Window
from sola_sched.reports.fates import WAITED, engine_of, tpot_s, ttft_s
from sola_sched.reports.reasons import (
    preferred_to,
    remedies,
    story,
    verdict,
    waited_otherwise_s,
)

#: Requests that are told one by one, where an id is a part of several.
_MOST_TOLD = 5
_MOST_PREFERRED = 25
_NUM_BINS = 80
#: Parts of a request's time, in the order of a bar: name and colour.
_PARTS = (
    ("waited for a free slot", "#d1495b"),
    ("waited for KV memory", "#a45bb8"),
    ("waited for compute time", "#e07a1f"),
    ("waited for other reasons", "#8a929a"),
    ("prompt", "#3d85c6"),
    ("decodes", "#2a9d8f"),
)
_ENDED_WELL = ("attained", "aborted")
_HEAD = ("request", "class", "end", "arrival, s", "prompt", "output", "TTFT, ms", "TPOT, ms")
_TEXTS = ("request", "class", "end", "in time")


def write(
    window: Window,
    chosen: Sequence[Mapping[str, Any]],
    summary: str,
    replayed: tuple[str, Sequence[Sequence[str]]] | None,
    path: Path,
) -> Path:
    """Write the report.

    Args:
        window: All requests that are known.
        chosen: Those that were asked for; of none, the report is about all.
        summary: What is printed of all.
        replayed: A sentence and the table, head first; None without a replay.
    """
    parts: list[Section] = []
    for fate in chosen[:_MOST_TOLD]:
        parts += _one(fate, window)
    if not chosen:
        parts += _all(window, summary)
    if replayed is not None:
        said, (head, *rows) = replayed
        section = Section("The same minutes, otherwise", [said, Table(head, rows, (head[0],))])
        parts.append(section)
    parts.append(Section("Settings and versions", [_settings(window)]))
    title = chosen[0]["request_id"] if chosen else f"The last {len(window.requests):,} requests"
    return page.write(path, str(title), parts)


def _one(fate: Mapping[str, Any], window: Window) -> list[Section]:
    known = window.beside(fate)
    why = Section(
        f"Request {fate['request_id']}",
        [f"Class {window.place(fate)}. {verdict(fate)}", Lines(story(fate, known))],
    )
    if helps := remedies(fate, known):
        why.parts += ["What would have helped:", Lines(helps)]
    why.parts.append(_own_time(fate))
    preferred = preferred_to(fate, known)
    others = Section("Who was preferred to it")
    if not preferred:
        others.parts.append(
            "None of the requests that are known arrived later and was started before it."
        )
        return [why, others]
    shown = preferred[:_MOST_PREFERRED]
    first = "" if len(shown) == len(preferred) else f"; the first {len(shown)} are shown"
    others.parts += [
        f"{len(preferred):,} of the requests that are known arrived later and were started before "
        f"it{first}.",
        _beside(fate, shown),
        _table_of_preferred(fate, shown),
    ]
    return [why, others]


def _spans(fate: Mapping[str, Any]) -> list[float]:
    """Seconds of each of `_PARTS`.

    Waits after its start, which a preemption brings, are taken off the prompt as far as that took
    longer than on an idle engine, and the rest off the decodes.
    """
    waits = [*(fate[name] for name in WAITED), waited_otherwise_s(fate)]
    end_s = fate["ended_s"] if fate["last_token_s"] is None else fate["last_token_s"]
    if fate["started_s"] is None:
        return [*waits, 0.0, 0.0]
    first_s = end_s if fate["first_token_s"] is None else fate["first_token_s"]
    prompt_s = first_s - fate["started_s"]
    later_s = max(0.0, fate["arrival_s"] + sum(waits) - fate["started_s"])
    in_prompt_s = min(later_s, max(0.0, prompt_s - (fate["alone_s"] or 0.0)))
    decodes_s = end_s - first_s - (later_s - in_prompt_s)
    return [*waits, prompt_s - in_prompt_s, max(0.0, decodes_s)]


def _own_time(fate: Mapping[str, Any]) -> Figure:
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [""],
            "x": [seconds],
            "marker": {"color": colour},
            "hovertemplate": f"{name}: %{{x:.3~g}} s",
        }
        for (name, colour), seconds in zip(_PARTS, _spans(fate), strict=True)
        if seconds > 0
    ]
    marks = [("TTFT target", fate["ttft_s"]), ("e2e target", fate["e2e_s"])]
    first_s = ttft_s(fate)
    marks.append(("first token", first_s))
    if fate["lost_s"] is not None:
        marks.append(("given up", fate["lost_s"] - fate["arrival_s"]))
    shapes, notes = [], []
    for place, (name, at_s) in enumerate((name, at) for name, at in marks if at is not None):
        shapes.append({"type": "line", "x0": at_s, "x1": at_s, "y0": 0, "y1": 1, "yref": "paper",
                       "line": {"dash": "dot", "color": "#8a929a"}})  # fmt: skip
        notes.append({"x": at_s, "y": -0.28 - 0.13 * place, "yref": "paper", "text": name,
                      "showarrow": False, "xanchor": "left"})  # fmt: skip
    layout = {
        "barmode": "stack",
        "xaxis": axis("seconds after its arrival", rangemode="tozero", side="top"),
        "yaxis": {"visible": False},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.95, "traceorder": "normal"},
        "shapes": shapes,
        "annotations": notes,
        "margin": {"l": 12, "r": 12, "t": 60, "b": 190},
    }
    caption = (
        "Where its time went. Waits are sums: they are drawn one after another, and may have come "
        "in another order."
    )
    return Figure(caption, data, layout, 340)


def _beside(fate: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Figure:
    rows = [fate, *others]
    names = [f"{place}: {each['request_id']}" if place else "this one"
             for place, each in enumerate(rows)]  # fmt: skip
    data = []
    ends = ("arrival_s", "started_s", "first_token_s", "ended_s")
    for name, colour, begin, end in (
        ("waited", "#8a929a", *ends[:2]),
        ("prompt", "#3d85c6", *ends[1:3]),
        ("decodes", "#2a9d8f", *ends[2:]),
    ):
        spans = [
            (place, each[begin] - fate["arrival_s"], (each[end] or each["ended_s"]) - each[begin])
            for place, each in enumerate(rows)
            if each[begin] is not None
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [place for place, _, _ in spans],
                "base": [start for _, start, _ in spans],
                "x": [length for _, _, length in spans],
                "text": [names[place] for place, _, _ in spans],
                "textposition": "none",
                "marker": {"color": colour},
                "hovertemplate": f"%{{text}}<br>{name} %{{x:.3~g}} s",
            }
        )
    layout = {
        "barmode": "overlay",
        "xaxis": axis("seconds after this one's arrival"),
        "yaxis": axis("row", autorange="reversed", dtick=max(1, len(rows) // 10)),
    }
    caption = (
        "A bar is a request: this one is row 0, and those preferred to it are below, in the order "
        "of the table. Point at one to see which it is."
    )
    return Figure(caption, data, layout, 180 + 18 * len(rows))


def _table_of_preferred(fate: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Table:
    head = ("row", "request", "class", "came after, s", "started after, s", "prompt",
            "TTFT target, s", "in time")  # fmt: skip
    rows = [
        [
            str(place),
            each["request_id"],
            each["slo_class"],
            f"{each['arrival_s'] - fate['arrival_s']:.2f}",
            f"{each['started_s'] - fate['arrival_s']:.2f}",
            f"{each['num_prompt']:,}",
            "none" if each["ttft_s"] is None else f"{each['ttft_s']:g}",
            "yes" if each["end"] == "attained" else each["end"],
        ]
        for place, each in enumerate(others, 1)
    ]
    return Table(head, rows, _TEXTS)


def _all(window: Window, summary: str) -> list[Section]:
    late = [fate for fate in window.requests if fate["end"] not in _ENDED_WELL]
    lines = summary.split("\n\n")[0].splitlines()
    parts = [Section("Summary", [*lines, Table(_HEAD, _rows(late, window), _TEXTS[:3],
                                               f"{len(late):,} that were late")])]  # fmt: skip
    points = [fate for fate in window.requests if tpot_s(fate) is not None]
    if points:
        parts.append(Section("Each request: TTFT and TPOT", [_plane(points, window)]))
        parts.append(Section("Over time", [_over_time(window)]))
    return parts


def _plane(points: Sequence[Mapping[str, Any]], window: Window) -> Figure:
    data = []
    for name, colour, is_in_time in (("in time", page.MET, True), ("late", page.OURS[0], False)):
        own = [fate for fate in points if (fate["end"] == "attained") is is_in_time]
        rows = _rows(own, window)
        data.append(
            {
                "name": f"{name}: {len(own):,}",
                "x": [1e3 * (ttft_s(fate) or 0.0) for fate in own],
                "y": [1e3 * (tpot_s(fate) or 0.0) for fate in own],
                "text": ["<br>".join(f"{k} {v}" for k, v in zip(_HEAD, r, strict=True))
                         for r in rows],
                "mode": "markers",
                "marker": {"color": colour, "size": 6, "opacity": 0.7},
                "hovertemplate": "%{text}",
            }
        )  # fmt: skip
    layout = {
        "xaxis": page.log_axis("TTFT, ms", [1e3 * (ttft_s(fate) or 0.0) for fate in points]),
        "yaxis": page.log_axis("TPOT, ms", [1e3 * (tpot_s(fate) or 0.0) for fate in points]),
    }
    caption = "A dot is a request; point at one to see which. Each has targets of its own."
    return Figure(caption, data, layout)


def _over_time(window: Window) -> Figure:
    begun_s = _begun_s(window)
    over_s = max(fate["ended_s"] - begun_s[engine_of(fate)] for fate in window.requests)
    middles = (np.arange(_NUM_BINS) + 0.5) * over_s / _NUM_BINS
    data = []
    for name, colour, begin, end in (
        ("wait for a slot", page.OURS[0], "arrival_s", "started_s"),
        ("have one", page.OTHERS[0], "started_s", "ended_s"),
    ):
        spans = np.array(
            [(f[begin] - begun_s[engine_of(f)],
              (f["ended_s"] if f[end] is None else f[end]) - begun_s[engine_of(f)])
             for f in window.requests if f[begin] is not None]
        ).reshape(-1, 2)  # fmt: skip
        counts = [int(((spans[:, 0] <= at) & (at < spans[:, 1])).sum()) for at in middles]
        data.append({"name": name, "x": middles.tolist(), "y": counts, "mode": "lines",
                     "line": {"color": colour}})  # fmt: skip
    layout = {"xaxis": axis("seconds"), "yaxis": axis("requests", rangemode="tozero")}
    caption = "Of the requests that have ended: those that have not are not known here."
    return Figure(caption, data, layout)


def _rows(fates: Sequence[Mapping[str, Any]], window: Window) -> list[list[str]]:
    begun_s = _begun_s(window)
    return [
        [
            fate["request_id"],
            window.place(fate),
            fate["end"],
            f"{fate['arrival_s'] - begun_s[engine_of(fate)]:.2f}",
            f"{fate['num_prompt']:,}",
            f"{fate['num_output']:,}",
            _ms(ttft_s(fate)),
            _ms(tpot_s(fate)),
        ]
        for fate in fates
    ]


def _begun_s(window: Window) -> dict[int, float]:
    """The first arrival of each engine, on its own clock."""
    return {
        rank: min(fate["arrival_s"] for fate in own.requests)
        for rank, own in window.by_engine.items()
    }


def _settings(window: Window) -> Table:
    engine = window.engine or {}
    rows = [
        [name, json.dumps(engine[name])] for name in ("engine_args", "options") if name in engine
    ]
    versions = environment()["versions"]
    rows += [[f"version of {name}, here", version] for name, version in versions.items()]
    return Table(("", "value"), rows, ("", "value"))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.4g}"
