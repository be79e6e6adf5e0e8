"""How long a server takes until it answers: what is compared with what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from serving.cost import STOCK
from serving.start import STARTS, table

pytestmark = pytest.mark.vllm


def rows(variant: str, ready_s: list[float]) -> list[dict[str, Any]]:
    return [
        {"variant": variant, "round": number, "ready_s": each, "first_s": 0.1 * (number + 1),
         "run": 1, "vllm": "0.32.0", "cpu": "C", "num_cores": 2}
        for number, each in enumerate(ready_s)
    ]  # fmt: skip


def test_a_start_is_compared_with_that_of_stock_in_the_same_round() -> None:
    made = rows(STOCK, [30.0, 50.0, 40.0])
    for name, added_s in zip(list(STARTS)[1:], (1.0, 2.0, 9.0, 12.0), strict=True):
        made += rows(name, [30.0 + added_s, 50.0 - added_s, 40.0 + added_s])

    lines = table(made).splitlines()

    assert "| vLLM | 3 | 40.0 |  | 0.20 |" in lines
    assert "| compiled before | 3 | 41.0 | +1.0 (-1.0 to +1.0) | 0.20 |" in lines
    assert "| the same, home read-only | 3 | 42.0 | +3.0 (-3.0 to +3.0) | 0.20 |" in lines


def test_nothing_is_compiled_yet_where_the_folder_is_new_or_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sola_sched.compiled import kept_code

    for name in ("nothing compiled yet", "the same, home read-only"):
        for key, value in STARTS[name].environment(tmp_path / name).items():
            monkeypatch.setenv(key, value)
        (tmp_path / name).mkdir()
        monkeypatch.setattr(kept_code.tempfile, "tempdir", None)
        found = kept_code.folder.__wrapped__()
        assert found.is_relative_to(tmp_path / name), name
        assert not any(found.iterdir())
        monkeypatch.undo()
    assert "VLLM_CACHE_ROOT" in STARTS[STOCK].environment(tmp_path), "kept for all"
    assert STARTS[STOCK].environment(tmp_path).get("XDG_CACHE_HOME") is None
