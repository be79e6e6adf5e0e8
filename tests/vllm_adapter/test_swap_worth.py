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


def test_what_must_not_be_read_back_is_not_copied() -> None:
    """As with `prompt_logprobs`: vLLM computes all of such a prompt again."""
    engine = make_engine(enable_prefix_caching=False)
    engine.admit()
    scheduler = engine.scheduler
    for request in scheduler.requests.values():
        request.skip_reading_prefix_cache = True
    record, resumed = scheduler._booking._record, 0
    table, wrong = scheduler.sola_monitor.table, []

    def look(output: Any, held: Any) -> None:
        nonlocal resumed
        for name, num_tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            if request.num_preemptions and request.num_computed_tokens == num_tokens:
                resumed += 1
                if table.num_computed[table.row_of[name]]:
                    wrong.append(name)
        record(output, held)

    scheduler._booking._record = look
    step_until(engine, lambda: False)

    swap = scheduler.sola_stats()["swap"]
    assert len(engine.records) == 60
    assert resumed > 5
    assert wrong == []
    assert (swap["num_swapped_out"], swap["num_saved_ahead"]) == (0, 0)


def test_named_by_the_operator_it_loses_no_request_whose_load_fails(monkeypatch) -> None:
    """vLLM's own default has such requests fail."""
    from vllm.config import KVTransferConfig

    from sola_sched.config.swap import CONNECTOR
    from sola_sched.simulator import swap_link

    def name_connector(vllm_config: Any, scheduler_cls: type[Any]) -> None:
        vllm_config.scheduler_config.scheduler_cls = scheduler_cls
        vllm_config.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")

    monkeypatch.setattr(swap_link, "name_connector", name_connector)
    scheduler: Any = make_engine().scheduler

    assert scheduler.sola_swap is not None
    assert scheduler.recompute_kv_load_failures


def test_workers_without_a_slot_are_named_in_the_log(monkeypatch) -> None:
    import logging

    from vllm.v1.outputs import KVConnectorOutput

    from sola_sched.kv_swap.connector import SwapWorkerMetadata
    from sola_sched.kv_swap.jobs import Report

    warnings: list[str] = []  # whatever an engine has done to vLLM's loggers
    monkeypatch.setattr(
        logging.getLogger("vllm.sola_sched"), "warning", lambda text, *args: warnings.append(text)
    )
    connector = make_engine().scheduler.sola_swap
    for num_slots in (3, 0):
        meta = SwapWorkerMetadata(Report(num_slots=num_slots))
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
        assert len(warnings) == (num_slots == 0)

    assert "KV is not swapped" in warnings[0]


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
