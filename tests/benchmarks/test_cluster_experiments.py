"""Experiments with many engines in virtual time: they run, and tell the fast model's error."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from marks import LONG

pytest.importorskip("vllm")

from cluster import aladdin
from cluster.cases import Case
from cluster.fast_error import error_of
from harness.command import main
from harness.resumable import Row
from harness.setup import Setup
from registry import EXPERIMENTS

pytestmark = pytest.mark.vllm
_CASE = Case("1*llama-3-8b@a100:1", "stock:512", "combined", "none", 4.0, 1.0, 0.06)


@pytest.mark.parametrize(
    ("name", "head", "num_lines", "rests_on_fast"),
    [
        pytest.param("aladdin", "| testbed, model | req/s | engines |", 4, True, marks=LONG),
        pytest.param("gpus", "| testbed, model | req/s |", 4, True, marks=LONG),
        pytest.param("decode", "| testbed, model | req/s |", 4, True, marks=LONG),
        ("deployment", "| link | t | instances |", 8, True),
        pytest.param(
            "unequal",
            "| cluster | req/s | round robin, tokens/s |",
            4,
            True,
            marks=pytest.mark.slow,
        ),
        ("combined", "| workload | engines | req/s |", 2, True),
        pytest.param("predictions", "| workload | engines |", 6, True, marks=LONG),
        pytest.param("day", "| scaling | attained, % |", 8, True, marks=LONG),
        ("gap", "| binds | cases |", 3, False),
        ("placing", "| requests/s | instances |", 2, False),
        ("scale", "| instances | requests/s |", 2, False),
        pytest.param("fast", "| cluster | scheduler |", 2, False, marks=pytest.mark.slow),
        pytest.param("checked", "| workload | engines |", 2, False, marks=LONG),
    ],
)
def test_cluster_experiments_run_without_data(
    name: str,
    head: str,
    num_lines: int,
    rests_on_fast: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOLA_SCHED_DATA", str(tmp_path / "none"))
    only = {"aladdin": "V100, Llama2-7b", "unequal": "V100 t=4, t=1", "combined": "mixed GPUs"}
    argv = [f"cluster-{name}", "--quick", "--results", str(tmp_path)]
    argv += ["--only", only[name]] if name in only else []
    if name == "predictions":
        argv += ["--only", "equal"]

    assert main(EXPERIMENTS, argv) == 0

    _, *text = (tmp_path / f"cluster-{name}-quick.md").read_text().splitlines()
    table = [line for line in text if line.startswith("|")]
    assert table[0].startswith(head)
    assert len(table) == 2 + num_lines
    assert any("fast engine model" in line for line in text) == rests_on_fast


def _setup(tmp_path: Path, *rows: Row) -> Setup:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Setup(None, path)


def test_the_error_is_that_of_the_same_cases_with_real_schedulers(tmp_path: Path) -> None:
    fast = asdict(_CASE) | {"attainment": 0.9}
    real = asdict(_CASE) | {"attainment": 0.96, "is_real": True}
    alone = real | {"seed": 7, "attainment": 0.1}
    sola = [row | {"scheduler": "sola:8192", "attainment": 1.0} for row in (fast, real)]

    text = error_of(_setup(tmp_path, {"scaler": "fixed:3"}, fast, real, alone, *sola))

    assert "vLLM -6.0 points on average, 6.0 at most (1 runs)" in text
    assert "`sola_sched` +0.0 points on average" in text
    assert "not measured" in error_of(_setup(tmp_path, fast, alone))


@pytest.mark.parametrize(("needed", "found"), [(1, 2), (9, 9), (90, 90), (96, 96), (97, None)])
def test_gpus_are_searched_up_to_the_number_that_the_table_says(
    needed: int, found: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows_of(setup: Setup, cases: list[Case], title: str) -> list[Row]:
        return [{"attainment": float(int(case.cluster.split("*")[0]) >= needed)} for case in cases]

    monkeypatch.setattr(aladdin, "rows_of", rows_of)

    number = aladdin._fewest(Setup(None, tmp_path / "none"), _CASE, [])

    assert number is None if found is None else number is not None
    if number is not None:
        assert needed <= number <= max(2, needed + needed // 16 + 1)
