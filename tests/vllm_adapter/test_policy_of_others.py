"""The example of a policy in virtual time, by its installed name and by its path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from installed_policy import EXAMPLES, installed_policy
from tiny_sim import busy_workload, make_backend

from sola_sched.bench.backends.base import RunOutcome, parse_scheduler
from sola_sched.config.slo import SloTarget

pytestmark = pytest.mark.vllm

EDF = "edf_policy:EarliestDeadlineFirst"
#: What the tiny engine can give some of the requests of a busy workload.
SLO = SloTarget(ttft_s=60.0, tpot_s=4.0)


def run(spec: str) -> RunOutcome:
    return make_backend().run(busy_workload(), parse_scheduler(spec), SLO)


def test_by_its_name_and_by_its_path_it_is_the_same_policy_and_serves_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed_policy(tmp_path, "edf", EDF):
        by_name = run("sola:policy=edf,policy_options.chunk=64")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    by_path = run(f"sola:policy={EDF},policy_options.chunk=64")
    assert all(record.completed for record in by_name.records)
    assert by_name.records == by_path.records


def test_its_options_reach_it(tmp_path: Path) -> None:
    with installed_policy(tmp_path, "edf", EDF):
        short, long = (run(f"sola:policy=edf,policy_options.chunk={n}") for n in (16, 96))
    assert short.scheduler is not None
    assert long.scheduler is not None
    assert short.scheduler.num_steps > long.scheduler.num_steps
