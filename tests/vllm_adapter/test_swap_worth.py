"""Which copies are loaded, and what the measured link learns from loads and refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from needs import NEEDS_SWAPPING
from virtual_runs import make_small_engine, step_until

import sola_sched
from sola_sched.core.table import WAITING
from sola_sched.simulator import VirtualEngine, VirtualRequest

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING]


def make_engine(**options: Any) -> VirtualEngine:
    """Short of memory, over a link by which a copy takes a step or less."""
    from sola_sched.simulator.swap_link import LinkSpeed  # imports what older releases lack

    swap = {"mode": "raw", "host_gib": 0.3}
    defaults: dict[str, Any] = {
        "num_blocks": 80,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 400,
        "stall_limit_s": 60.0,
        "swap_link": LinkSpeed(100_000, 2e9),
    }
    engine = make_small_engine(
        sola_sched.Scheduler,
        {"policy": "attain", "ttft_s": 0.5, "tpot_s": 0.03, "swap": swap},
        **(defaults | options),
    )
    rng = random.Random(0)
    for number in range(60):
        prompt_len, output_len = rng.randrange(50, 190), rng.randrange(20, 200)
        engine.add(
            VirtualRequest(f"r{number}", 0.0, output_len, prompt_len=prompt_len, max_tokens=200)
        )
    return engine


def test_nothing_is_loaded_for_the_few_tokens_that_the_prefix_cache_lacks() -> None:
    """Computing them takes one step; a load takes three until it is noticed."""
    engine = make_engine(enable_prefix_caching=True)
    copies, load = engine.scheduler.sola_copies, engine.scheduler.sola_copies.load
    loads: list[tuple[int, int]] = []  # tokens before, and of the load

    def look(req_id: str, first: int, end: int, block_ids: Any) -> int:
        loads.append((first, end - first))
        return int(load(req_id, first, end, block_ids))

    copies.load = look
    step_until(engine, lambda: False)

    assert len(engine.records) == 60
    assert [num_tokens for first, num_tokens in loads if first]
    assert min(num_tokens for _, num_tokens in loads) > 20
    # The link moves 20,000 tokens a second.
    assert engine.scheduler.sola_stats()["swap"]["load_tokens_per_s"] > 8_000


def test_a_request_that_waits_is_refused_once_however_many_steps_it_waits() -> None:
    engine = make_engine(enable_prefix_caching=False)
    scheduler = engine.scheduler
    table, link = scheduler.sola_monitor.table, scheduler._swapping._link

    def waiting() -> int:
        rows = [table.row_of[name] for name in scheduler.sola_copies.req_ids()]
        return sum(table.phase[row] == WAITING for row in rows)

    step_until(engine, lambda: waiting() >= 2 and scheduler.sola_monitor.cost.is_ready)
    most, num_asked = waiting(), 0
    leaves = scheduler._swapping.leaves

    def count(*args: Any) -> None:
        nonlocal most
        most += 1
        leaves(*args)

    scheduler._swapping.leaves = count
    link.s_per_token, link.observe = 0.1, lambda *_: None
    for _ in range(12):
        num_asked += waiting()
        engine.step()

    assert num_asked > most + 10
    assert 0 < link._num_refused <= most
