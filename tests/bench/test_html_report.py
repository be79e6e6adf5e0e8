"""The benchmark's HTML report: its numbers, its form, and what a browser makes of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")

from bench_runs import run_result
from browser import browser
from html_report import Report

from sola_sched.bench.cli import main
from sola_sched.bench.report import html, page
from sola_sched.bench.report.page import Figure, Lines, Section, Table
from sola_sched.bench.report.table import table

RATES = (2.0, 4.0)
SCHEDULERS = ("stock:512", "sola")
_WHITE, _DARK = "rgb(255, 255, 255)", "rgb(20, 24, 28)"
_PHONE_PX = 390


def some_results() -> list[dict]:
    ttfts_s = (0.1, 0.2, 0.9, float("nan"), 0.3)
    return [run_result(name, rate, ttfts_s) for rate in RATES for name in SCHEDULERS]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return html.write(some_results(), tmp_path / "report.html")


def test_the_file_is_well_formed_and_refers_to_nothing_outside(report: Path) -> None:
    assert Report(report).problems == []


def test_the_table_has_the_cells_of_the_printed_one(report: Path) -> None:
    printed = [line.split() for line in table(some_results()).splitlines()]
    head, *rows = Report(report).tables[0]

    assert " ".join(head).split() == printed[0]
    assert rows
    for row in rows:
        assert " ".join(row).split() in printed


def test_figures_have_the_numbers_of_the_results(report: Path) -> None:
    results, found = some_results(), Report(report).figures
    attainment, first_plane = found["figure-0"]["data"], found["figure-1"]["data"]

    for trace in attainment:
        own = [r for r in results if r["scheduler"]["label"] == trace["name"]]
        assert trace["x"] == list(RATES)
        assert trace["y"] == [100 * run["attainment"] for run in own]
    assert [trace["name"] for trace in first_plane] == [
        f"{name}: 60.0% in time" for name in SCHEDULERS
    ]
    for trace, run in zip(first_plane, results, strict=False):
        finite = ~np.isnan(run["ttfts"])
        assert trace["x"] == pytest.approx(1e3 * np.array(run["ttfts"])[finite])
        assert trace["y"] == pytest.approx(1e3 * np.array(run["tpots"])[finite])
        assert trace["text"][2].startswith("request 2<br>arrival ")


def test_steps_over_time_count_every_token_and_request(report: Path) -> None:
    results, found = some_results(), Report(report).figures
    over_time = found["figure-3"]["data"][:4]  # of the first run at the first rate
    waits, decodes, steps, tokens = (np.array(trace["y"], float) for trace in over_time)
    width_s = over_time[3]["x"][1] - over_time[3]["x"][0]

    assert tokens.sum() * width_s == pytest.approx(results[0]["total_output_tokens"])
    waited_s = np.nansum(results[0]["ttfts"])
    assert waits.sum() * width_s == pytest.approx(waited_s, abs=5 * width_s)
    decoded_s = np.nansum(results[0]["latencies"]) - waited_s
    assert decodes.sum() * width_s == pytest.approx(decoded_s, abs=5 * width_s)
    assert np.nanmin(steps) == pytest.approx(50.0)
    assert np.nanmax(steps) == pytest.approx(50.0)


def test_one_rate_has_no_curve_and_the_late_have_a_table(tmp_path: Path) -> None:
    results = [run_result("sola", 2.0, (0.1, 0.9, float("nan")))]
    found = Report(html.write(results, tmp_path / "report.html"))

    assert "Attainment over rate" not in found.text
    late = found.tables[1]
    assert [row[1] for row in late[1:]] == ["2", "1"]  # the one without an answer first
    assert (late[1][5], late[1][-1]) == ("", "lost")
    assert (late[2][5], late[2][-1]) == ("900", "")


def test_many_requests_are_thinned_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "MOST_POINTS", 10)
    results = [run_result("sola", 2.0, [0.1] * 35)]
    trace = Report(html.write(results, tmp_path / "report.html")).figures["figure-0"]["data"][0]

    assert len(trace["x"]) == 9
    assert trace["name"].endswith("9 of 35 shown")


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    name = '</script><b title="x">&amp;'
    figure = Figure(name, [{"name": name, "x": [float("nan")]}], {})
    parts = [name, Table((name,), [[name]]), figure, Lines([name])]
    found = Report(page.write(tmp_path / "a.html", name, [Section(name, parts)]))

    assert found.problems == []
    assert found.text.count(name) == 9
    assert found.figures["figure-0"]["data"] == [{"name": name, "x": [None]}]


def test_without_plotly_nothing_runs_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    argv = ["--backend", "sim", "--result-dir", str(tmp_path), "--html", str(tmp_path / "a.html")]

    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: '--html' needs plotly")
    assert shown.err.rstrip().endswith("pip install 'sola-sched[html]'.")
    assert not shown.out


@pytest.mark.vllm
def test_the_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "new" / "report.html"
    argv = ["--backend", "sim", "--schedulers", "stock:512", "sola", "--request-rate", "4",
            "--num-prompts", "8", "--slo", "ttft:500", "tpot:50", "--disable-tqdm",
            "--no-save-result", "--html", str(path)]  # fmt: skip

    assert main(argv) == 0
    assert f"Report {path}." in capsys.readouterr().out
    found = Report(path)
    assert found.problems == []
    assert [row[0] for row in found.tables[-1] if row[0].startswith("version of")]


@pytest.mark.parametrize(("scheme", "ground"), [("light", _WHITE), ("dark", _DARK)])
def test_a_browser_draws_all_of_it_without_a_network(
    report: Path, tmp_path: Path, scheme: str, ground: str
) -> None:
    async def look() -> None:
        async with browser(tmp_path / "browser") as tab:
            await tab.open(report, scheme=scheme)
            assert await tab.value("getComputedStyle(document.body).backgroundColor") == ground
            ink = await tab.value("getComputedStyle(document.querySelector('.xtick text')).fill")
            assert ink == await tab.value("getComputedStyle(document.body).color")
            drawn = "document.querySelectorAll('.figure .scatterlayer').length"
            assert await tab.value(drawn) == 1 + 2 + 2 * 4
            assert tab.errors == []
            assert [url for url in tab.requested if not url.startswith(("file:", "data:"))] == []

    asyncio.run(look())


def test_a_phone_shows_it_without_scrolling_sideways_and_keys_reach_all(
    report: Path, tmp_path: Path
) -> None:
    async def look() -> None:
        async with browser(tmp_path / "browser") as tab:
            await tab.open(report, width=_PHONE_PX)
            assert await tab.value("document.documentElement.scrollWidth") <= _PHONE_PX
            widest = "Math.max(...[...document.querySelectorAll('.svg-container')].map(e => "
            assert await tab.value(f"{widest}e.getBoundingClientRect().right))") <= _PHONE_PX
            # The buttons would lie upon the legend.
            assert await tab.value("document.querySelector('.modebar').offsetHeight") == 0
            await tab.press("Tab")
            await tab.press("Tab")
            await tab.press("Enter")
            assert await tab.value("location.hash") == "#part-1"
            reached = set()
            for _ in range(60):
                await tab.press("Tab")
                reached.add(await tab.value("document.activeElement.tagName"))
            assert {"A", "DIV", "SUMMARY"} <= reached  # links, wide tables, folded tables

    asyncio.run(look())
