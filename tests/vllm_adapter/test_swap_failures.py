"""Whatever fails in the bookkeeping of host copies, no request and no block is lost.

In virtual time, with the real scheduler and the scheduler half of the connector. Failures come at
every call that vLLM makes to it, and within what these calls do, so that the books are half done.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from chaos import ChaosScheduler
from faults import COPY_SITES, SITES, SWAP_SITES, Faults
from live_sessions import PARKED, assert_each_has_one_place, open_session, send_next
from marks import LONG
from needs import NEEDS_SWAPPING
from table_checks import check_table_at_each_step
from virtual_runs import make_small_engine, step_until

import sola_sched
from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.guard import PATIENCE

pytestmark = [pytest.mark.vllm, pytest.mark.injects_failures, NEEDS_SWAPPING]

#: Share of the calls that fail where they are rare.
SHARE_OF = {
    "copies dropped": 0.5,
    "copies free blocks": 0.3,
    "copies idle": 1.0,
    "copy cut": 0.5,
    "copy loadable": 0.3,
    "copy loaded": 0.3,
    "pieces of a load": 0.3,
    "session copy": 0.5,
}
#: Failures that a test injects at a site, at least: 4 to 6 are in fact, and 7 to 45 elsewhere.
LEAST_OF = {"copies free blocks": 3, "copies idle": 3, "slots freed": 3}
LEAST = 5
#: Steps that a run makes at most.
NUM_STEPS = 20_000


def make_engine(seed: int, **options: Any) -> VirtualEngine:
    """Short of memory, over a link that takes some steps for each copy."""
    from sola_sched.simulator.swap_link import LinkSpeed  # imports what older releases lack

    rng = random.Random(seed)
    sola = {
        "policy": rng.choice(("attain", "paper", "alise", "doubling")),
        "ttft_s": 0.5,
        "tpot_s": 0.03,
        "swap": {
            "mode": rng.choice(("raw", "int8")),
            "always": True,
            "host_gib": rng.choice((0.05, 0.3)),
        },
    }
    defaults = {
        "num_blocks": rng.choice((36, 50)),
        "max_num_seqs": rng.choice((4, 8)),
        "max_num_batched_tokens": 64,
        "max_model_len": 400,
        "enable_prefix_caching": rng.random() < 0.5,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "stall_limit_s": 60.0,
        "swap_link": LinkSpeed(100_000, rng.choice((5e7, 2e8))),
        "additional_config": {"sola_sched": sola, "chaos": seed},
    }
    cls = rng.choice((sola_sched.Scheduler, ChaosScheduler, ChaosScheduler))
    return make_small_engine(cls, **(defaults | options))


def events(seed: int) -> Iterator[Any]:
    """Endless random events: the number of steps to the next one, and what then happens."""
    rng = random.Random(seed)
    while True:
        yield rng.randrange(1, 30), rng.choice(("abort", "reset", "reset", "turn", "turn", "turn"))


def holds_between_turns(scheduler: Any) -> bool:
    """Whether a session waits for input with its KV: vLLM itself cannot reset its cache then."""
    live = scheduler.requests.values()
    return any(r.status.name == PARKED and r.num_computed_tokens for r in live)


def serve(engine: VirtualEngine, seed: int) -> dict[str, int]:
    """Requests, aborts and resets, and with an odd seed sessions; returns tokens of those."""
    rng, scheduler = random.Random(seed), engine.scheduler
    for number in range(30):
        engine.add(
            VirtualRequest(
                f"r{number}",
                0.0,
                rng.randrange(2, 80),
                prompt_len=rng.randrange(5, 150),
                max_tokens=100,
            )
        )
    sessions = dict.fromkeys((f"session{number}" for number in range(3 * (seed % 2))), 12)
    for name, output_len in sessions.items():
        open_session(engine, VirtualRequest(name, 0.0, output_len, prompt_len=40))
    due, turns = events(seed), [name for name in sessions for _ in range(4)]
    rng.shuffle(turns)
    wait, event = next(due)
    engine.admit()
    for _ in range(NUM_STEPS):
        if not wait:
            live = sorted(scheduler.requests)
            if event == "abort" and live and rng.random() < 0.5:
                name = rng.choice([n for n in live if n.startswith("r")] or [""])
                engine.abort(name) if name else None
            elif event == "reset" and live and not holds_between_turns(scheduler):
                scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=rng.random() < 0.5
                )
            elif event == "turn" and turns:
                send_next(engine, turns[-1], prompt_len=10, output_len=8)
                sessions[turns.pop()] += 8
            wait, event = next(due)
        wait -= 1
        if not engine.has_work:
            break
        engine.step()
        assert_each_has_one_place(scheduler)
        if not (turns or engine.has_arrivals) and all(
            r.status.name == PARKED for r in scheduler.requests.values()
        ):
            break
    return sessions


def assert_nothing_is_lost(engine: VirtualEngine, sessions: dict[str, int]) -> None:
    scheduler = engine.scheduler
    for name, num_tokens in sessions.items():
        assert engine.record(name).num_output_tokens == num_tokens, name
        send_next(engine, name, is_last=True)
    step_until(engine, lambda: False)
    assert not scheduler.requests
    for record in engine.records:
        if record.req_id not in sessions:
            wanted = engine._virtual[record.req_id].output_len
            assert record.finish_reason in ("stop", "abort")
            assert record.num_output_tokens == wanted or record.finish_reason == "abort"
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert scheduler.sola_swap._ledger.is_empty
    assert not scheduler.sola_swap._ledger._pinned
    scheduler.sola_copies.check_integrity()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_without_failures_the_table_says_what_vllm_has_computed(is_async: bool) -> None:
    """With loads, aborts, resets and sessions, which lower that in their own ways."""
    for seed in range(4):
        engine = make_engine(seed, async_scheduling=is_async)
        check_table_at_each_step(engine.scheduler)
        assert_nothing_is_lost(engine, serve(engine, seed))
        assert not engine.scheduler.sola_stats()["failures"]


@pytest.mark.parametrize(
    ("site", "is_async"),
    [
        pytest.param(
            site,
            is_async,
            # The ordinary run has each site once, every second one in the other mode.
            marks=() if is_async == bool(number % 2) else LONG,
            id=f"{site}-{'async' if is_async else 'sync'}",
        )
        for number, site in enumerate(sorted(COPY_SITES))
        for is_async in (False, True)
    ],
)
def test_a_failure_at_any_booking_of_a_copy_loses_no_request_and_no_block(
    site: str, is_async: bool
) -> None:
    num_raised = 0
    for seed in range(4):
        engine = make_engine(seed, async_scheduling=is_async)
        share = SHARE_OF.get(site, 0.05)
        with Faults(site, share=share, seed=seed).injected() as faults:
            sessions = serve(engine, seed)
        assert_nothing_is_lost(engine, sessions)
        num_raised += faults.total
    assert num_raised >= LEAST_OF.get(site, LEAST)


@pytest.mark.parametrize("site", ["queue bool", "queue peek", "queue pop"])
def test_a_failure_of_the_queue_while_vllm_holds_loading_requests_doubles_none(site: str) -> None:
    """vLLM takes those that wait for a load out of their queue, and puts them back at the end."""
    num_raised = 0
    for seed in (0, 2, 4, 6, 8):
        engine = make_engine(seed)
        with Faults(site, share=0.05, seed=seed, first=30).injected() as faults:
            sessions = serve(engine, seed)
        assert_nothing_is_lost(engine, sessions)
        num_raised += faults.total
    assert num_raised >= 15


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_failures_of_several_kinds_at_once_lose_nothing(is_async: bool) -> None:
    num_raised = 0
    for seed in range(8):
        rng = random.Random(seed)
        sites = rng.sample(sorted(COPY_SITES | SITES | SWAP_SITES), 6) + rng.sample(
            sorted(COPY_SITES), 4
        )
        engine = make_engine(seed, async_scheduling=is_async)
        with Faults(*sites, share=rng.choice((0.005, 0.05, 0.3)), seed=seed).injected() as faults:
            sessions = serve(engine, seed)
        assert_nothing_is_lost(engine, sessions)
        num_raised += faults.total
    assert num_raised >= 50


def test_after_a_failure_copies_are_made_again_as_soon_as_those_under_way_have_ended() -> None:
    engine = make_engine(1, async_scheduling=True)
    counts = engine.scheduler.sola_copies.counts
    faults = Faults("copies reported", share=1.0, first=3)
    ordered_at: list[tuple[int, int]] = []  # failures so far, and the tokens copied by then

    def look() -> bool:
        ordered_at.append((faults.total, counts.num_swapped_out + counts.num_saved_ahead))
        if faults.total:
            faults.stop()
        return False

    for number in range(20):
        engine.add(VirtualRequest(f"r{number}", 0.0, 60, prompt_len=100, max_tokens=100))
    with faults.injected():
        step_until(engine, look)

    stats = engine.scheduler.sola_stats()
    before = max(tokens for num_failures, tokens in ordered_at if not num_failures)
    assert faults.total == 1
    assert stats["failures"] == {"booking copies that ended": 1}
    assert 0 < before < stats["swap"]["num_swapped_out"] + stats["swap"]["num_saved_ahead"]
    assert not stats["swap"]["has_ended"]
    assert not stats["is_aside"]
    assert all(record.num_output_tokens == 60 for record in engine.records)


def test_swapping_that_always_fails_ends_and_planning_goes_on() -> None:
    engine = make_engine(1, async_scheduling=True)
    for number in range(20):
        engine.add(VirtualRequest(f"r{number}", 0.0, 60, prompt_len=100, max_tokens=100))
    with Faults("slots taken", share=1.0).injected() as faults:
        step_until(engine, lambda: False)

    stats = engine.scheduler.sola_stats()
    assert stats["swap"]["has_ended"]
    assert stats["failures"] == {"ordering a copy": faults.total}
    assert faults.total == PATIENCE + 1
    assert not stats["is_aside"]
    assert all(record.num_output_tokens == 60 for record in engine.records)
    assert_nothing_is_lost(engine, {})
