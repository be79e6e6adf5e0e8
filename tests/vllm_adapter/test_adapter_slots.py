"""Requests whose LoRA adapter waits for a slot, around a real vLLM scheduler in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from chaos import ChaosScheduler
from live_sessions import (
    PARKED,
    assert_each_has_one_place,
    later_limit,
    open_session,
    send_next,
)
from loaded_engine import changed
from needs import NEEDS_SWAPPING
from virtual_model import TINY_MODEL
from virtual_runs import make_small_engine, make_workload, step_until, warm_up
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import sola_sched
from sola_sched.core.queues import PlannedQueue
from sola_sched.core.state import StepPlan, StepState
from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.steps.adapter_slots import AdapterSlots

pytestmark = pytest.mark.vllm

STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)
POLICIES = [
    "attain",
    "paper",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("alise", "doubling")),
]


class Run:
    """Requests of a busy adapter `a` and two of another one, `b`; there is one adapter slot.

    Args:
        sola: Options; None for stock vLLM.
        b_first: Whether `b` is of a higher priority class.
        slots: Requests that run at once.
    """

    def __init__(
        self,
        sola: dict[str, Any] | None,
        *,
        b_first: bool = False,
        slots: int = 4,
    ) -> None:
        options: dict[str, Any] = {"scheduling_policy": "priority"} if b_first else {}
        if sola is not None:
            options["additional_config"] = {"sola_sched": {"ttft_s": 2.0, "tpot_s": 0.05} | sola}
        engine = VirtualEngine(
            AsyncScheduler if sola is None else sola_sched.Scheduler,
            model=TINY_MODEL,
            num_blocks=4000,
            max_model_len=4096,
            max_num_seqs=slots,
            max_num_batched_tokens=2048,
            step_time=STEP_TIME,
            **options,
        )
        engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
        rng = np.random.default_rng(0)
        requests = [
            VirtualRequest(
                f"a{i}",
                float(at_s),
                int(rng.integers(100, 400)),
                prompt_len=200,
                max_tokens=1000,
                priority=5 if b_first else 0,
            )
            for i, at_s in enumerate(np.cumsum(rng.exponential(0.4, 50)))
        ]
        requests += [
            VirtualRequest(f"b{i}", 5.0 + 5.0 * i, 20, prompt_len=200, max_tokens=1000)
            for i in range(2)
        ]
        for request in requests:
            engine.add(request)
            adapter = request.req_id[0]
            engine._requests[request.req_id].lora_request = LoRARequest(adapter, ord(adapter), "/")
        self.most_adapters = 0

        def note(trace: Any) -> None:
            adapters = {req_id[0] for req_id in trace.output.num_scheduled_tokens}
            self.most_adapters = max(self.most_adapters, len(adapters))

        engine.run([], on_step=note)
        self.scheduler = engine.scheduler
        self.records = {request.req_id: engine.record(request.req_id) for request in requests}

    def waits_s(self, adapter: str) -> list[float]:
        """Of its requests that got a first token."""
        return [
            record.first_token_s - record.arrival_s
            for req_id, record in self.records.items()
            if req_id[0] == adapter and record.first_token_s is not None
        ]

    @property
    def num_preemptions(self) -> int:
        return sum(record.num_preemptions for record in self.records.values())


@cache
def stock_wait_s(b_first: bool) -> float:
    """The longest wait of `b` under stock vLLM."""
    return max(Run(None, b_first=b_first).waits_s("b"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("b_first", [False, True])
def test_an_adapter_waits_for_a_slot_hardly_longer_than_under_stock_vllm(
    policy: str, b_first: bool
) -> None:
    stock_s, ours = stock_wait_s(b_first), Run({"policy": policy}, b_first=b_first)
    assert all(record.is_finished for record in ours.records.values())
    assert ours.most_adapters == 1
    assert max(ours.waits_s("b")) < 1.15 * stock_s


@pytest.mark.parametrize("policy", ["attain", "paper"])
def test_a_higher_class_that_waits_for_an_adapter_slot_displaces_nobody_for_nothing(
    policy: str,
) -> None:
    run = Run({"policy": policy}, b_first=True)
    assert run.num_preemptions < 10
    assert run.scheduler.sola_stats()["num_stalled"] == 0


def test_one_that_waits_for_an_adapter_slot_is_refused_when_it_is_late() -> None:
    run = Run({"overload": "reject"}, slots=64)
    assert not run.waits_s("b")
    assert len(run.waits_s("a")) == 50
    assert run.scheduler.sola_stats()["num_rejected"] == 2


class HoldingPlanner:
    """Holds all but "none" in every second step."""

    def __init__(self) -> None:
        self._is_odd = False

    def plan(self, state: StepState) -> StepPlan:
        self._is_odd = not self._is_odd
        rows = [row for row in state.running.tolist() if state.table.req_id[row] == "none"]
        if not self._is_odd or not rows:
            return StepPlan()
        return StepPlan(run=np.array(rows), problem="holding")


class HoldingScheduler(sola_sched.Scheduler):
    def sola_new_planner(self) -> HoldingPlanner:
        return HoldingPlanner()


class Sessions:
    """Streaming sessions of the adapters "s" and "t", beside requests of a third and of none.

    Args:
        scheduler_cls: Of the engine.
        max_loras: Adapter slots.
        options: Of the engine.

    Attributes:
        most_adapters: That ran at once, those held included.
    """

    def __init__(self, scheduler_cls: type[Any], max_loras: int = 1, **options: Any) -> None:
        self.engine = make_small_engine(
            scheduler_cls, {"ttft_s": 2.0, "tpot_s": 0.05}, max_num_seqs=8, **options
        )
        self.scheduler = self.engine.scheduler
        self.scheduler.lora_config = SimpleNamespace(max_loras=max_loras)
        self.most_adapters = 0

    def open(self, name: str, output_len: int = 5) -> None:
        """A session of the adapter with this name."""
        open_session(
            self.engine, VirtualRequest(name, self.engine.clock.now, output_len, prompt_len=64)
        )
        self.engine._requests[name].lora_request = LoRARequest(name, ord(name[0]), "/")

    def ask(self, name: str, output_len: int = 5, adapter: str = "b") -> None:
        self.engine.add(
            VirtualRequest(name, self.engine.clock.now, output_len, prompt_len=50, max_tokens=500)
        )
        if adapter:
            lora = LoRARequest(adapter, ord(adapter), "/")
            self.engine._requests[name].lora_request = lora

    def until(self, is_enough: Any, most_steps: int = 2000) -> None:
        def look() -> bool:
            adapters = {r.lora_request.lora_name for r in self.scheduler.running if r.lora_request}
            self.most_adapters = max(self.most_adapters, len(adapters))
            assert_each_has_one_place(self.scheduler)
            return bool(is_enough())

        step_until(self.engine, look, most_steps)

    def is_parked(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and request.status.name == PARKED


@pytest.mark.parametrize("is_async", [False, True])
def test_a_session_that_waits_for_its_client_leaves_the_adapter_slot_to_others(
    is_async: bool,
) -> None:
    run = Sessions(sola_sched.Scheduler, async_scheduling=is_async)
    warm_up(run.engine)
    run.open("s")
    run.until(lambda: run.is_parked("s"))
    run.ask("b")
    run.until(lambda: run.engine.record("b").is_finished, 200)

    assert run.engine.record("b").is_finished
    assert run.is_parked("s")
    assert run.scheduler.sola_stats()["failures"] == {}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_a_session_goes_on_when_the_slot_of_its_adapter_is_free_although_all_who_run_are_held(
    scheduling_policy: str, is_async: bool
) -> None:
    """Those held count too: in the step they are held in, vLLM sees nobody with an adapter."""
    run = Sessions(HoldingScheduler, async_scheduling=is_async, scheduling_policy=scheduling_policy)
    run.open("s")
    run.until(lambda: run.is_parked("s"))
    run.ask("b", 40)
    run.ask("none", 300, adapter="")
    run.until(lambda: run.engine.record("b").num_output_tokens > 5)
    send_next(run.engine, "s")
    num_before = run.engine.record("s").num_output_tokens
    run.until(lambda: run.engine.record("b").num_output_tokens > 30)
    assert run.engine.record("s").num_output_tokens == num_before
    assert not run.is_parked("s")
    run.until(lambda: run.is_parked("s"))
    send_next(run.engine, "s", is_last=True)
    run.until(lambda: False)

    assert run.engine.record("s").num_output_tokens == num_before + later_limit(5, 5)
    assert [run.engine.record(name).num_output_tokens for name in ("b", "none")] == [40, 300]
    assert run.most_adapters == 1
    assert run.scheduler.sola_stats()["failures"] == {}


def test_adapters_are_counted_twice_a_step_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the plan, and once more after its preemptions."""
    num_calls: list[int] = []
    count = AdapterSlots.count

    def counted(slots: AdapterSlots) -> Any:
        num_calls[-1] += 1
        return count(slots)

    monkeypatch.setattr(AdapterSlots, "count", counted)
    run = Sessions(sola_sched.Scheduler)
    schedule = run.scheduler.schedule

    def one_step(*args: Any) -> Any:
        num_calls.append(0)
        return schedule(*args)

    monkeypatch.setattr(run.scheduler, "schedule", one_step)
    run.open("s")
    for number in range(20):
        run.ask(f"r{number}", 5, adapter="bc"[number % 2])
    run.until(lambda: run.is_parked("s") and len(run.scheduler.requests) == 1)

    assert run.is_parked("s")
    assert max(num_calls) == 2


