"""The frame of an HTML report: one file with headings, texts, tables and figures of plotly.

The file opens without a network: plotly's script is in it, and a content security policy forbids
the browser to load anything else. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from sola_sched.bench.report.results import to_json
from sola_sched.config.output_file import require_writable
from sola_sched.errors import ConfigError

#: Told apart on light and on dark ground.
OURS = ("#d1495b", "#a45bb8", "#e07a1f")
OTHERS = ("#3d85c6", "#2a9d8f", "#8a929a", "#b0a160", "#5aa9c9")
MET = "#2a9d4a"
_GRID = "rgba(128,128,128,0.28)"
#: plotly offers more buttons, one of which sends the figure to a server.
_BUTTONS = ("zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage")
_CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtons": [_BUTTONS]}
_HEIGHT_PX = 430
_SHORT_DECADES = 3.5

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1d2329; --line: #c9d0d6;
  --link: #0b62a8; --soft: #f3f5f7; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181c; --text: #e3e7ea;
  --line: #454d55; --link: #7fbcf0; --soft: #1e2429; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 0.5rem 1rem 3rem; background: var(--ground);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
a { color: var(--link); } nav ul { padding: 0; margin: 0; }
nav li { display: inline-block; margin-right: 1rem; padding: 0.2rem 0; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.7rem 0.25rem 0;
  text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; }
@media (max-width: 40rem) { .wide td:not(.n) { min-width: 9rem; } .modebar { display: none; } }
tr.chosen td { font-weight: 600; background: var(--soft); }
summary { cursor: pointer; padding: 0.3rem 0; } figure { margin: 1rem 0; }
figcaption { padding-top: 0.6rem; }
.figure text:not(.hovertext text):not(.nums):not(.name) { fill: var(--text) !important; }
"""
_SCRIPT = (
    "for (const [id, f] of Object.entries(JSON.parse(document.getElementById('figures')"
    ".textContent))) Plotly.newPlot(id, f.data, f.layout, f.config);"
)
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; a column is set as numbers unless its name is in `texts`.

    Attributes:
        summary: Named by a line that unfolds the table; None shows it at once.
        chosen: Places of rows that stand out.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[str] = ()
    summary: str | None = None
    chosen: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """One figure of plotly, as its `data` and `layout`; `caption` also says what a hover shows."""

    caption: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    height_px: int = _HEIGHT_PX


@dataclass(frozen=True)
class Lines:
    """A list of sentences."""

    items: Sequence[str]


@dataclass
class Section:
    """A heading, and what stands below it: texts are paragraphs."""

    title: str
    parts: list[str | Table | Figure | Lines] = field(default_factory=list)


def require_report(path: Path | None) -> None:
    """Find out before the work starts whether a report can be written; None asks for none.

    Raises:
        ConfigError: plotly is missing, or the file cannot be written.
    """
    if path is not None:
        _plotly_script()
        require_writable(path, "--html")


def write(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write the report; returns `path`."""
    path.write_text(page(title, sections), encoding="utf-8")
    return path


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole file."""
    figures: dict[str, Any] = {}
    names = (f"figure-{number}" for number in count())
    body, links = [], []
    for number, section in enumerate(sections):
        links.append(f'<li><a href="#part-{number}">{_text(section.title)}</a></li>')
        body.append(f'<section id="part-{number}"><h2>{_text(section.title)}</h2>')
        for part in section.parts:
            if isinstance(part, Figure):
                name = next(names)
                figures[name] = {
                    "data": part.data,
                    "layout": _layout(part),
                    "config": _CONFIG,
                }
                body.append(_figure(name, part))
            else:
                body.append(_part(part))
        body.append("</section>")
    data = to_json(figures).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            f'<h1>{_text(title)}</h1>\n<nav aria-label="Parts"><ul>{"".join(links)}</ul></nav>',
            f"<main>{''.join(body)}</main>",
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{_plotly_script()}</script>\n<script>{_SCRIPT}</script>",
            "</body>\n</html>\n",
        ]
    )


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis of a figure."""
    return {"title": {"text": title}, "gridcolor": _GRID, "zerolinecolor": _GRID} | more


def log_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis that shows all of these that are > 0, with 1, 2, 5, 10, ... on it."""
    known = [value for value in values if 0 < value < math.inf] or [1.0]
    low, high = math.log10(min(known) / 1.2), math.log10(max(known) * 1.2)
    ticks = [d * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for d in (1, 2, 5)]
    if high - low > _SHORT_DECADES:
        ticks = ticks[::3]
    return axis(
        title, type="log", range=[low, high], tickvals=ticks, ticktext=[f"{t:,g}" for t in ticks]
    )


def target_box(ttft_ms: float, tpot_ms: float) -> dict[str, Any]:
    """The part of the TTFT-TPOT plane, both axes logarithmic, within these targets."""
    box = {"type": "rect", "line": {"color": MET}, "fillcolor": MET, "opacity": 0.13,
           "layer": "below"}  # fmt: skip
    for side, target in (("x", ttft_ms), ("y", tpot_ms)):
        ends = (1e-3, target, side) if math.isfinite(target) else (0, 1, "paper")
        box |= dict(zip((f"{side}0", f"{side}1", f"{side}ref"), ends, strict=True))
    return box


def _layout(figure: Figure) -> dict[str, Any]:
    return {
        "autosize": True,
        "height": figure.height_px,
        "margin": {"l": 60, "r": 12, "t": 34, "b": 50},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif"},
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "bgcolor": "rgba(0,0,0,0)"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#808890", "activecolor": "#3d85c6"},
        "hovermode": "closest",
    } | dict(figure.layout)


def _figure(name: str, figure: Figure) -> str:
    return (
        f'<figure><div class="figure" id="{name}" style="min-height:{figure.height_px}px"></div>'
        f"<figcaption>{_text(figure.caption)}</figcaption></figure>"
    )


def _part(part: str | Table | Lines) -> str:
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Lines):
        return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in part.items)}</ul>"
    return f"<p>{_text(part)}</p>"


def _table(table: Table) -> str:
    kinds = ["" if name in table.texts else ' class="n"' for name in table.head]
    head = "".join(
        f'<th scope="col"{kind}>{_text(name)}</th>'
        for name, kind in zip(table.head, kinds, strict=True)
    )
    lines = []
    for place, row in enumerate(table.rows):
        cells = "".join(
            f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)
        )
        kind = ' class="chosen"' if place in table.chosen else ""
        lines.append(f"<tr{kind}>{cells}</tr>")
    label = _text(table.summary or ", ".join(filter(None, table.head)))
    text = (
        f'<div class="wide" role="region" tabindex="0" aria-label="{label}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
    return f"<details><summary>{label}</summary>{text}</details>" if table.summary else text


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            f"'--html' needs plotly, which cannot be loaded ({error}); install it with "
            "pip install 'sola-sched[html]'."
        ) from error
    return str(get_plotlyjs())


def _text(text: str) -> str:
    return html.escape(text)
