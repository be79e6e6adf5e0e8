"""The loads under which the scheduler's overhead is measured are what their names say."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from harness.options import OPTIONS
from scheduler.closed_loop import SITUATIONS, ClosedLoop, Load
from sola_sched.vllm_adapter.scheduler import Scheduler

pytestmark = pytest.mark.vllm


def loop(situation: str, num_steps: int = 120, **load: int) -> ClosedLoop:
    numbers = {"num_running": 24, "num_waiting": 6} | load
    engine = ClosedLoop(Scheduler, Load(situation=situation, **numbers), seed=0)  # type: ignore[arg-type]
    for _ in range(num_steps):
        engine.advance()
    assert not engine.scheduler.sola_stats()["failures"]
    return engine


def used(engine: ClosedLoop) -> float:
    num_blocks = engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    return 1.0 - engine.num_free_blocks / num_blocks


def test_all_situations_can_be_asked_for() -> None:
    assert OPTIONS["situations"]["choices"] == tuple(SITUATIONS)


def test_slots_beyond_those_who_run_stay_free() -> None:
    engine = loop("plain", num_waiting=0, num_free_slots=8)
    assert engine.scheduler.max_num_running_reqs == 32
    assert set(engine.num_running[20:]) <= set(range(20, 25))


def test_memory_is_used_by_requests_of_many_classes() -> None:
    engine = loop("memory")
    assert used(engine) > 0.4 > used(loop("plain"))
    assert engine.scheduler.sola_monitor.lengths.num_classes > 20


def test_kv_is_swapped_where_memory_is_short() -> None:
    stats = loop("swap", num_steps=250, num_running=40).scheduler.sola_stats()
    assert stats["swap"]["num_saved_ahead"] + stats["swap"]["num_swapped_out"] > 0


def test_long_prefixes_are_cached() -> None:
    table = loop("prefixes").scheduler.sola_monitor.table
    rows = list(table.row_of.values())
    long = [row for row in rows if table.num_prompt[row] > 100_000]
    assert long
    assert min(table.num_computed[row] for row in long) >= 99_000


def test_priorities_and_classes_differ() -> None:
    table = loop("priorities").scheduler.sola_monitor.table
    assert {table.priority[row] for row in table.row_of.values()} == {0, 1, 2}
    services = loop("classes").scheduler.sola_monitor.services
    assert services.num_live[1:4].all()
    assert services.share.tolist() == [0.0, 0.4, 0.2, 0.0]
