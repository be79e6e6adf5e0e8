"""The HTML report of `explain`: what became of one request, who was preferred, and of all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from fates import a_fate
from html_report import Report

from sola_sched.explain.cli import main, of_all
from sola_sched.explain.html import write
from sola_sched.explain.source import Window
from sola_sched.reports.reasons import preferred_to, remedies, story, verdict

NONE = float("nan")
_ENGINE: dict[str, Any] = {"engine_args": {"max_num_seqs": 8}, "options": {"ttft_s": 1.0}}


def late_one() -> dict[str, Any]:
    return a_fate(
        "late", "chat", end="missed", started_s=13.0, first_token_s=13.5, last_token_s=15.0,
        ended_s=15.0, waited_s=(2.0, 0.5, 0.0), lost_s=10.75, need_s=0.5, num_overtook=2,
    )  # fmt: skip


def a_window() -> Window:
    """The newest first, as a server tells them."""
    others = [
        a_fate("b", arrival_s=11.0, started_s=12.0, first_token_s=12.5),
        a_fate("a", arrival_s=10.5, started_s=11.0),
        a_fate("before", arrival_s=9.0, started_s=9.0),
        a_fate("behind", arrival_s=10.5, started_s=14.0, first_token_s=14.5, ended_s=16.0),
        a_fate(
            "refused",
            arrival_s=10.5,
            started_s=NONE,
            first_token_s=NONE,
            num_output=0,
            end="rejected",
        ),
    ]
    return Window([*others, late_one()], _ENGINE)


def test_the_report_of_one_says_what_is_printed_and_shows_where_its_time_went(
    tmp_path: Path,
) -> None:
    fate = late_one()
    found = Report(write(a_window(), [fate], "", None, tmp_path / "one.html"))

    assert found.problems == []
    known = a_window().requests
    for sentence in (verdict(fate), *story(fate, known), *remedies(fate, known)):
        assert sentence in found.text
    figure = found.figures["figure-0"]
    spans = {trace["name"]: trace["x"][0] for trace in figure["data"]}
    assert spans == pytest.approx(
        {"waited for a free slot": 2.0, "waited for KV memory": 0.5,
         "waited for other reasons": 0.5, "prompt": 0.5, "decodes": 1.5}
    )  # fmt: skip
    marks = {note["text"]: note["x"] for note in figure["layout"]["annotations"]}
    assert marks == {"TTFT target": 1.0, "first token": 3.5, "given up": 0.75}


def test_waits_after_a_preemption_are_neither_prompt_nor_decodes(tmp_path: Path) -> None:
    """Of 1.2 s after its start 0.45 s are more than its prompt takes on an idle engine."""
    fate = late_one() | {"waited_for_slot_s": 3.7, "num_preemptions": 1}
    found = Report(write(Window([fate], None), [fate], "", None, tmp_path / "one.html"))

    spans = {trace["name"]: trace["x"][0] for trace in found.figures["figure-0"]["data"]}
    assert sum(spans.values()) == pytest.approx(5.0)
    assert spans["prompt"] == pytest.approx(0.05)
    assert spans["decodes"] == pytest.approx(0.75)


def test_those_preferred_are_in_the_order_of_their_starts(tmp_path: Path) -> None:
    window, fate = a_window(), late_one()
    assert [each["request_id"] for each in preferred_to(fate, window.requests)] == ["a", "b"]

    found = Report(write(window, [fate], "", None, tmp_path / "one.html"))
    assert found.tables[0][1:] == [
        ["1", "a", "default", "0.50", "1.00", "200", "1", "yes"],
        ["2", "b", "default", "1.00", "2.00", "200", "1", "yes"],
    ]
    waited, prompt, _ = found.figures["figure-1"]["data"]
    assert waited["base"] == [0.0, 0.5, 1.0]
    assert waited["x"] == [3.0, 0.5, 1.0]
    assert prompt["base"] == [3.0, 1.0, 2.0]


def test_one_that_never_started_and_one_whom_nobody_overtook(tmp_path: Path) -> None:
    refused = a_window().requests[4]
    alone = Window([refused], None)
    found = Report(write(alone, [refused], "", None, tmp_path / "one.html"))

    assert found.problems == []
    assert "None of the requests that are known arrived later" in found.text


def test_the_report_of_all_has_the_numbers_of_the_requests(tmp_path: Path) -> None:
    window = a_window()
    found = Report(write(window, [], of_all(window), None, tmp_path / "all.html"))

    assert found.problems == []
    assert of_all(window).splitlines()[0] in found.text
    assert [row[0] for row in found.tables[0][1:]] == ["refused", "late"]
    in_time, late = found.figures["figure-0"]["data"]
    assert len(in_time["x"]) == 4
    assert late["x"] == pytest.approx([3500.0])
    assert late["y"] == pytest.approx([15.0])
    assert "request late" in late["text"][0]


def test_time_of_a_request_whose_step_times_were_not_known_is_drawn(tmp_path: Path) -> None:
    fate = late_one() | {"alone_s": None, "alone_step_s": None}
    found = Report(write(a_window(), [fate], "", None, tmp_path / "one.html"))

    assert found.problems == []
    assert "idle engine" not in found.text


def test_the_report_of_a_server_where_nothing_has_ended_says_so(tmp_path: Path) -> None:
    window = Window([], None)
    found = Report(write(window, [], of_all(window), None, tmp_path / "none.html"))

    assert found.problems == []
    assert "0 of the last 0 requests missed a target." in found.text


def test_the_replay_and_the_settings_are_in_it(tmp_path: Path) -> None:
    table = [["way", "in time"], ["stock vLLM", "12.0%"], ["sola_sched", "80.0%"]]
    window = a_window()
    found = Report(write(window, [], of_all(window), ("7 requests:", table), tmp_path / "all.html"))

    assert found.tables[1] == table
    assert ["engine_args", '{"max_num_seqs": 8}'] in found.tables[2]


def test_without_plotly_the_extra_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)

    assert main(["/no/such/file", "--html", str(tmp_path / "a.html")]) == 2
    assert "pip install 'sola-sched[html]'" in capsys.readouterr().err
