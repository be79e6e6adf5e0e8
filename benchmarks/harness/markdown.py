"""Markdown of tables."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """A table without a last line break; all columns but the first `num_left` to the right."""
    rule = ["---"] * num_left + ["---:"] * (len(head) - num_left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))
