"""Priority classes around a real vLLM scheduler, in virtual time."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from marks import LONG, MODES

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

import sola_sched
from sola_sched.simulator import StepTimeModel, StepTrace, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)


class OutOfOrder:
    """Arrival times on the requests differ from the order in which they come; some are equal."""

    def add_request(self, request: Any) -> None:
        jitter = zlib.crc32(request.request_id.encode()) % 5
        request.arrival_time = round(request.arrival_time - 0.2 * jitter, 1)
        super().add_request(request)


class StockOutOfOrder(OutOfOrder, AsyncScheduler):
    """vLLM's own."""


class OursOutOfOrder(OutOfOrder, sola_sched.Scheduler):
    """The scheduler under test."""


class Watched:
    """Notes who loses its KV while a request of a lower class keeps it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_preempted, self.inversions = 0, []

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        holds_kv = [r for r in self.requests.values() if r.status == RequestStatus.RUNNING]
        self.num_preempted += 1
        if request.priority < max(r.priority for r in holds_kv):
            self.inversions.append(request.request_id)
        super()._preempt_request(request, *args, **kwargs)


class WatchedStock(Watched, AsyncScheduler):
    """vLLM's own."""


class WatchedOurs(Watched, sola_sched.Scheduler):
    """The scheduler under test."""


def make_engine(
    scheduler_cls: type[Any], sola: dict[str, Any] | None, **options: Any
) -> VirtualEngine:
    defaults: dict[str, Any] = {
        "model": TINY_MODEL,
        "num_blocks": 400,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "step_time": STEP_TIME,
        "scheduling_policy": "priority",
    }
    if sola is not None:
        defaults["additional_config"] = {"sola_sched": sola}
    return VirtualEngine(scheduler_cls, **(defaults | options))


def make_workload(
    count: int, rate_per_s: float, num_classes: int, seed: int = 0, prompt: int = 100
) -> list[VirtualRequest]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        VirtualRequest(
            f"r{i}",
            arrival_s=float(arrivals[i]),
            prompt_len=int(rng.integers(prompt // 4, 2 * prompt)),
            output_len=int(rng.choice((20, 400))),
            max_tokens=1000,
            priority=int(rng.integers(num_classes)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("async_scheduling", MODES)
@pytest.mark.parametrize("policy", ["attain", "paper"])
@pytest.mark.parametrize("num_blocks", [2000, 140])
@pytest.mark.parametrize("num_classes", [1, 4])
def test_without_slos_the_schedule_is_stock_vllms_by_priority_step_by_step(
    async_scheduling: bool, policy: str, num_blocks: int, num_classes: int
) -> None:
    def schedules(scheduler_cls: type[Any], sola: dict[str, Any] | None) -> list[Any]:
        steps: list[Any] = []

        def note(trace: StepTrace) -> None:
            steps.append((trace.start_s, list(trace.output.num_scheduled_tokens.items())))

        options = {"num_blocks": num_blocks, "max_num_seqs": 16}
        engine = make_engine(scheduler_cls, sola, async_scheduling=async_scheduling, **options)
        engine.run(make_workload(40, 12.0, num_classes), on_step=note)
        return steps

    stock = schedules(StockOutOfOrder, None)
    ours = schedules(OursOutOfOrder, {"policy": policy, "ttft_s": None, "tpot_s": None})
    assert ours == stock


OTHERS = ("paper", "alise", "doubling", "none")


@pytest.mark.parametrize(
    ("policy", "async_scheduling"),
    [
        ("attain", True),
        pytest.param("attain", False, marks=pytest.mark.slow),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("alise", "none")),
        *(pytest.param(name, False, marks=LONG) for name in ("paper", "doubling")),
        *(pytest.param(name, True, marks=LONG) for name in OTHERS),
    ],
)
def test_no_class_loses_its_kv_to_a_lower_one(policy: str, async_scheduling: bool) -> None:
    workload = make_workload(400, 30.0, 2)
    sola = {"policy": policy, "ttft_s": 0.5, "tpot_s": 0.05}
    if policy == "none":
        sola = {"ttft_s": None, "tpot_s": None}
    engine = make_engine(WatchedOurs, sola, async_scheduling=async_scheduling)
    records = engine.run(workload)
    assert all(r.is_finished for r in records)
    assert engine.scheduler.num_preempted > 20
    assert engine.scheduler.inversions == []


@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
def test_a_high_class_waits_for_no_memory_of_a_low_one(policy: str) -> None:
    """Twelve requests of a low class fill the memory and go on for seconds."""
    engine = make_engine(sola_sched.Scheduler, {"policy": policy, "ttft_s": 1.0, "tpot_s": 0.05})
    learned = [VirtualRequest(f"w{i}", 0.05 * i, 10, prompt_len=50 + 7 * i) for i in range(40)]
    low = [
        VirtualRequest(f"low{i}", 5.0 + 0.01 * i, 600, prompt_len=400, max_tokens=1000, priority=5)
        for i in range(12)
    ]
    high = [VirtualRequest(f"high{i}", 8.0 + 0.3 * i, 20, prompt_len=1200) for i in range(6)]

    records = {r.req_id: r for r in engine.run([*learned, *low, *high])}

    waits_s = [
        record.first_token_s - record.arrival_s
        for record in (records[r.req_id] for r in high)
        if record.first_token_s is not None
    ]
    assert len(waits_s) == len(high)
    assert max(waits_s) < 0.5
    assert all(record.is_finished for record in records.values())
    assert sum(record.num_preemptions for record in records.values()) < 30


def test_vllms_own_victims_are_of_the_lowest_class() -> None:
    """What the tests above hold ours against, where memory is as short."""
    engine = make_engine(WatchedStock, None)
    engine.run(make_workload(400, 30.0, 2))
    assert engine.scheduler.num_preempted > 20
    assert engine.scheduler.inversions == []


@pytest.mark.parametrize("async_scheduling", MODES)
def test_decodes_of_a_lower_class_go_on_beside_the_prompts_of_a_higher_one(
    async_scheduling: bool,
) -> None:
    """A plan has tokens for both; vLLM would give all of them to a prompt that has begun."""
    sola = {"ttft_s": 2.0, "tpot_s": 0.03, "plan_limit_s": None}
    engine = make_engine(
        sola_sched.Scheduler, sola, num_blocks=4000, async_scheduling=async_scheduling
    )
    lows = [VirtualRequest(f"low{i}", 0.05 * i, 300, 100, priority=1) for i in range(60)]
    highs = [VirtualRequest(f"high{i}", 2.0 + 0.5 * i, 10, 1500) for i in range(16)]
    for request in (*lows, *highs):
        engine.add(request)
    engine.run()

    for request in highs:
        record = engine.record(request.req_id)
        assert record.first_token_s - record.arrival_s < 2.0
    for request in lows:
        record = engine.record(request.req_id)
        assert (record.finished_s - record.first_token_s) / 299 < 0.03
