"""`sola_sched.Scheduler` behind front ends whose wall clocks differ, drift and are set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL

import sola_sched
from sola_sched.core.state import RequestTable
from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

YEAR_S = 365.0 * 86400.0
Clock = Callable[[float], float]


class Behind(sola_sched.Scheduler):
    """Gets its requests with stamps of another clock; notes by how much it is misled."""

    skew_of: Clock
    off_s: list[float]

    def add_request(self, request: Any) -> None:
        true_s = request.arrival_time
        request.arrival_time = true_s + self.skew_of(true_s)
        super().add_request(request)
        monitor = self.sola_monitor
        found_s = float(monitor.table.arrival_s[monitor.table.row_of[request.request_id]])
        self.off_s.append(found_s - true_s)


def serve(
    skew_of: Clock,
    own: Clock = lambda time_s: 0.0,
    *,
    ttft_s: float = 0.8,
    async_scheduling: bool = False,
    count: int = 60,
    on_step: Callable[[Any, float], None] = lambda scheduler, now_s: None,
) -> tuple[float, Any]:
    """Six requests a second, half of what the engine sustains; the share served, the scheduler."""
    engine = VirtualEngine(
        Behind,
        model=TINY_MODEL,
        num_blocks=2000,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        async_scheduling=async_scheduling,
        step_time=StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4),
        additional_config={"sola_sched": {"ttft_s": ttft_s, "tpot_s": 0.1, "overload": "reject"}},
    )
    scheduler = engine.scheduler
    scheduler.skew_of, scheduler.off_s = skew_of, []
    scheduler.sola_wall_clock = lambda: engine.clock.now + own(engine.clock.now)
    rng = np.random.default_rng(1)
    arrivals = 1.0 + np.cumsum(rng.exponential(1 / 6, count))
    records = engine.run(
        [
            VirtualRequest(f"r{i}", float(arrival_s), 40, prompt_len=int(rng.integers(50, 600)))
            for i, arrival_s in enumerate(arrivals)
        ],
        on_step=lambda trace: on_step(scheduler, engine.clock.now),
    )
    return sum(r.finish_reason == "length" for r in records) / count, scheduler


def stepped(step_s: float, at_s: float = 5.0) -> Clock:
    return lambda time_s: step_s if time_s >= at_s else 0.0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("skew_s", "ttft_s"),
    [(-5.0, 0.8), (5.0, 0.8), (-2.5, 2.0), (3 * YEAR_S, 0.8), (-3 * YEAR_S, 0.8)],
)
def test_a_clock_that_is_off_has_nobody_rejected(
    skew_s: float, ttft_s: float, async_scheduling: bool, monkeypatch: Any
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        "sola_sched.vllm_adapter.scheduler.logger.warning",
        lambda text, *args: warnings.append(text % args),
    )
    share, scheduler = serve(
        lambda time_s: skew_s, ttft_s=ttft_s, async_scheduling=async_scheduling
    )
    assert share == 1.0
    assert np.abs(scheduler.off_s).max() < 0.1  # a step or two
    stats = scheduler.sola_stats()
    assert stats["attainment"] == 1.0
    assert stats["num_implausible_arrivals"] >= 1
    assert stats["max_wait_s"] < ttft_s
    assert len([text for text in warnings if "its arrival time must be" in text]) == 1


@pytest.mark.parametrize("step_s", [5.0, -5.0, 0.7, -0.7])
@pytest.mark.parametrize("whose", ["both", "engine"])
def test_a_step_of_a_clock_in_a_run_harms_nobody(step_s: float, whose: str) -> None:
    step = stepped(step_s)
    share, scheduler = serve(step if whose == "both" else (lambda time_s: 0.0), step)
    assert share == 1.0
    assert np.abs(scheduler.off_s).max() < 0.1
    assert scheduler.sola_stats()["attainment"] == 1.0


def test_with_one_clock_arrivals_are_exact() -> None:
    share, scheduler = serve(lambda time_s: 0.0)
    assert share == 1.0
    assert np.abs(scheduler.off_s).max() < 1e-9
    assert scheduler.sola_stats()["num_implausible_arrivals"] == 0


def test_a_state_that_is_built_anew_after_a_step_of_the_clock_keeps_the_arrivals() -> None:
    compared = []

    def lose(scheduler: Any, now_s: float) -> None:
        monitor = scheduler.sola_monitor
        if now_s < 5.0:
            return
        before = {
            name: float(monitor.table.arrival_s[row]) for name, row in monitor.table.row_of.items()
        }
        monitor.table = RequestTable()
        scheduler.sola_guard.is_lost = True
        scheduler._planning.restore()
        for name, row in monitor.table.row_of.items():
            compared.append((float(monitor.table.arrival_s[row]), before[name]))

    share, scheduler = serve(stepped(5.0), stepped(5.0), on_step=lose)
    assert share == 1.0
    assert len(compared) > 100
    assert all(found_s == pytest.approx(true_s, abs=1e-9) for found_s, true_s in compared)
    assert scheduler.sola_stats()["num_implausible_arrivals"] <= 1
