"""Whatever happens, in whatever order, a monitor tells what the events themselves say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from monitored import KINDS_OF_EVENTS, Engine

from sola_sched.core.state import WAITING


@given(events=st.lists(st.tuples(st.sampled_from(KINDS_OF_EVENTS), st.integers(0, 5)), max_size=60))
def test_a_monitor_tells_what_has_happened(events: list[tuple[str, int]]) -> None:
    engine = Engine()
    for name, number in events:
        before = engine.table.epoch, engine.table.phase.copy(), set(engine.table.row_of)
        getattr(engine, name)(number)
        epoch, phase, names = before
        has_changed = names != set(engine.table.row_of) or (phase != engine.table.phase).any()
        assert (engine.table.epoch != epoch) or not has_changed
        engine.check()


def test_a_first_token_that_came_late_is_noted() -> None:
    engine = Engine()
    for name in ("arrive", "step", "step"):
        engine.now += 0.01
        getattr(engine, name)(1)
    engine.deliver(0)
    engine.part(2)  # nothing of the step that ends the prefill
    engine.step(0)
    assert np.isnan(engine.table.first_token_s[engine.rows(engine.running)]).all()
    engine.deliver(0)
    engine.check()
    assert engine.first_token_s == {"r1": engine.now}


def test_while_the_same_requests_compute_and_deliver_the_epoch_stands() -> None:
    engine = Engine()
    for name in ("arrive", "arrive", "step", "step", "step", "step", *["deliver"] * 4):
        getattr(engine, name)(1)
    assert engine.monitor.table.num_in_phase[WAITING] == 0
    epoch = engine.table.epoch
    for _ in range(5):
        engine.step(0)
        engine.step(0)
        engine.deliver(0)
        engine.deliver(0)
        engine.check()
    assert engine.table.epoch == epoch


@given(events=st.lists(st.tuples(st.sampled_from(KINDS_OF_EVENTS), st.integers(0, 5)), max_size=60))
def test_sums_over_a_batch_are_right_at_any_time(events: list[tuple[str, int]]) -> None:
    """Also when the same array is asked about again and again."""
    engine = Engine()
    table, rows, names = engine.table, np.empty(0, dtype=np.int64), [""]
    for name, number in events:
        getattr(engine, name)(number)
        if names != engine.running:
            rows, names = engine.rows(engine.running), list(engine.running)
        for _ in range(2):
            assert table.num_tokens(rows) == int((table.num_prompt + table.num_output)[rows].sum())
            assert table.shortest_tpot_s(rows) == table.tpot_s[rows].min(initial=np.inf)
