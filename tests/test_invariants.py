"""The page of invariants names tests and folders that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PAGE = (_ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
_NAMED = sorted(
    set(re.findall(r"`((?:tests|sola_sched|kv_swap|kernels|length_predictor)/[^`]*)`", _PAGE))
)


def test_every_invariant_has_a_test() -> None:
    rows = [line for line in _PAGE.splitlines() if re.match(r"\| \d+ \|", line)]

    assert [int(row.split("|")[1]) for row in rows] == list(range(1, len(rows) + 1))
    assert all("`tests/" in row for row in rows)


@pytest.mark.parametrize("name", _NAMED)
def test_what_the_page_names_is_there(name: str) -> None:
    path, _, function = name.partition("::")

    assert (_ROOT / path).exists()
    if function:
        assert re.search(rf"^(async )?def {function}\(", (_ROOT / path).read_text(), re.M)
