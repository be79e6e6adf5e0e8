"""The dashboard beside a server in overload: its queries, and the table of what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from harness.setup import Outcome, Setup
from monitoring import figure
from monitoring.overload import panels, series_name, table

RUN = {
    "rate": 5.0,
    "switched_s": 60.0,
    "classes": {"chat": {"ttft_s": 0.5, "tpot_s": 0.05}},
}


def series(panel: str, name: str, before: float | None, after: float | None) -> dict[str, Any]:
    at_s = list(range(0, 121, 10))
    values = [before if at <= 60 else after for at in at_s]
    return RUN | {"panel": panel, "series": name, "unit": "s", "at_s": at_s, "values": values}


ROWS = [
    series("In time", "chat", 0.05, 0.9),
    series("Time to first token", "chat p50", 8.0, None),
]


def test_either_part_is_told_by_what_was_at_its_end() -> None:
    lines = table(ROWS).splitlines()

    assert "5 requests/s" in lines[0]
    assert lines[-1] == "| chat | 0.5 | 5 | 8.00 | 90 | nan |"


def test_every_query_of_the_dashboard_is_asked_for_a_window_that_prometheus_knows() -> None:
    found = list(panels())

    assert {"In time", "Requests", "Steps"} <= {title for title, *_ in found}
    assert not any("$" in query for *_, query in found)


def test_a_series_is_named_by_its_labels() -> None:
    assert series_name("{{slo_class}} p50", {"slo_class": "chat"}) == "chat p50"


def test_the_picture_has_a_panel_for_each_that_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    path = figure.draw("overload", Setup(None, tmp_path / "rows"), Outcome(ROWS, ""), tmp_path)

    assert path.stat().st_size > 5000
