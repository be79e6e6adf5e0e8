"""Wrong step times do not make an engine refuse all that comes, for ever."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, step_until, warm_up

import sola_sched
from sola_sched.cost.fit import StepShape
from sola_sched.simulator import VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

_KINDS = (
    StepShape(0, 0, 300, 9e4, 0.0),
    StepShape(8, 800, 0, 0.0, 0.0),
    StepShape(8, 800, 300, 9e4, 0.0),
)


def make_engine(factor: float, *, is_async: bool = False) -> VirtualEngine:
    """An engine that takes all its steps for so many times longer than they are."""
    sola = {"ttft_s": 1.0, "tpot_s": 0.05, "overload": "reject"}
    engine = make_small_engine(sola_sched.Scheduler, sola, async_scheduling=is_async)
    warm_up(engine)
    step_until(engine, lambda: False)
    cost = engine.scheduler.sola_monitor.cost
    for shape, true_s in [(shape, cost.step_s(shape)) for shape in _KINDS]:
        for _ in range(10):
            cost.observe(shape, factor * true_s)
    return engine


def outcomes(engine: VirtualEngine, count: int) -> list[bool]:
    """Whether each of so many requests, on an idle engine one after the other, was served."""
    for number in range(count):
        engine.add(VirtualRequest(f"r{number}", engine.clock.now, prompt_len=200, output_len=20))
        step_until(engine, lambda: False)
    return [engine.record(f"r{number}").is_finished for number in range(count)]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("factor", [100.0, 200.0])
def test_an_idle_engine_serves_again_whatever_it_takes_its_steps_for(
    factor: float, is_async: bool
) -> None:
    served = outcomes(make_engine(factor, is_async=is_async), 120)

    assert not any(served[:8])
    assert served[8]
    assert all(served[-20:])


def test_who_cannot_be_in_time_is_refused_but_for_one_in_nine() -> None:
    engine = make_engine(1.0)
    for number in range(27):
        # A step takes 10 ms at least.
        engine.add(
            VirtualRequest(
                f"r{number}",
                engine.clock.now,
                prompt_len=200,
                output_len=4,
                extra_args={"ttft_slo_ms": 5.0},
            )
        )
        step_until(engine, lambda: False)

    served = [engine.record(f"r{number}").is_finished for number in range(27)]
    assert [place for place, is_served in enumerate(served) if is_served] == [8, 17, 26]
