"""Which tables of a release come from the policy as it is: by the commits that they tell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.markdown import markdown

#: What decides what `sola_sched` does with a request by default.
POLICY = tuple(
    f"sola_sched/{name}" for name in ("planner/attain", "core", "cost", "prediction", "compiled")
)
#: In the order in which they want work.
AGES = ("older", "not told", "present")
_COMMIT = re.compile(r"\b[0-9a-f]{7,12}\b")


def ages(tables: Path, root: Path, durations: Mapping[str, str]) -> str:
    """A line for each table of a release: its commits, and whether the policy has changed since.

    Args:
        tables: Folder of the tables.
        root: Of the checkout.
        durations: How long each experiment of a release takes, by name.
    """
    lines = []
    for name, duration in durations.items():
        found = told_by(tables / f"{name}.md")
        lines.append([name, ", ".join(found), age_of(found, root), duration])
    lines.sort(key=lambda line: AGES.index(line[2]))
    return markdown(("table", "commits of `sola_sched`'s rows", "policy", "takes"), lines)


def age_of(found: Sequence[str], root: Path) -> str:
    """One of `AGES`: of a table whose rows of ours are of these commits."""
    if not found:
        return "not told"
    return "older" if any(changed_since(each, root) for each in found) else "present"


def told_by(table: Path) -> list[str]:
    """The commits that a table tells; none of one that is not there."""
    return commits(table.read_text(encoding="utf-8")) if table.is_file() else []


def commits(text: str) -> list[str]:
    """The commits of our rows, as the first line of a table tells them."""
    told = re.search(r"[Cc]ommit (?:of the rows: )?(.*)", text.partition("\n")[0])
    if told is None or told[1].startswith("not told"):
        return []
    ours = told[1].partition(" (sola)")[0]
    return list(dict.fromkeys(_COMMIT.findall(ours)))


def changed_since(commit: str, root: Path, policy: Sequence[str] = POLICY) -> bool:
    """Whether the policy's sources are others now; a commit that is not known counts as old."""
    done = subprocess.run(
        ["git", "-C", str(root), "diff", "--quiet", commit, "HEAD", "--", *policy],
        capture_output=True, check=False,
    )  # fmt: skip
    return done.returncode != 0
