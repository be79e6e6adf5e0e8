"""Which requests count as attained, missed, rejected and aborted; by class too."""

from __future__ import annotations

import numpy as np
import pytest
from states import FixedLengths, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.outcomes import ClassOutcomes
from sola_sched.reports.log import engine_stats, summary_line

SLO = SloTarget(1.0, 1.0)
NONE = np.empty(0, dtype=np.int64)
COUNTS = {"num_held": 0, "num_preempted_by_policy": 0, "short_of_slots": 0.0}


class Requests:
    """Requests with a TTFT target of 1 s, each ending in its own way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.monitor = StateMonitor(make_cost(), FixedLengths(), lambda: self.now)

    def add(self, name: str, slo: SloTarget = SLO, **options: str) -> int:
        return self.monitor.add(
            name,
            num_prompt_tokens=10,
            max_tokens=9,
            slo=slo,
            arrival_s=self.now,
            **options,  # type: ignore[arg-type]
        )

    def answer(self, row: int, after_s: float) -> None:
        self.monitor.admitted(row, num_computed=0, prefill_target=10)
        self.monitor.scheduled(NONE, np.array([row]), np.array([10]))
        self.now += after_s
        self.monitor.completed()

    def serve(self, count: int, after_s: float, **options: str) -> None:
        for _ in range(count):
            name = f"served{self.monitor.table.num_added}"
            self.answer(self.add(name, **options), after_s)
            self.monitor.finished(name)

    def end(self, count: int, *, after_s: float = 0.0, **how: bool) -> None:
        names = [f"ended{self.monitor.table.num_added + i}" for i in range(count)]
        for name in names:
            self.add(name)
        self.now += after_s
        for name in names:
            self.monitor.finished(name, by_itself=False, **how)

    @property
    def stats(self) -> dict[str, object]:
        return engine_stats("attain", self.monitor)


def test_rejected_requests_have_not_attained_their_targets() -> None:
    requests = Requests()
    requests.serve(40, after_s=0.1)
    requests.end(60, rejected=True)
    stats = requests.stats
    assert stats["attainment"] == pytest.approx(0.4)
    assert stats["ttft_attainment"] == pytest.approx(0.4)
    assert (stats["num_finished"], stats["num_rejected"], stats["num_aborted"]) == (40, 60, 0)
    assert "attained 40.0% (TTFT 40.0%" in summary_line(stats | COUNTS, 0, 0)


def test_the_log_line_tells_of_last_tokens_where_any_are_due() -> None:
    requests = Requests()
    requests.serve(2, after_s=0.1)
    assert "TPOT 100.0%), " in summary_line(requests.stats | COUNTS, 0, 0)
    for slow_s in (0.1, 0.3):
        row = requests.add("due", slo=SloTarget(e2e_s=0.2))
        requests.answer(row, slow_s)
        requests.monitor.finished("due")
    assert requests.stats["e2e_attainment"] == pytest.approx(0.5)
    assert requests.stats["attainment"] == pytest.approx(0.75)
    assert "TPOT 100.0%, last token 50.0%), " in summary_line(requests.stats | COUNTS, 0, 0)


def test_failed_requests_have_not_attained_their_targets() -> None:
    requests = Requests()
    requests.serve(1, after_s=0.1)
    requests.end(3, failed=True)
    assert requests.stats["attainment"] == pytest.approx(0.25)
    assert requests.stats["num_failed"] == 3


def test_a_request_that_its_client_ends_in_time_counts_neither_way() -> None:
    requests = Requests()
    requests.serve(1, after_s=0.1)
    requests.end(5, after_s=0.9)
    assert requests.stats["attainment"] == 1.0
    assert requests.stats["num_aborted"] == 5


def test_a_request_that_its_client_gives_up_after_its_target_has_missed_it() -> None:
    requests = Requests()
    requests.serve(1, after_s=0.1)
    requests.end(3, after_s=1.1)
    assert requests.stats["attainment"] == pytest.approx(0.25)
    assert requests.stats["num_aborted"] == 3


def test_an_abort_counts_by_its_first_token_where_there_is_one() -> None:
    requests = Requests()
    for name, after_s in (("early", 0.9), ("late", 1.1)):
        requests.answer(requests.add(name), after_s)
        requests.now += 5.0
        requests.monitor.finished(name, by_itself=False)
    assert requests.monitor.stats.by_class["default"] == ClassOutcomes(missed=1, aborted=1)


def test_an_abort_after_the_last_token_was_due_is_a_miss() -> None:
    requests = Requests()
    for name, after_s in (("early", 1.9), ("late", 2.1)):
        requests.answer(requests.add(name, slo=SloTarget(e2e_s=2.0)), 0.1)
        requests.now += after_s - 0.1
        requests.monitor.finished(name, by_itself=False)
    assert requests.monitor.stats.by_class["default"] == ClassOutcomes(missed=1, aborted=1)


def test_an_answer_without_tokens_is_on_time_if_it_ends_in_time() -> None:
    requests = Requests()
    for name, after_s in (("early", 0.9), ("late", 1.1)):
        requests.add(name)
        requests.now += after_s
        requests.monitor.finished(name)
    assert requests.monitor.stats.by_class["default"] == ClassOutcomes(attained=1, missed=1)


def test_each_class_is_counted_apart_and_a_row_used_again_forgets_its_class() -> None:
    requests = Requests()
    requests.serve(3, after_s=0.1, slo_class="chat")
    requests.serve(2, after_s=1.1, slo_class="batch")
    requests.serve(1, after_s=1.1)
    requests.end(4, rejected=True)
    assert requests.monitor.stats.by_class == {
        "default": ClassOutcomes(missed=1, rejected=4),
        "chat": ClassOutcomes(attained=3),
        "batch": ClassOutcomes(missed=2),
    }
    assert requests.stats["by_class"]["chat"] == {  # type: ignore[index]
        "attained": 3,
        "missed": 0,
        "rejected": 0,
        "aborted": 0,
    }
