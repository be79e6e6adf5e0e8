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

#: Prints what cost models know after random steps, learned from live ones alone and given.
_COSTS = """
import numpy as np
from step_costs import make_model, random_steps

from sola_sched.cost.model import CostModel

for seed in range(8):
    rng = np.random.default_rng(seed)
    model = make_model() if seed % 2 else CostModel()
    for noise in rng.permutation((0.05, 0.3, 1.5)):
        for shape, time_s in random_steps(rng, 200, slowdown=rng.uniform(0.3, 3.0), noise=noise):
            print(model.step_s(shape))
            model.observe(shape, time_s)
            print(model.gamma, model.coefficients, model.mean_abs_error, model.is_ready)
"""

#: Prints what a monitor knows after random events.
_EVENTS = """
import numpy as np
from monitored import Engine, KINDS_OF_EVENTS

for seed in range(20):
    rng, engine = np.random.default_rng(seed), Engine()
    for _ in range(200):
        getattr(engine, KINDS_OF_EVENTS[rng.integers(len(KINDS_OF_EVENTS))])(int(rng.integers(6)))
        print(engine.look())
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


@pytest.mark.parametrize("code", [_COSTS, _EVENTS], ids=["cost", "monitor"])
def test_what_steps_teach_is_the_same_compiled_and_as_it_stands(code: str) -> None:
    learned = run(code)

    assert len(learned.splitlines()) > 1000
    assert run(code, NUMBA_DISABLE_JIT="1") == learned


def run(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HELPERS), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stderr
    return done.stdout
