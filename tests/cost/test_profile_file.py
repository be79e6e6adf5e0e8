"""The profile file: what is kept, and what is refused."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from step_costs import (
    TRUTH,
    make_model,
)

from sola_sched.cost.model import CostModel
from sola_sched.errors import ProfileError


def test_profile_round_trip_keeps_predictions_and_provenance(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = make_model()

    model.save(path, meta={"machine": "a100", "error": 0.05})
    loaded = CostModel.load(path, alpha=0.5)

    assert loaded.coefficients == TRUTH
    assert loaded.is_ready
    assert loaded.meta == {"machine": "a100", "error": 0.05}
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    make_model().save(path, meta={})
    before = path.read_text()

    with pytest.raises(TypeError):
        make_model().save(path, meta={"bad": object()})

    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_unfitted_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="must have been fitted"):
        CostModel().save(tmp_path / "profile.json", meta={})


def _scale(document: dict[str, Any], factor: float) -> None:
    for entry in document["coefficients"].values():
        entry["value"] *= factor


def _change(document: dict[str, Any], name: str, value: Any) -> None:
    document["coefficients"][name]["value"] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "'format' must be"),
        (lambda d: d.update(version=99), "'version' must be 1"),
        (lambda d: d.update(coefficients=[]), "'coefficients' must hold"),
        (lambda d: d["coefficients"].pop("c0"), "'coefficients' must hold"),
        (lambda d: d["coefficients"]["c0"].update(unit="ms"), "'c0' must be in s/token"),
        (lambda d: d["coefficients"].update(c0=1.0), "'c0' must be in s/token"),
        (lambda d: d.update(meta=3), "'meta' must be an object"),
        (lambda d: _change(d, "c0", -1.0), "'c0' must be finite and >= 0"),
        (lambda d: _change(d, "c0", math.nan), "'c0' must be finite and >= 0"),
        (lambda d: _change(d, "c0", None), "'c0' must be finite and >= 0"),
        (lambda d: _change(d, "c0", True), "'c0' must be finite and >= 0"),
        (lambda d: _change(d, "overlap", 1.0), "'overlap' must not exceed"),
        (lambda d: _scale(d, 0.0), r"one decode must take 1e-06 to 30 s \(got 0 s\)"),
        (lambda d: _scale(d, 1e-5), r"one decode must take 1e-06 to 30 s \(got 9.05\d*e-08 s\)"),
        (lambda d: _scale(d, 1e4), r"one decode must take 1e-06 to 30 s \(got 90.501 s\)"),
        (lambda d: _change(d, "d0", 31.0), "one prompt token must take 1e-06 to 30 s"),
        (lambda d: _change(d, "c0", 5.0), r"a prompt of 1,000 tokens must take 1e-06 to 3600 s"),
    ],
)
def test_wrong_profile_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    make_model().save(path, meta={})
    document = json.loads(path.read_text())

    change(document)
    path.write_text(json.dumps(document))

    with pytest.raises(ProfileError, match=message):
        CostModel.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_damaged_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)

    with pytest.raises(ProfileError, match=r"profile\.json"):
        CostModel.load(path)


def test_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"missing\.json"):
        CostModel.load(tmp_path / "missing.json")
