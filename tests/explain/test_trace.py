"""The timeline of recorded requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fates import a_fate

from sola_sched.explain.cli import main
from sola_sched.explain.source import Window
from sola_sched.explain.trace import events, write

LATE = a_fate(
    "late", "chat", end="missed", arrival_s=10.0, started_s=13.0, first_token_s=13.5,
    last_token_s=15.0, ended_s=15.0, lost_s=10.75,
)  # fmt: skip
BESIDE = a_fate("beside", "chat", arrival_s=11.0, started_s=11.0, first_token_s=12.0,
                last_token_s=12.5, ended_s=12.5)  # fmt: skip
_NEVER = float("nan")
REFUSED = a_fate(
    "refused", "job", end="rejected", arrival_s=12.0, started_s=_NEVER, first_token_s=_NEVER,
    last_token_s=_NEVER, ended_s=12.25, num_output=0,
)  # fmt: skip


def spans(found: list[dict[str, Any]], name: str) -> list[tuple[int, int, int, int]]:
    return [
        (each["pid"], each["tid"], each["ts"], each["dur"])
        for each in found
        if each["ph"] == "X" and each["name"] == name
    ]


def test_a_request_has_its_wait_prompt_and_decodes_one_after_another() -> None:
    found = list(events([REFUSED, LATE, BESIDE]))

    assert spans(found, "late") == [(0, 0, 0, 5_000_000)]
    assert (0, 0, 0, 3_000_000) in spans(found, "waits")
    assert (0, 0, 3_000_000, 500_000) in spans(found, "prompt")
    assert (0, 0, 3_500_000, 1_500_000) in spans(found, "decodes")
    assert [each["ts"] for each in found if each["name"] == "given up"] == [750_000]


def test_requests_that_overlap_have_rows_of_their_own_and_classes_processes() -> None:
    found = list(events([REFUSED, LATE, BESIDE]))

    assert spans(found, "beside") == [(0, 1, 1_000_000, 1_500_000)]
    assert spans(found, "refused") == [(1, 0, 2_000_000, 250_000)]
    names = {each["pid"]: each["args"]["name"] for each in found if each["ph"] == "M"}
    assert names == {0: "class chat", 1: "class job"}


def test_those_that_wait_and_run_are_counted_until_none_is_left() -> None:
    counts = [each["args"] for each in events([REFUSED, LATE, BESIDE]) if each["ph"] == "C"]

    assert {"waiting": 2, "running": 1} in counts
    assert counts[-1] == {"waiting": 0, "running": 0}
    assert list(events([])) == []


def test_the_command_writes_it(tmp_path: Path, capsys: Any) -> None:
    window, trace = tmp_path / "window.json", tmp_path / "trace.json"
    engine = {"engine_args": {"max_num_seqs": 8}, "options": {"ttft_s": 1.0}}
    window.write_text(json.dumps(Window([LATE, BESIDE], engine).to_json()))

    assert main([str(window), "--trace", str(trace)]) == 0

    assert f"Timeline {trace}: open it in https://ui.perfetto.dev." in capsys.readouterr().out
    assert json.loads(trace.read_text()) == {"traceEvents": list(events([LATE, BESIDE]))}
    assert write([], trace) == trace


def test_a_timeline_that_cannot_be_written_is_found_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nothing.json"), "--trace", str(tmp_path)]) == 2
    assert "'--trace' must name a file that can be written" in capsys.readouterr().err
