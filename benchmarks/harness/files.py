"""Files that other processes read meanwhile."""

from __future__ import annotations

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """As `replace_bytes`, in UTF-8."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file that nobody sees half written."""
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    beside.rename(path)
