"""`run.py release`: the tables of a release that are of an older policy, each by a command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import ages, release
from harness.command import Experiment
from harness.options import Refused


def experiment(name: str, options: Sequence[str] = (), in_release: bool = True) -> Experiment:
    return Experiment(name, "", "5 min", "", options, in_release=in_release)


EXPERIMENTS = (
    experiment("load", ("data", "workers", "rerun")),
    experiment("present", ("workers",)),
    experiment("start"),
    experiment("once", in_release=False),
    experiment("mixed", ("workers", "seeds")),
)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The arguments of each command that is run; the one of `start` fails."""
    ran: list[list[str]] = []

    def run(words: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert words[:2] == [sys.executable, "run.py"]
        ran.append(words[2:])
        return subprocess.CompletedProcess(words, int(words[2] == "start"))

    monkeypatch.setattr(sys, "argv", ["run.py", "release"])
    monkeypatch.setattr(release.subprocess, "run", run)
    monkeypatch.setattr(ages, "changed_since", lambda commit, root: commit != "1234567")
    (tmp_path / "present.md").write_text("Commit of the rows: 1234567.")
    (tmp_path / "mixed.md").write_text("Commit of the rows: 1234567, 89abcde.")
    return ran


def test_each_older_table_is_made_and_a_failure_stops_no_other(
    commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--workers", "2", "--data", str(tmp_path)]

    assert release.make(EXPERIMENTS, argv, tmp_path, tmp_path) == 1

    assert commands == [
        ["load", "--data", str(tmp_path), "--workers", "2", "--rerun", "sola"],
        ["start"],
        ["mixed", "--workers", "2"],
    ]
    said = capsys.readouterr()
    assert "3 of 3: mixed, about 5 min" in said.out
    assert "2 of 3 tables made." in said.out
    assert said.err == "Failed: start.\n"


def test_some_of_them(commands: list[list[str]], tmp_path: Path) -> None:
    assert release.make(EXPERIMENTS, ["--only", "mixed", "present"], tmp_path, tmp_path) == 0

    assert commands == [["mixed", "--workers", "1"]]


def test_one_that_is_in_no_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"some of load, present, start, mixed \(got 'once'\)"):
        release.make(EXPERIMENTS, ["--only", "once"], tmp_path, tmp_path)
