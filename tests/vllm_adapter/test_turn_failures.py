"""An engine whose part of the turns fails goes on without, and the others take theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from faults import TURN_SITES, Faults
from turn_takers import take
from virtual_runs import make_small_engine, make_workload

import sola_sched
from sola_sched.colocation.lease import Lease

pytestmark = [pytest.mark.vllm, pytest.mark.injects_failures]

#: Far above the time of a call; a turn that was kept would be waited for as long.
LIMIT_S = 60.0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("site", sorted(TURN_SITES))
def test_a_failure_of_the_lease_ends_turns_and_nothing_else(
    site: str, is_async: bool, tmp_path: Path
) -> None:
    group = {"group": str(tmp_path / "turns"), "share": 0.2, "limit_s": LIMIT_S}
    engine = make_small_engine(
        sola_sched.Scheduler,
        {"ttft_s": 0.5, "tpot_s": 0.05, "turns": group},
        async_scheduling=is_async,
    )
    scheduler, workload = engine.scheduler, make_workload(20, 5.0)
    neighbour = Lease(str(tmp_path / "turns"), name="neighbour", share=0.2, limit_s=LIMIT_S)
    try:
        with Faults(site, share=1.0, first=5 * (site == "turn wanted")).injected() as faults:
            records = engine.run(workload)
            scheduler.shutdown()
        take(neighbour)
        assert neighbour.has_turn
        assert neighbour.stats.waited_s < LIMIT_S / 2
    finally:
        neighbour.close()

    wanted = {request.req_id: request.output_len for request in workload}
    assert {r.req_id: r.num_output_tokens for r in records} == wanted
    assert faults.total == 1
    assert scheduler.sola_lease is None
    assert scheduler.sola_guard.num_failures.total() == 1
    assert not scheduler.sola_guard.is_aside


def test_a_waiter_goes_by_the_targets_that_hold_now(tmp_path: Path) -> None:
    """Whoever comes while the engine waits for its turn is not seen: it may be due so soon."""
    options = tmp_path / "options.json"
    group = {"group": str(tmp_path / "turns"), "share": 0.2, "limit_s": LIMIT_S}
    engine = make_small_engine(
        sola_sched.Scheduler,
        {"ttft_s": 2.0, "tpot_s": 0.05, "turns": group, "options_file": str(options)},
    )
    scheduler = engine.scheduler
    try:
        assert scheduler._turns._urgency_of_a_waiter() - engine.clock.now == 2.0
        options.write_text('{"ttft_s": 0.25}')
        scheduler._changing.look()
        assert scheduler._turns._urgency_of_a_waiter() - engine.clock.now == 0.25
    finally:
        scheduler.shutdown()
