"""What is kept of an engine's steps on a GPU, and read back where there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from known_steps import make_batch

from fidelity import live_gpu
from fidelity.live_gpu import STEP_COLUMNS, StepLog
from fidelity.live_gpu_report import counts_of, fit, read_steps
from sola_sched.cost.fit import StepShape
from sola_sched.simulator.steps.curves import Batch


class TwoAtOnce:
    """A scheduler whose next step is planned before the one before it has ended."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.requests = {
            "a": SimpleNamespace(num_prompt_tokens=4, num_tokens=5, num_computed_tokens=5)
        }

    def schedule(self) -> Any:
        self.now_s += 0.001
        return SimpleNamespace(num_scheduled_tokens={"a": 1}, scheduled_new_reqs=[])

    def update_from_output(self, output: Any) -> None:
        self.now_s += 0.002


def test_steps_that_overlap_share_no_time() -> None:
    scheduler: Any = TwoAtOnce()
    log = StepLog(scheduler, lambda: scheduler.now_s)

    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.now_s += 0.020
    scheduler.update_from_output(first)
    scheduler.now_s += 0.020
    scheduler.update_from_output(second)

    # The first counts from its own `schedule()`, the second from the end of the first.
    totals_us = [total_us for _, total_us, _, _ in log.steps]
    assert totals_us == pytest.approx([24_000, 22_000])
    assert sum(totals_us) == pytest.approx(1e6 * scheduler.now_s)
    assert [step[2:] for step in log.steps] == [pytest.approx((1_000, 2_000))] * 2


def test_steps_are_read_back_as_they_were(tmp_path: Path) -> None:
    batch = Batch(StepShape(3, 900, 64, 4096.0, 640.0), num_prefills=2, num_new=1)
    path = tmp_path / "steps.csv.gz"

    for run in ("one", "two"):
        rows = live_gpu._step_rows(run, [(batch, 7000.0, 300.0, 200.0)])
        live_gpu._append(path, STEP_COLUMNS, rows)

    assert read_steps(path) == {run: [(batch, 0.007)] for run in ("one", "two")}
    # A decode's context holds the token that it computes, the profile's does not.
    assert counts_of(batch) == (3, 897, 2, 64, 640.0 + 2048.0)


def test_only_every_second_step_is_fitted() -> None:
    known = [(make_batch(n), 0.010) for n in (1, 8, 32, 128)]
    odd = [(batch, 99.0) for batch, _ in known]
    mixed = [step for pair in zip(known, odd, strict=True) for step in pair]

    curves = fit([mixed])

    assert curves.step_s(known[2][0]) == pytest.approx(0.010, rel=0.05)
