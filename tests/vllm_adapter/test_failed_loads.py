"""Where vLLM lowers what a running request has computed, it is a prefill again; and leaks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from live_sessions import open_session, send_next
from table_checks import check_table_at_each_step
from virtual_runs import make_small_engine, step_until, warm_up
from vllm.v1.outputs import KVConnectorOutput

import sola_sched
from sola_sched.simulator import VirtualRequest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_prompt_whose_blocks_could_not_be_loaded_is_computed_in_chunks_again(
    policy: str, is_async: bool
) -> None:
    engine = make_small_engine(
        sola_sched.Scheduler,
        {"ttft_s": 2.0, "tpot_s": 0.05, "policy": policy},
        async_scheduling=is_async,
    )
    scheduler, sample = engine.scheduler, engine._sample
    check_table_at_each_step(scheduler)
    scheduler.recompute_kv_load_failures = True
    engine.add(VirtualRequest("other", 5.0, 400, prompt_len=40))
    engine.add(VirtualRequest("loaded", 6.0, 40, prompt_len=801))
    warm_up(engine)
    step_until(engine, lambda: engine.record("loaded").num_output_tokens >= 3)
    blocks = set(scheduler.kv_cache_manager.get_block_ids("loaded")[0][:50])

    def fails(trace: Any) -> Any:
        trace.copies = KVConnectorOutput(invalid_block_ids=blocks)
        return sample(trace)

    engine._sample = fails  # type: ignore[method-assign]
    engine.step()
    engine._sample = sample  # type: ignore[method-assign]
    num_before = engine.record("loaded").num_output_tokens
    chunks: list[int] = []
    for _ in range(12):
        trace = engine.step()
        if trace is not None:
            chunks.append(trace.output.num_scheduled_tokens.get("loaded", 0))

    assert max(chunks) > 100
    assert engine.record("loaded").num_output_tokens > num_before
    step_until(engine, lambda: False)
    assert engine.record("loaded").is_finished


@pytest.mark.injects_failures
def test_nothing_of_requests_is_kept_after_it_has_stepped_aside() -> None:
    engine = make_small_engine(sola_sched.Scheduler, {}, async_scheduling=True)
    scheduler = engine.scheduler
    open_session(engine, VirtualRequest("session", 0.0, 5, prompt_len=30))
    for _ in range(10):
        scheduler.sola_guard.failed("testing", RuntimeError())
    for _ in range(10):
        send_next(engine, prompt_len=3)
        for _ in range(6):
            engine.step()

    assert scheduler.sola_guard.is_aside
    assert engine.record("session").num_output_tokens > 30
    assert not scheduler._booking._continued
    assert not scheduler._booking._ended
    assert not scheduler._booking.rows._requests
