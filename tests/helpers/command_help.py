"""What a command's `--help` says."""

from __future__ import annotations

import re


def assert_explained(text: str) -> None:
    """Every option and argument that the help lists has words after its name."""
    entries = re.split(r"^  (?=\S)", text.partition("\n\n")[2], flags=re.M)[1:]
    assert entries
    for entry in entries:
        name, _, words = " ".join(entry.split("\n", 1)).strip().partition("  ")
        assert words.strip(), f"{name} is not explained"
