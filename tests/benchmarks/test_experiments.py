"""Experiments in virtual time: what they run, and the tables made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from marks import LONG

pytest.importorskip("vllm")

from alise import experiments as alise
from harness import provenance
from harness.command import main
from harness.points import SYNTHETIC, Point
from harness.setup import Setup
from registry import EXPERIMENTS
from simulation import setups, tables

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("name", "head", "num_lines"),
    [
        pytest.param("table4", "| model | scheduler | req/s |", 7, marks=LONG),
        pytest.param(
            "benefit",
            "| model, SLO | load | req/s | best stock | peak memory alone |",
            3,
            marks=LONG,
        ),
        ("cost", "| model | data | req/s |", 3),
        pytest.param("mechanisms", "| without | low load |", 7, marks=pytest.mark.slow),
        pytest.param("hindsight", "| data | load | req/s | sola |", 3, marks=LONG),
    ],
)
def test_experiments_run_without_data(
    name: str,
    head: str,
    num_lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SOLA_SCHED_DATA", str(tmp_path / "none"))
    argv = [name, "--quick", "--num-requests", "20", "--results", str(tmp_path)]

    assert main(EXPERIMENTS, argv) == 0

    heading, _, *table = (tmp_path / f"{name}-quick.md").read_text().splitlines()
    assert heading.startswith(f"`python benchmarks/run.py {name}`")
    assert provenance.checkout()[0][:7] in heading
    assert table[0].startswith(head)
    assert len(table) == num_lines
    assert main(EXPERIMENTS, [*argv, "--stored"]) == 0
    assert (tmp_path / f"{name}-quick.md").read_text().splitlines() == [heading, "", *table]
    assert "\n".join(table) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("half", "expected"), [(4.0, 3.21), (0.2, 0.0), (40.0, math.inf)], ids=["in", "below", "above"]
)
def test_the_rate_at_a_level_is_bracketed_and_bisected(
    half: float, expected: float, tmp_path: Path
) -> None:
    """Attainment falls as 1 / (1 + (rate / half)^10), which is 0.9 at 0.803 half."""
    tried: list[float] = []

    class Made(Setup):
        def rows(self, points: Iterable[Point], title: str) -> list[dict[str, Any]]:
            rows = [asdict(point) for point in points]
            tried.extend({row["rate_per_s"] for row in rows})
            for row in rows:
                whole = 1.0 / (1.0 + (row["rate_per_s"] / half) ** 10)
                row["attainment"] = whole * (0.9 if row["scheduler"] == "worse" else 1.0)
                row["attainment"] += 0.05 * (row["seed"] - 1) * whole
            return rows

    setup = Made(None, tmp_path / "rows.jsonl", seeds=(0, 1, 2))
    base = Point("llama-3-8b-a100", SYNTHETIC, 1.0, 1.0, 0.1, "stock")
    schedulers, rates = ("worse", "better"), [1.0, 2.0, 3.0, 4.0, 6.0]
    rate, rows = setups.rate_at(setup, base, schedulers, 0.9, rates)
    assert rate == pytest.approx(expected, rel=0.02)
    assert len(tried) == len(set(tried)) <= 5
    assert len(rows) == 6 * len(tried)


def test_load_one_is_found_without_the_settings_that_came_later(tmp_path: Path) -> None:
    """A setting that attains all would raise the rate, and with it every load that is stored."""
    tried: set[str] = set()

    class Made(Setup):
        def rows(self, points: Iterable[Point], title: str) -> list[dict[str, Any]]:
            rows = [asdict(point) for point in points]
            for row in rows:
                tried.add(row["scheduler"])
                row["attainment"] = float(row["rate_per_s"] <= 4.0)
            return rows

    base = Point("llama-3-8b-a100", SYNTHETIC, 0.0, 1.0, 0.1, "stock")
    point = setups.at_stock_rate(Made(None, tmp_path / "rows.jsonl"), base)

    assert point.rate_per_s == pytest.approx(4.0, rel=0.06)
    assert tried == {"stock:512", "stock:2048", "stock:8192"}
    assert tried < set(setups.STOCK)


@pytest.mark.parametrize(
    ("stock", "ours", "expected"),
    [(2.0, 3.0, "1.50"), (2.0, math.inf, "> 3.00"), (0.0, 3.0, "-"), (math.inf, math.inf, "-")],
)
def test_the_ratio_of_rates_says_what_lies_beyond_them(
    stock: float, ours: float, expected: str
) -> None:

    line = tables.level_line("data", 10.0, 0.9, stock, ours, highest=6.0)

    assert (line[:3], line[-1]) == (["data", "10", "90%"], expected)


@pytest.mark.parametrize("is_quick", [False, True])
def test_every_experiment_of_alise_has_runs(is_quick: bool) -> None:
    for runs in (alise.rates_runs, alise.seeds_runs, alise.wrong_runs, alise.aging_runs):
        assert runs([], is_quick)
