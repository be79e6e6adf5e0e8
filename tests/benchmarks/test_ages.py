"""Which tables are of the policy as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.ages import ages, changed_since, commits


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("Commit of the rows: 07cb61d (sola), 7522cb9 (others).", ["07cb61d"]),
        ("Commit of the rows: 24785bf, 6963beb.", ["24785bf", "6963beb"]),
        ("Commit of the rows: not told (they are of the policy of commit b5fd42f or older).", []),
        ("`python benchmarks/run.py services`, commit 7522cb993196.", ["7522cb993196"]),
        ("| a | table |", []),
    ],
)
def test_a_table_tells_the_commits_of_our_rows_in_its_first_line(
    head: str, told: list[str]
) -> None:
    assert commits(f"{head}\n\n| rows | 1234567 |") == told


def test_a_table_is_old_once_the_policy_has_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b@c"]
        return subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(path: str, text: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        git("add", "-A")
        git("commit", "-qm", text)
        return git("rev-parse", "--short=7", "HEAD")

    git("init", "-q")
    old = commit("sola_sched/core/state.py", "old")
    new = commit("sola_sched/core/state.py", "new")
    commit("docs/page.md", "words")
    (tmp_path / "a.md").write_text(f"Commit of the rows: {new}.")
    (tmp_path / "b.md").write_text(f"Commit of the rows: {new}, {old}.")
    (tmp_path / "c.md").write_text("| no | head |")

    assert not changed_since(new, tmp_path)
    assert changed_since("0123456", tmp_path)
    takes = dict.fromkeys(("a", "b", "c", "d"), "5 min")
    lines = ages(tmp_path, tmp_path, takes).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["b", "c", "d", "a"]
    assert [line.split(" | ")[2] for line in lines] == ["older", "not told", "not told", "present"]
    assert lines[0].endswith("| 5 min |")
