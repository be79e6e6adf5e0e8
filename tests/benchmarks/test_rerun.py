"""Ours made again and the others as they are stored; and what the table says of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from harness import command, resumable, sweep
from harness.points import BOUND, SYNTHETIC, Point
from simulation import tables

pytestmark = pytest.mark.vllm

POINTS = [
    Point("llama-3-8b-a100", SYNTHETIC, 2.0, 1.0, 0.1, name)
    for name in ("stock:512", "stock:2048", "sola", BOUND)
]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A source that changes: its name is in each key, its value in each row that it makes."""
    state: dict[str, Any] = {"name": "old", "made": []}

    def run_point(point: Point, data: Path | None = None) -> dict[str, Any]:
        state["made"].append(point.scheduler)
        row = {"attainment": 0.5 if state["name"] == "old" else 0.75}
        return asdict(point) | row | {"cpu_us_per_step": 0.0, "num_steps": 1, "duration_s": 1.0}

    monkeypatch.setattr(sweep, "run_point", run_point)
    monkeypatch.setattr(sweep, "key_of", lambda p: f"{state['name']} {p.scheduler} {p.seed}")
    return state


def test_only_the_named_schedulers_are_run_again(source: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sweep.run(POINTS, path, is_hidden=True)
    source["name"], source["made"] = "new", []

    rows = sweep.run(POINTS, path, is_hidden=True, rerun=("sola",))

    assert source["made"] == ["sola"]
    assert [(row["scheduler"], row["attainment"]) for row in rows] == [
        ("stock:512", 0.5), ("stock:2048", 0.5), ("sola", 0.75),
    ]  # fmt: skip
    assert [row["bound"] for row in rows] == [0.5] * 3


def test_points_without_a_row_are_run_whatever_is_named(
    source: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    sweep.run(POINTS[:1], path, is_hidden=True)
    source["name"], source["made"] = "new", []

    sweep.run([POINTS[0], replace(POINTS[0], seed=1)], path, is_hidden=True, rerun=("sola",))

    assert source["made"] == ["stock:512"]
    assert [row["seed"] for row in resumable.load(path)] == [0, 1]


def test_without_names_every_stale_row_is_made_again(
    source: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    sweep.run(POINTS, path, is_hidden=True)
    source["name"], source["made"] = "new", []

    sweep.run(POINTS, path, is_hidden=True)

    assert source["made"] == [point.scheduler for point in POINTS]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"sola": "aaaaaaaaaaaa", "stock:512": "bbbbbbbbbbbb"}, "aaaaaaa (sola), bbbbbbb (others)"),
        ({"sola": "aaaaaaaaaaaa", "stock:512": "aaaaaaaaaaaa"}, "aaaaaaa"),
        ({"sola": "aaaaaaaaaaaa", "sola:policy=paper": "bbbbbbbbbbbb"},
         "aaaaaaa (sola), bbbbbbb (others)"),
        ({"sola:tile=16": "aaaaaaaaaaaa"}, "aaaaaaa"),
        ({"stock": ""}, ""),
    ],
)  # fmt: skip
def test_a_table_says_which_commit_made_ours_and_which_the_others(
    made: dict[str, str], said: str
) -> None:
    rows = [{"scheduler": name, "commit": commit} for name, commit in made.items()]

    assert command.commits(rows) == said


def test_each_rule_counts_at_the_setting_that_attains_most() -> None:
    shares = {"stock:512": 0.2, "stock:2048": 0.4, "reject:512": 0.7, "reject:2048": 0.6,
              "sola": 0.9}  # fmt: skip
    rows = [
        {"scheduler": name, "attainment": share, "rate_per_s": 3.0, "mean_ttft_s": 1.0,
         BOUND: 1.0}
        for name, share in shares.items()
    ]  # fmt: skip

    lines = tables.rule_lines(rows, "data", 2.0, ("reject", "sola"))

    assert lines == [
        ["data", "1.50", "3", "40.0 (2048)", "70.0 (512)", "90.0", "100.0", "0.90"],
    ]  # fmt: skip
