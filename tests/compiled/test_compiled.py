"""Where machine code is kept, and that what is compiled does what the source says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sola_sched.compiled import kept_code

HELPERS = Path(__file__).parents[1] / "helpers"

#: Prints what 150 random states are planned to, three after another by each planner.
_PLANS = """
import numpy as np
from random_states import random_builder
from states import as_lists, make_attain

for seed in range(50):
    rng = np.random.default_rng(seed)
    planner = make_attain(
        best_effort_share=0.05 * (seed % 2), overload=("defer", "reject")[seed // 2 % 2]
    )
    for _ in range(3):
        print(as_lists(planner.plan(random_builder(rng, 1 + seed % 3).build())))
"""


def test_machine_code_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept_code._digest()
    (tmp_path / "planner" / "attain").mkdir(parents=True)
    source = tmp_path / "planner" / "attain" / "tuning.py"
    source.write_text("near = 0.5")
    monkeypatch.setattr(kept_code, "_PACKAGE", tmp_path)
    digest = kept_code._digest()
    source.write_text("near = 0.7")

    assert len({before, digest, kept_code._digest()}) == 3
    source.write_text("near = 0.5")
    assert kept_code._digest() == digest


def test_functions_work_where_nothing_can_be_kept(tmp_path: Path) -> None:
    code = "from sola_sched.core.state import RequestTable; print(RequestTable().add('r'))"
    (tmp_path / "file").touch()

    assert run(code, XDG_CACHE_HOME=str(tmp_path / "file")) == "0\n"


def test_plans_are_the_same_compiled_and_as_they_stand() -> None:
    plans = run(_PLANS)

    assert len(plans.splitlines()) == 150
    assert run(_PLANS, NUMBA_DISABLE_JIT="1") == plans


def run(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HELPERS), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stderr
    return done.stdout
