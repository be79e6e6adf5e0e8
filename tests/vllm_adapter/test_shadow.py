"""`"steer": false`: steps are stock vLLM's, plans are made and counted only."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, make_workload

import sola_sched
from sola_sched.simulator import VirtualEngine
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
