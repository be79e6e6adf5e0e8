"""Files that other processes read meanwhile."""

from __future__ import annotations

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file that nobody sees half written."""
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.rename(path)
