"""A benchmark as an HTML report: attainment over rate, each request, its steps, the settings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sola_sched.bench.report import page, table
from sola_sched.bench.report.page import Figure, Lines, Section, Table, axis
from sola_sched.bench.report.results import Result

#: Requests of a run that a plane shows, and rows of the table of late ones.
MOST_POINTS = 1500
MOST_LATE = 200
_NUM_BINS = 80
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
_SETTINGS = (
    "model_id", "tokenizer_id", "backend", "dataset_name", "seed", "num_prompts", "burstiness",
    "max_concurrency", "clock", "date",
)  # fmt: skip


def write(results: Sequence[Result], path: Path) -> Path:
    """Write the report of all runs of one benchmark; they need their per-request arrays."""
    first = results[0]
    title = f"{first['model_id']}, {first['dataset_name']}, {first['num_prompts']} requests a run"
    return page.write(path, title, sections(results))


def sections(results: Sequence[Result]) -> list[Section]:
    """What the report consists of."""
    by_rate: dict[float, list[Result]] = {}
    for result in sorted(results, key=_rate):
        by_rate.setdefault(_rate(result), []).append(result)
    colours = _colours(results)
    parts = [_overview(results)]
    if len(by_rate) > 1:
        parts.append(Section("Attainment over rate", [_attainment(results, colours)]))
    planes = Section("Each request: TTFT and TPOT")
    over_time = Section("Steps over time")
    for rate, runs in by_rate.items():
        planes.parts += [_plane(runs, colours, _rate_text(rate)), _late(runs, _rate_text(rate))]
        over_time.parts.append(_over_time(runs, colours, _rate_text(rate)))
    return [*parts, planes, over_time, _settings(results)]


def _overview(results: Sequence[Result]) -> Section:
    head, rows = table.cells(results)
    ours = [i for i, row in enumerate(rows) if row[1].startswith("sola")]
    section = Section("Result", [Table(head, rows, ("scheduler",), chosen=ours)])
    section.parts.append(" ".join(table.legend(results)))
    if lines := table.conclusions(results):
        section.parts.append(Lines(lines))
    return section


def _attainment(results: Sequence[Result], colours: Mapping[str, str]) -> Figure:
    data = []
    for label, colour in colours.items():
        runs = sorted((r for r in results if _label(r) == label), key=_rate)
        runs = [run for run in runs if math.isfinite(_rate(run))]
        data.append(
            {
                "name": label,
                "x": [_rate(run) for run in runs],
                "y": [100 * run["attainment"] for run in runs],
                "mode": "lines+markers",
                "line": {"color": colour},
                "hovertemplate": "%{y:.1f} % at %{x:.3g} requests/s",
            }
        )
    bounds = {rate: share for rate, share in table.bounds(results).items() if math.isfinite(rate)}
    if bounds:
        data.append(
            {
                "name": "no scheduler attains more",
                "x": list(bounds),
                "y": [100 * share for share in bounds.values()],
                "mode": "lines",
                "line": {"color": "#8a929a", "dash": "dot"},
            }
        )
    layout = {
        "xaxis": axis("requests/s", rangemode="tozero"),
        "yaxis": axis("requests within all targets, %", range=[0, 102]),
    }
    return Figure("The numbers are those of the table above.", data, layout)


def _plane(runs: Sequence[Result], colours: Mapping[str, str], rate: str) -> Figure:
    data = []
    for symbol, run in zip(_SYMBOLS * len(runs), runs, strict=False):
        points = [each for each in _requests(run) if each["tpot_ms"] > 0]
        shown = points[:: max(1, math.ceil(len(points) / MOST_POINTS))]
        part = "" if len(shown) == len(points) else f", {len(shown):,} of {len(points):,} shown"
        data.append(
            {
                "name": f"{_label(run)}: {run['attainment']:.1%} in time{part}",
                "x": [each["ttft_ms"] for each in shown],
                "y": [each["tpot_ms"] for each in shown],
                "text": [_hover(each) for each in shown],
                "mode": "markers",
                "marker": {"color": colours[_label(run)], "size": 6, "symbol": symbol,
                           "opacity": 0.7},
                "hovertemplate": "%{text}",
            }
        )  # fmt: skip
    slo = runs[0]["slo"]
    box = page.target_box(slo["ttft_ms"], slo["tpot_ms"])
    xs = [x for trace in data for x in trace["x"]]
    ys = [y for trace in data for y in trace["y"]]
    layout = {
        "xaxis": page.log_axis("TTFT, ms", [*xs, slo["ttft_ms"]]),
        "yaxis": page.log_axis("TPOT, ms", [*ys, slo["tpot_ms"]]),
        "shapes": [box],
    }
    own = len(runs[0]["attainment_by_class"]) > 1
    return Figure(
        f"{rate}: a point is a request; inside the green box it met both targets. Point at one to "
        "see which it is; the late ones are in the table below, too. "
        + ("Requests of a class have targets of their own, not those of the box. " if own else "")
        + "Requests of one token have no TPOT and are not shown.",
        data,
        layout,
        520,
    )


def _late(runs: Sequence[Result], rate: str) -> Table:
    late = [(run, each) for run in runs for each in _requests(run) if not each["attained"]]
    late.sort(key=lambda pair: -pair[1]["ttft_ms"] if pair[1]["ttft_ms"] > 0 else -math.inf)
    more = f", the {MOST_LATE:,} with the longest TTFT" if len(late) > MOST_LATE else ""
    rows = [
        [_label(run), f"{r['number']}", f"{r['arrival_s']:,.2f}", f"{r['prompt']:,}",
         f"{r['output']:,}", _number(r["ttft_ms"], 0), _number(r["tpot_ms"], 1),
         r["slo_class"] or "", r["error"]]
        for run, r in late[:MOST_LATE]
    ]  # fmt: skip
    head = ("scheduler", "request", "arrival, s", "prompt", "output", "TTFT, ms", "TPOT, ms",
            "class", "error")  # fmt: skip
    summary = f"{rate}: {len(late):,} requests that missed a target{more}"
    return Table(head, rows, ("scheduler", "class", "error"), summary)


def _over_time(runs: Sequence[Result], colours: Mapping[str, str], rate: str) -> Figure:
    data: list[dict[str, Any]] = []
    for run in runs:
        for place, (what, xs, ys) in enumerate(_series(run), 1):
            data.append(
                {
                    "name": _label(run),
                    "legendgroup": _label(run),
                    "showlegend": place == 1,
                    "x": xs,
                    "y": ys,
                    "xaxis": "x",
                    "yaxis": f"y{place}" if place > 1 else "y",
                    "mode": "lines",
                    "line": {"color": colours[_label(run)], "width": 1.5},
                    "hovertemplate": f"%{{y:,.4~g}} {what} at %{{x:.1f}} s",
                }
            )
    layout = {
        "xaxis": axis("seconds", anchor="y4", rangemode="tozero"),
        "yaxis": axis("wait for a token", domain=[0.78, 1], rangemode="tozero"),
        "yaxis2": axis("decode", domain=[0.52, 0.74], rangemode="tozero"),
        "yaxis3": axis("step, ms", domain=[0.26, 0.48], rangemode="tozero"),
        "yaxis4": axis("tokens/s", domain=[0, 0.22], rangemode="tozero"),
    }
    return Figure(
        f"{rate}: requests that wait for their first token; requests that have it and decode; the "
        "median gap between two tokens of a request, which is a step or, where it was held, more; "
        "and output tokens per second.",
        data,
        layout,
        640,
    )


def _series(run: Result) -> Iterator[tuple[str, list[float], list[float | None]]]:
    """What a run did in each of some equal spans of time: name, middles and values."""
    arrivals = np.array(run["arrival_times"], float)
    firsts = arrivals + np.array(run["ttfts"], float)
    ends = arrivals + np.array(run["latencies"], float)
    begun_s = float(arrivals.min(initial=math.inf))
    over_s = float(np.nanmax(np.append(ends, arrivals)))
    edges = np.linspace(0, max(over_s - begun_s, 1e-9), _NUM_BINS + 1)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    arrivals, firsts, ends = arrivals - begun_s, firsts - begun_s, ends - begun_s
    gone = np.where(np.isnan(ends), arrivals, ends)

    def within(start: Any, end: Any) -> list[float | None]:
        return [float(((start <= at) & (at < end)).sum()) for at in middles]

    yield "wait", middles, within(arrivals, np.where(np.isnan(firsts), gone, firsts))
    yield "decode", middles, within(np.where(np.isnan(firsts), math.inf, firsts), gone)
    gaps = np.concatenate([np.array(each, float) for each in run["itls"]] or [np.empty(0)])
    times = np.concatenate(
        [first + np.cumsum(each) for first, each in zip(firsts, run["itls"], strict=True)]
        or [np.empty(0)]
    )
    places = np.clip(np.searchsorted(edges, times) - 1, 0, _NUM_BINS - 1)
    medians = [
        1e3 * float(np.median(own)) if len(own := gaps[places == place]) else None
        for place in range(_NUM_BINS)
    ]
    yield "ms a step", middles, medians
    tokens = np.histogram(np.append(times, firsts[~np.isnan(firsts)]), edges)[0]
    yield "tokens/s", middles, (tokens / np.diff(edges)).tolist()


def _settings(results: Sequence[Result]) -> Section:
    first = results[0]
    rows = [[name, _words(first[name])] for name in _SETTINGS if first.get(name) is not None]
    rows.append(["targets", _words(first["slo"])])
    for run in {_label(run): run for run in results}.values():
        own = run["scheduler"]
        given = {"engine_args": own["engine_args"], "options": own["options"]}
        rows.append([f"scheduler {_label(run)}", _words(given)])
    rows += [[f"version of {k}", v] for k, v in first["environment"]["versions"].items()]
    rows.append(["machine", f"{first['environment']['machine']}, "
                 f"{first['environment']['num_cpus']} CPUs"])  # fmt: skip
    section = Section("Settings and versions", [Table(("", "value"), rows, ("", "value"))])
    notes = dict.fromkeys(f"{_label(run)}: {note}" for run in results for note in run["notes"])
    if notes:
        section.parts.append(Lines(list(notes)))
    return section


def _requests(run: Result) -> list[dict[str, Any]]:
    keys = ("arrival_times", "input_lens", "output_lens", "ttfts", "tpots", "attained",
            "slo_classes", "errors")  # fmt: skip
    return [
        {"number": number, "arrival_s": arrival_s, "prompt": prompt, "output": output,
         "ttft_ms": 1e3 * ttft_s, "tpot_ms": 1e3 * tpot_s, "attained": attained,
         "slo_class": slo_class, "error": error}
        for number, (arrival_s, prompt, output, ttft_s, tpot_s, attained, slo_class, error) in
        enumerate(zip(*(run[key] for key in keys), strict=True))
    ]  # fmt: skip


def _hover(request: Mapping[str, Any]) -> str:
    own = f", class {request['slo_class']}" if request["slo_class"] else ""
    return (
        f"request {request['number']}{own}<br>arrival {request['arrival_s']:,.2f} s<br>"
        f"prompt {request['prompt']:,}, output {request['output']:,} tokens<br>"
        f"TTFT {request['ttft_ms']:,.0f} ms, TPOT {request['tpot_ms']:,.1f} ms<br>"
        f"{'met its targets' if request['attained'] else 'missed a target'}"
    )


def _colours(results: Sequence[Result]) -> dict[str, str]:
    left = {True: list(page.OURS), False: list(page.OTHERS)}
    found: dict[str, str] = {}
    for result in results:
        if _label(result) not in found:
            palette = left[result["scheduler"]["kind"] == "sola"]
            found[_label(result)] = palette[0]
            palette.append(palette.pop(0))
    return found


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else ""


def _label(result: Result) -> str:
    return str(result["scheduler"]["label"])


def _rate(result: Result) -> float:
    return float(result["request_rate"])


def _rate_text(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:.3g} requests/s"
