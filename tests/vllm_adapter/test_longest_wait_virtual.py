"""`max_wait_s` where more comes than an engine can serve, under vLLM's real scheduler."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, make_workload

import sola_sched

pytestmark = pytest.mark.vllm


def test_a_bound_on_waits_costs_no_work() -> None:
    """Nobody who has waited loses slot and KV to the next one who has."""
    ends_s, preemptions = [], []
    for options in ({}, {"max_wait_s": 3.0}):
        engine = make_small_engine(sola_sched.Scheduler, {"ttft_s": 0.4, "tpot_s": 0.05, **options})
        engine.run(make_workload(300, 40.0))
        ends_s.append(engine.clock.now)
        preemptions.append(sum(record.num_preemptions for record in engine.records))

    assert ends_s[1] < 1.1 * ends_s[0]
    assert preemptions[1] <= preemptions[0] + 15
