"""`"steer": false`: steps are stock vLLM's, plans are made and counted only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from chaos import ChaosScheduler
from live_sessions import PARKED, assert_each_has_one_place, open_session, send_next
from loaded_engine import with_remote_kv
from virtual_runs import make_small_engine, make_workload, step_until
from vllm.lora.request import LoRARequest

import sola_sched
from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.simulator.host import stock_scheduler_cls

pytestmark = pytest.mark.vllm

OPTIONS = {"ttft_s": 0.4, "tpot_s": 0.05}


def run(
    scheduler_cls: type[Any], sola: dict[str, Any] | None, count: int = 160, **options: Any
) -> VirtualEngine:
    engine = make_small_engine(scheduler_cls, sola, **options)
    for request in make_workload(count, 16.0):
        engine.add(request)
    engine.run()
    return engine


def times(engine: VirtualEngine) -> dict[str, tuple[float | None, float | None, int]]:
    return {
        record.req_id: (record.first_token_s, record.last_token_s, record.num_output_tokens)
        for record in engine.records
    }


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("more", "memory"),
    [({}, 2000), ({}, 220), ({"overload": "reject"}, 2000), ({"policy": "paper"}, 220)],
)
def test_every_token_comes_when_it_comes_from_stock_vllm(
    is_async: bool, more: dict[str, Any], memory: int
) -> None:
    options: dict[str, Any] = {"async_scheduling": is_async, "num_blocks": memory}
    shadow = run(sola_sched.Scheduler, {**OPTIONS, **more, "steer": False}, **options)
    stock = run(stock_scheduler_cls(async_scheduling=is_async), None, **options)
    assert times(shadow) == times(stock)


def test_what_the_plans_would_have_done_is_counted() -> None:
    options = {**OPTIONS, "overload": "reject", "steer": False}
    engine = run(sola_sched.Scheduler, options, count=250)
    stats = engine.scheduler.sola_stats()
    assert stats["shadow"]["num_rejected"] > 0
    assert stats["num_held"] == stats["num_preempted_by_policy"] == 0
    assert sum(stats["problems"].values()) > 100
    assert "not steered" in str(engine.scheduler.sola_support)
    assert engine.scheduler.sola_monitor.fates.num_ended == 250


def test_steered_it_would_have_been_otherwise() -> None:
    steered = run(sola_sched.Scheduler, OPTIONS)
    shadow = run(sola_sched.Scheduler, {**OPTIONS, "steer": False})
    assert times(steered) != times(shadow)
    assert steered.scheduler.sola_stats()["shadow"] == {
        "num_held": 0,
        "num_preempted_by_policy": 0,
        "num_rejected": 0,
    }


# LoRA -----------------------------------------------------------------------------------------


def give_slots(engine: VirtualEngine, max_loras: int) -> None:
    """Adapters have so many slots from now on."""
    engine.scheduler.lora_config = SimpleNamespace(max_loras=max_loras)


def add_with_adapters(
    engine: VirtualEngine, requests: list[VirtualRequest], adapters: str = "abc-"
) -> None:
    """Add requests of these adapters in turn, in groups of up to 3; `-` is none."""
    rng = random.Random(0)
    names = [name for _ in requests for name in rng.choice(adapters) * rng.randrange(1, 4)]
    for request, name in zip(requests, names, strict=False):
        engine.add(request)
        if name != "-":
            engine._requests[request.req_id].lora_request = LoRARequest(name, ord(name), "/")


def watch(engine: VirtualEngine) -> list[Any]:
    """Gets, for each step, its tokens in order, who is preempted, and all queues after it."""
    schedule, found = engine.scheduler.schedule, []

    def watched(*args: Any) -> Any:
        output = schedule(*args)
        queues = {
            name: [request.request_id for request in getattr(engine.scheduler, name, ())]
            for name in ("running", "kv_holding_waiting", "skipped_waiting", "waiting")
        }
        preempted = sorted(output.preempted_req_ids or ())
        deferred = sorted(r.request_id for r in getattr(engine.scheduler, "deferred_waiting", ()))
        found.append((list(output.num_scheduled_tokens.items()), preempted, queues, deferred))
        return output

    engine.scheduler.schedule = watched
    return found


def assert_steps_are_stock_vllms(
    make: Callable[[type[Any], dict[str, Any] | None], VirtualEngine],
    serve: Callable[[VirtualEngine], None],
    *,
    is_async: bool,
) -> None:
    """Compare every step of an engine that is not steered with stock vLLM's.

    Args:
        make: Makes an engine from a scheduler class and our options.
        serve: Serves requests with it.
        is_async: Which of vLLM's schedulers is stock.
    """
    ours = make(sola_sched.Scheduler, {**OPTIONS, "steer": False, "plan_limit_s": None})
    stock = make(stock_scheduler_cls(async_scheduling=is_async), None)
    steps, stock_steps = watch(ours), watch(stock)
    serve(ours)
    serve(stock)
    for number, (step, stock_step) in enumerate(zip(steps, stock_steps, strict=False)):
        assert step == stock_step, f"step {number} of {len(stock_steps)}"
    assert len(steps) == len(stock_steps)
    assert times(ours) == times(stock)
    assert sum(ours.scheduler.sola_stats()["problems"].values()) > 50, "plans are made"
    assert ours.scheduler.sola_stats()["failures"] == {}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
@pytest.mark.parametrize("memory", [2000, 220])
def test_every_step_is_stock_vllms_with_more_adapters_than_slots(
    memory: int, scheduling_policy: str, max_loras: int, is_async: bool
) -> None:
    requests = [
        replace(request, priority=number % 3)
        for number, request in enumerate(make_workload(120, 16.0))
    ]

    def make(scheduler_cls: type[Any], sola: dict[str, Any] | None) -> VirtualEngine:
        engine = make_small_engine(
            scheduler_cls, sola, async_scheduling=is_async, num_blocks=memory,
            scheduling_policy=scheduling_policy,
        )  # fmt: skip
        give_slots(engine, max_loras)
        return engine

    def serve(engine: VirtualEngine) -> None:
        add_with_adapters(engine, requests)
        engine.run()

    assert_steps_are_stock_vllms(make, serve, is_async=is_async)


@pytest.mark.parametrize("is_async", [False, True])
def test_nor_is_a_slot_kept_for_who_waits_for_its_kv(is_async: bool) -> None:
    """Steered, the adapter of a request whose KV is being loaded has one; in stock vLLM none."""

    def make(scheduler_cls: type[Any], sola: dict[str, Any] | None) -> VirtualEngine:
        engine = with_remote_kv(
            scheduler_cls, sola={"sola_sched": sola or {}}, async_scheduling=is_async
        )
        give_slots(engine, 1)
        return engine

    def serve(engine: VirtualEngine) -> None:
        requests = make_workload(80, 20.0)
        add_with_adapters(engine, requests)
        for request in requests[::2]:
            engine._requests[request.req_id].kv_transfer_params = {"do_remote_prefill": True}
        engine.run()
        assert not engine.scheduler.connector.loading

    assert_steps_are_stock_vllms(make, serve, is_async=is_async)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("max_loras", [1, 2])
def test_every_step_is_stock_vllms_where_sessions_have_adapters(
    max_loras: int, is_async: bool
) -> None:
    def make(scheduler_cls: type[Any], sola: dict[str, Any] | None) -> VirtualEngine:
        engine = make_small_engine(scheduler_cls, sola, async_scheduling=is_async, max_num_seqs=8)
        give_slots(engine, max_loras)
        return engine

    def serve(engine: VirtualEngine) -> None:
        turns = {"s": 6, "t": 6}
        for name in turns:
            open_session(engine, VirtualRequest(name, 0.0, 5, prompt_len=64))
            engine._requests[name].lora_request = LoRARequest(name, ord(name), "/")
        add_with_adapters(engine, make_workload(60, 16.0))

        def go_on() -> bool:
            for name in turns:
                request = engine.scheduler.requests.get(name)
                if request is not None and request.status.name == PARKED:
                    turns[name] -= 1
                    send_next(engine, name, is_last=not turns[name])
            return False

        step_until(engine, go_on)
        assert not engine.scheduler.requests

    assert_steps_are_stock_vllms(make, serve, is_async=is_async)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_who_is_held_runs_again_in_the_step_in_which_steering_goes_off(
    seed: int, is_async: bool, tmp_path: Path
) -> None:
    """From then on vLLM sees all who wait and all who run, whatever their adapters."""
    path = tmp_path / "options.json"
    sola = {**OPTIONS, "options_file": str(path), "plan_limit_s": None}
    engine = make_small_engine(
        ChaosScheduler,
        async_scheduling=is_async,
        num_blocks=4000,
        max_num_batched_tokens=8192,
        additional_config={"sola_sched": sola, "chaos": seed},
    )
    give_slots(engine, 2)
    add_with_adapters(engine, make_workload(200, 30.0))
    scheduler, steering = engine.scheduler, engine.scheduler._steering
    put_back = steering.put_back
    held: set[str] = set()
    seen: list[Any] = []

    def look() -> None:
        """As vLLM leaves it, before anything is put back."""
        if scheduler.sola_config.steer:
            may_go_on = [r for r in steering.out_of_sight if not scheduler._seams.is_ending(r)]
            held.clear()
            held.update(request.request_id for request in may_go_on)
        else:
            seen.append((steering.out_of_sight, scheduler._seams.apart, scheduler.waiting._shown))
        put_back()

    steering.put_back = look
    step_until(engine, lambda: engine.clock.now > 2.0 and len(held) > 3)
    was_held, steps = len(held), watch(engine)
    path.write_text(json.dumps({"steer": False}))
    scheduler._changing.look()
    step_until(engine, lambda: bool(seen))
    assert was_held > 3
    assert held <= dict(steps[0][0]).keys()
    assert_each_has_one_place(scheduler)
    engine.run()

    assert len(seen) > 50
    assert all(each == ([], [], None) for each in seen)
    assert all(record.is_finished for record in engine.records)
    assert engine.num_free_blocks == 3999
    assert scheduler.sola_stats()["failures"] == {}
