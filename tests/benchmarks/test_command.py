"""`benchmarks/run.py`: one list of experiments, options that each takes or refuses, its table."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import command, options
from harness.command import Experiment, main
from harness.setup import Outcome, Setup
from registry import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


def echo(setup: Setup) -> Outcome:
    """An experiment whose table tells what it was asked for."""
    row = {"requests": setup.num_requests, "seeds": list(setup.seeds), "commit": "0123456789ab"}
    return Outcome([row, {}], json.dumps(row))


ECHO = Experiment(
    "echo", "tells its options", "1 s", f"{__name__}:echo", ("seeds", "num_requests", "quick"),
    "echo.jsonl", {"seeds": (0, 1), "num_requests": 500}, in_release=True,
)  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where rows and tables go by default."""
    monkeypatch.setattr(command, "RESULTS", tmp_path / "rows")
    monkeypatch.setattr(command, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(command, "EXPERIMENT_TABLES", tmp_path / "experiments")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[echo.__module__])
    return tmp_path / "rows", tmp_path / "tables"


def test_without_a_name_every_experiment_is_listed_with_its_time() -> None:
    script = str(ROOT / "benchmarks" / "run.py")

    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )  # fmt: skip

    lines = done.stdout.splitlines()[2:]
    assert [line.split()[0] for line in lines] == [*BY_NAME, "tables", "ages", "release"]
    for line, each in zip(lines, EXPERIMENTS, strict=False):
        assert each.duration in line
        assert each.summary in line
        assert len(line) <= 110


@pytest.mark.parametrize("name", BY_NAME)
def test_an_experiment_names_what_there_is(name: str) -> None:
    each = BY_NAME[name]
    pytest.importorskip("vllm")
    pytest.importorskip("faiss")

    for function in filter(None, (each.function, each.figure)):
        module, _, attribute = function.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))
    assert set(each.options) <= set(options.OPTIONS)
    assert set(each.defaults) <= set(each.options)
    assert each.arguments([])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["echoes"], "there is no experiment 'echoes'"),
        (["echo", "--data", "x"], "'echo' has no use for --data; it takes --seeds,"),
        (["echo", "--plots=x"], "'echo' has no use for --plots;"),
        (["echo", "--sedes", "1"], "'echo' knows no '--sedes'; it takes --seeds,"),
        (["alise-waits", "--stored"], "'alise-waits' has no use for --stored;"),
        (["load", "--data", "no-folder"], "--data must be a folder (got 'no-folder')"),
        (["fig7", "--stored", "--only", "GPT"], "'--only' must name some of Llama3-8B,"),
        (["tables", "--seeds", "1"], "'tables' has no use for --seeds; it takes no options"),
    ],
)
def test_what_an_experiment_has_no_use_for_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if argv[0] in ("load", "fig7"):
        pytest.importorskip("vllm")

    assert main([ECHO, *EXPERIMENTS], argv) == 2

    assert said in capsys.readouterr().err


def test_a_table_is_kept_when_its_options_are_those_by_default(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([ECHO], ["echo", "--seeds", "0", "1"]) == 0

    heading, empty, table = (folders[1] / "echo.md").read_text().splitlines()
    assert heading == (
        "`python benchmarks/run.py echo`, the table again from its 2 rows with `--stored`. Commit "
        "of the rows: 0123456; 1 rows tell none."
    )
    assert empty == ""
    assert json.loads(table)["requests"] == 500
    assert str(folders[1] / "echo.md") in capsys.readouterr().out


def test_a_table_of_other_options_is_printed_and_not_kept(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([ECHO], ["echo", "--seeds", "2"]) == 0

    assert '"seeds": [2]' in capsys.readouterr().out
    assert not (folders[1] / "echo.md").exists()


def test_quick_runs_are_small_and_lie_beside_their_rows(folders: tuple[Path, Path]) -> None:
    assert main([ECHO], ["echo", "--quick"]) == 0

    assert not folders[1].exists()
    assert '"requests": 60' in (folders[0] / "echo-quick.md").read_text()


def test_results_elsewhere_have_their_table_there(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    assert main([ECHO], ["echo", "--results", str(tmp_path / "mine")]) == 0

    assert (tmp_path / "mine" / "echo.md").is_file()
    assert not folders[1].exists()


def test_tables_makes_those_whose_rows_are_there(folders: tuple[Path, Path]) -> None:
    other = dataclasses.replace(ECHO, name="other", rows="other.jsonl")
    folders[0].mkdir()
    (folders[0] / "echo.jsonl").touch()

    assert main([ECHO, other], ["tables"]) == 0

    assert [path.name for path in folders[1].iterdir()] == ["echo.md"]


def test_the_table_of_an_experiment_that_is_in_no_release_lies_apart(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    once = dataclasses.replace(ECHO, name="once", in_release=False)

    assert main([ECHO, once], ["once"]) == 0

    assert (tmp_path / "experiments" / "once.md").is_file()
    assert not folders[1].exists()


def test_every_table_belongs_to_an_experiment_and_lies_where_that_puts_it() -> None:
    for folder in (command.TABLES, command.EXPERIMENT_TABLES):
        kept = {path.stem for path in folder.glob("*.md")}
        assert kept <= {name for name, each in BY_NAME.items() if each.tables == folder}
