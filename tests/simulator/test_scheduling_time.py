"""What the scheduler's own calls take: in full between steps, or hidden behind the step before."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.backends.simulation import SimBackend, SimOptions
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError
from sola_sched.simulator import StepTimeModel, StepTrace, VirtualEngine, VirtualRequest
from sola_sched.simulator.scheduling_time import MEASURED, SOLA, STOCK, SchedulingTime
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.workloads.workload import Workload

pytestmark = pytest.mark.vllm

#: Every step takes a second.
SECOND = StepTimeModel(base_s=1.0, per_decode_s=0.0, per_prefill_token_s=0.0)


def steps(scheduling_time, *, async_scheduling: bool) -> tuple[list[StepTrace], float]:
    """Steps of two requests with five tokens each; when the last one is delivered."""
    engine = VirtualEngine(
        AsyncScheduler,
        model=TINY_MODEL,
        num_blocks=100,
        max_model_len=512,
        step_time=SECOND,
        async_scheduling=async_scheduling,
        scheduling_time=scheduling_time,
    )
    traces: list[StepTrace] = []
    requests = [VirtualRequest(name, 0.0, output_len=5, prompt_len=10) for name in "ab"]
    records = engine.run(requests, on_step=traces.append)
    executed = [trace for trace in traces if trace.output.num_scheduled_tokens]
    return executed, max(record.last_token_s for record in records)


def test_a_synchronous_engine_pays_in_full() -> None:
    traces, end_s = steps(SchedulingTime(0.1, 0.05), async_scheduling=False)
    assert len(traces) == 5
    assert end_s == pytest.approx(5 * (1.0 + 0.1 + 2 * 0.05))
    assert [t.start_s - t.scheduled_s for t in traces] == pytest.approx([0.1] * 5)


def test_an_asynchronous_engine_hides_what_fits_into_a_step() -> None:
    traces, _ = steps(SchedulingTime(0.1, 0.05), async_scheduling=True)
    assert [t.start_s for t in traces] == pytest.approx([0.1, 1.1, 2.1, 3.1, 4.1])


def test_an_asynchronous_engine_pays_for_what_exceeds_a_step() -> None:
    traces, _ = steps(SchedulingTime(1.0, 0.2), async_scheduling=True)
    starts = [t.start_s for t in traces][1:]
    assert [b - a for a, b in pairwise(starts)] == pytest.approx([1.4] * 3)


def test_measured_time_is_charged() -> None:
    _, without_s = steps(None, async_scheduling=False)
    _, with_s = steps(MEASURED, async_scheduling=False)
    assert without_s == 5.0
    assert with_s > 5.0


def test_each_scheduler_is_charged_its_own_time() -> None:
    profile = load_step_profile("llama-3-8b-h100")
    backend = SimBackend(SimOptions(profile, scheduling_time="model"))
    for name, expected in (("stock", STOCK), ("sjf", STOCK), ("sola", SOLA)):
        engine = backend._engine(parse_scheduler(name), SloTarget(1.0, 0.1), Workload(()))
        assert engine._scheduling_time == expected
    assert SOLA.step_s(1) > STOCK.step_s(1)
    assert SOLA.step_s(256) > STOCK.step_s(256)


def test_an_unknown_way_of_charging_is_refused() -> None:
    with pytest.raises(ConfigError, match="none, model, measured"):
        SimBackend(SimOptions(load_step_profile("llama-3-8b-h100"), scheduling_time="much"))