@pytest.mark.injects_failures
@pytest.mark.parametrize("is_async", [False, True])
def test_who_is_set_apart_gets_no_second_place_when_the_queue_fails_meanwhile(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our queue goes by the engine then: who lives and has no other place."""
    run = Sessions(HoldingScheduler, async_scheduling=is_async)
    run.open("s")
    run.until(lambda: run.is_parked("s"))
    run.ask("b", 40)
    run.ask("none", 300, adapter="")
    run.until(lambda: run.engine.record("b").num_output_tokens > 5)
    num_failed = 0
    without_place: list[Any] = []
    look = PlannedQueue.__bool__

    def fail_once(queue: PlannedQueue[Any]) -> bool:
        nonlocal num_failed
        if run.scheduler._seams.apart and not num_failed:
            num_failed += 1
            without_place.extend(run.scheduler._seams.without_place())
            raise RuntimeError("injected")
        return look(queue)

    monkeypatch.setattr(PlannedQueue, "__bool__", fail_once)
    send_next(run.engine, "s")
    run.until(lambda: num_failed)
    run.until(lambda: run.is_parked("s"))
    send_next(run.engine, "s", is_last=True)
    run.until(lambda: False)

    assert num_failed == 1
    assert without_place == []
    assert run.most_adapters == 1
    assert not run.scheduler.requests
    assert list(run.scheduler.sola_stats()["failures"]) == ["asking whether a request waits"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_sessions_and_requests_of_many_adapters_never_run_with_more_than_there_are_slots(
    seed: int, max_loras: int, is_async: bool
) -> None:
    run = Sessions(
        ChaosScheduler,
        max_loras,
        async_scheduling=is_async,
        stall_limit_s=1e9,
        additional_config={"sola_sched": {"ttft_s": 2.0, "tpot_s": 0.05}, "chaos": seed},
    )
    rng = random.Random(seed)
    turns = {"s": 4, "t": 4, "u": 4}
    for name in turns:
        run.open(name, 6)
    for number in range(30):
        run.ask(f"r{number}", rng.randrange(1, 30), adapter=rng.choice("bc"))
        for _ in range(10):
            run.until(lambda: False, rng.randrange(1, 4))
            name = rng.choice([*turns])
            if run.is_parked(name) and turns[name]:
                turns[name] -= 1
                send_next(run.engine, name)
    for _ in range(3000):
        run.until(lambda: False, 1)
        for name in turns:
            if run.is_parked(name):
                send_next(run.engine, name, is_last=True)

    assert not run.scheduler.requests
    assert run.most_adapters == max_loras
    assert run.scheduler.sola_stats()["failures"] == {}
    assert run.engine.num_free_blocks == 1999


@pytest.mark.parametrize("is_async", [False, True])
def test_with_pipeline_parallelism_no_batch_has_more_adapters_than_slots(is_async: bool) -> None:
    """Else those who start beside one batch would run with those of another, and vLLM ends."""

    def change(arguments: dict[str, Any]) -> None:
        arguments["vllm_config"].parallel_config.pipeline_parallel_size = 2

    engine = make_small_engine(
        changed(sola_sched.Scheduler, change), {"ttft_s": 2.0}, async_scheduling=is_async
    )
    engine._depth = 2  # two batches in flight
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    requests = make_workload(60, 25.0)
    for number, request in enumerate(requests):
        engine.add(request)
        adapter = "abc"[number // 2 % 3]
        engine._requests[request.req_id].lora_request = LoRARequest(adapter, ord(adapter), "/")

    assert all(record.is_finished for record in engine.run())
    assert engine.scheduler.sola_support.own_order


def _run_while_copies_hold_blocks(
    sola: dict[str, Any], *, is_async: bool, change: Callable[[VirtualEngine], None] | None = None
) -> tuple[VirtualEngine, list[str]]:
    """Requests of five adapters, slots for two, and less memory than they take; after 3 s `change`.

    While copies to the host end, whoever finds no block waits for them, and gets no tokens.

    Returns:
        The engine, and who of the requests has not got all of its tokens.
    """
    from sola_sched.simulator.swap_link import LinkSpeed

    swap = {"mode": "raw", "always": True, "host_gib": 1.0}
    engine = make_small_engine(
        sola_sched.Scheduler,
        {"ttft_s": 2.0, "tpot_s": 0.05, "swap": swap, "plan_limit_s": None, **sola},
        num_blocks=220, max_num_seqs=32, max_num_batched_tokens=256, enable_prefix_caching=False,
        swap_link=LinkSpeed(100_000, 2e7), stall_limit_s=60.0, async_scheduling=is_async,
    )  # fmt: skip
    engine.scheduler.lora_config = SimpleNamespace(max_loras=2)
    rng = random.Random(0)
    requests = make_workload(60, 12.0, seed=0)
    for request in requests:
        engine.add(request)
        name = rng.choice("abcde")
        engine._requests[request.req_id].lora_request = LoRARequest(name, ord(name), "/")
    if change is not None:
        step_until(engine, lambda: engine.clock.now > 3.0)
        change(engine)
    step_until(engine, lambda: False)
    lengths = {request.req_id: request.output_len for request in requests}
    return engine, [n for n, num in lengths.items() if engine.record(n).num_output_tokens != num]


@NEEDS_SWAPPING
@pytest.mark.parametrize("is_async", [False, True])
def test_with_planning_off_nobody_starts_in_the_slots_of_those_who_wait_for_copies_to_end(
    is_async: bool,
) -> None:
    """vLLM asserts that no more adapters than there are slots for are computed in a step."""
    engine, lacking = _run_while_copies_hold_blocks({"steer": False}, is_async=is_async)

    assert lacking == []
    assert engine.scheduler.sola_stats()["swap"]["num_swapped_out"] > 1000
    assert engine.scheduler.sola_stats()["failures"] == {}


@NEEDS_SWAPPING
@pytest.mark.injects_failures
@pytest.mark.parametrize("is_async", [False, True])
def test_after_stepping_aside_an_engine_with_adapters_swaps_nothing(is_async: bool) -> None:
    """There is no queue of ours then that keeps who would start from vLLM."""
    before = []

    def fail(engine: VirtualEngine) -> None:
        guard = engine.scheduler.sola_guard
        while not guard.is_aside:
            guard.failed("planning a step", RuntimeError("injected"))
        before.append(engine.scheduler.sola_stats()["swap"]["num_swapped_out"])

    engine, lacking = _run_while_copies_hold_blocks({}, is_async=is_async, change=fail)

    assert lacking == []
    assert before[0] > 0
    assert engine.scheduler.sola_swap.has_ended
    assert engine.scheduler.connector.num_pinned == 0
    assert not engine.scheduler.sola_swap.has_pending_push_work()
