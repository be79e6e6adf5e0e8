"""What planners expect of copies under way: memory that comes, tokens that are not computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("vllm")

from needs import NEEDS_SWAPPING
from virtual_runs import make_small_engine, make_workload, step_until

import sola_sched
from sola_sched.core.table import WAITING
from sola_sched.simulator import VirtualEngine

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING]


def make_engine(policy: str, **options: Any) -> VirtualEngine:
    """Short of memory, with priorities, over a link by which a copy takes several steps."""
    from sola_sched.simulator.swap_link import LinkSpeed  # imports what older releases lack

    swap = {"mode": "raw", "always": True, "host_gib": 1.0}
    engine = make_small_engine(
        sola_sched.Scheduler,
        {"policy": policy, "ttft_s": 2.0, "tpot_s": 0.05, "swap": swap},
        num_blocks=300,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        swap_link=LinkSpeed(100_000, 2e7),
        stall_limit_s=60.0,
        **options,
    )
    for number, request in enumerate(make_workload(150, 6.0, seed=1)):
        engine.add(dataclasses.replace(request, priority=number % 3))
    return engine


@pytest.mark.parametrize(("policy", "most"), [("attain", 14), ("alise", 12), ("doubling", 25)])
def test_no_more_leave_than_memory_is_needed_for(policy: str, most: int) -> None:
    """28, 14 and 76 left while planners did not count the blocks that were being copied."""
    engine = make_engine(policy)
    step_until(engine, lambda: False)

    stats = engine.scheduler.sola_stats()
    assert len(engine.records) == 150
    assert 0 < stats["num_preempted_by_policy"] <= most
    assert not stats["failures"]


@pytest.mark.parametrize("num_kept", [0, 16], ids=["all of it", "its end"])
def test_what_a_copy_has_lost_is_planned_for(num_kept: int) -> None:
    """As after a copy that failed: the rest of the request is computed again."""
    engine = make_engine("doubling")
    scheduler: Any = engine.scheduler
    table = scheduler.sola_monitor.table
    expected: dict[str, int] = {}

    def some_wait() -> bool:
        for name in scheduler.sola_copies.req_ids():
            row = table.row_of[name]
            if table.phase[row] == WAITING and table.num_computed[row] > 32:
                expected[name] = int(table.num_computed[row])
        return bool(expected)

    step_until(engine, some_wait)
    for name in expected:
        scheduler.sola_swap.cut(name, num_kept)
    plan, planned_for = scheduler.sola_planner.plan, {}

    def look(state: Any) -> Any:
        for name in expected:
            planned_for[name] = int(table.num_computed[table.row_of[name]])
        return plan(state)

    scheduler.sola_planner.plan = look
    scheduler.schedule()

    assert planned_for.keys() == expected.keys()
    assert max(planned_for.values()) <= num_kept
