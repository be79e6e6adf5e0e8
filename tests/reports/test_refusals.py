"""What refused requests are told."""

from __future__ import annotations

import math

import pytest

from sola_sched.config.slo import SloTarget
from sola_sched.core.state import RequestTable
from sola_sched.reports.refusals import Refusal, wait_of


@pytest.mark.parametrize(
    ("wait_s", "retry_after_s"),
    [(0.2, 1), (1.0, 1), (3.01, 4), (1e6, 3600), (0.0, 1), (math.nan, 1), (math.inf, 1)],
)
def test_retry_after_is_the_wait_in_whole_seconds(wait_s: float, retry_after_s: int) -> None:
    refusal = Refusal.because_of(SloTarget(0.5, 0.05), wait_s)

    assert refusal.retry_after_s == retry_after_s


def test_the_message_names_targets_and_wait() -> None:
    told = Refusal.because_of(SloTarget(0.5, 0.05), 3.21)
    vague = Refusal.because_of(SloTarget(ttft_s=0.5), math.nan)

    assert told.message == (
        "the request could not have met its targets (TTFT 0.5 s, TPOT 0.05 s): "
        "it would have waited some 3.2 s"
    )
    assert vague.message == "the request could not have met its targets (TTFT 0.5 s)"


def test_a_refusal_is_read_back_from_the_stop_reason() -> None:
    refusal = Refusal.because_of(SloTarget(0.5, 0.05), 3.21)

    assert Refusal.from_stop_reason(refusal.to_stop_reason()) == refusal


@pytest.mark.parametrize("reason", [None, 7, "", "\n\n", "refused by sola_sched"])
def test_other_stop_reasons_are_no_refusals(reason: object) -> None:
    assert Refusal.from_stop_reason(reason) is None


def test_a_request_without_an_estimate_of_its_own_gets_that_of_the_longest_wait() -> None:
    table = RequestTable()
    new, first, last, runs = (table.add(name) for name in ("new", "first", "last", "runs"))
    assert math.isnan(wait_of(table, new))
    table.ewt_s[[first, last, runs]] = 2.0, 5.0, 0.0

    assert [wait_of(table, row) for row in (new, first, last)] == [5.0, 2.0, 5.0]
    table.remove("last")
    assert wait_of(table, new) == 2.0
