"""Two real engines, each in its own process, that take turns on one core."""

from __future__ import annotations

from dataclasses import replace

import pytest
from marks import LONG

pytest.importorskip("vllm", exc_type=ImportError)

from colocation.experiments import pause_at_a_kill
from colocation.pair import Service, group, pair
from sola_sched.bench.backends.model import TINY_SHAPE
from sola_sched.config.slo import SloTarget

#: In CI: the lease with processes that are killed, and an engine with others in its group.
pytestmark = [pytest.mark.vllm, *LONG]
SLO = SloTarget(5.0, 0.5)


def test_two_engines_in_turns_answer_all_requests() -> None:
    services = (Service("a", 60, 40, 4.0, 1.0, SLO), Service("b", 100, 20, 4.0, 1.0, SLO))
    with group() as name, pair(services, TINY_SHAPE, 0) as engines:
        # The first steps of an engine that has just started may be long.
        turns = [{"group": name, "share": share, "limit_s": 60.0} for share in (0.3, 0.6)]
        engines.begin("sola", turns, 3.0, 0)
        for number, service in enumerate(services):
            records, stats = engines.result(number)

            assert len(records) == 12, service
            assert all(record.completed for record in records)
            assert stats.num_waits > 0
            assert stats.num_lost == stats.num_taken_over == 0


def test_a_holder_that_is_killed_costs_the_other_engine_no_request() -> None:
    shape = replace(TINY_SHAPE, max_model_len=2048)  # its answers are long
    pause_at_a_kill(0, shape)  # asserts that all are answered, and that it held the turn
