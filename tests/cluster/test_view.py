"""What a router knows: views, reports that cannot be true, and what was sent since the last one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cluster_views import make_routed, make_view
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.cluster.reports import Reports
from sola_sched.cluster.view import candidates, refusal
from sola_sched.errors import ReportError


def test_a_view_counts_its_requests_its_lost_and_the_smallest_bank() -> None:
    view = make_view(
        waiting=[10, 20],
        running=[100, 200, 300],
        running_bank_s=np.array([0.5, -1.0, 0.2]),
        running_lost=np.array([0.0, 1.0, 0.0]),
        num_waiting_lost=1,
        max_num_seqs=4,
    )

    assert (view.num_waiting, view.num_running, view.num_requests) == (2, 3, 5)
    assert view.num_lost == 2
    assert view.num_free_slots == 1
    assert view.bank_s == 0.2  # that of the lost one does not count
    assert view.kv_expected_tokens == 600 + 300 + 30 + 200


def test_a_view_without_decodes_has_no_bank_to_lose() -> None:
    assert make_view(waiting=[10]).bank_s == math.inf


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_capacity_tokens": 0}, "kv_capacity_tokens"),
        ({"kv_capacity_tokens": 1.5}, "kv_capacity_tokens"),
        ({"kv_used_tokens": -1}, "kv_used_tokens"),
        ({"kv_used_tokens": 100_001}, "kv_used_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"running": [1, 1, 1], "max_num_seqs": 2}, "num_running"),
        ({"num_gpus": True}, "num_gpus"),
        ({"reported_s": math.nan}, "reported_s"),
        ({"reported_s": 1e9}, "reported_s"),
        ({"waiting_tokens": np.array([math.nan])}, "waiting_"),
        ({"waiting": [1], "waiting_outputs": np.array([-1.0])}, "waiting_outputs"),
        ({"waiting": [1], "waiting_outputs": np.array([1.0, 2.0])}, "waiting_outputs"),
        ({"waiting": [1], "waiting_outputs": np.array([math.inf])}, "waiting_outputs"),
        ({"running": [1], "running_bank_s": np.array([math.nan])}, "running_bank_s"),
        ({"running": [1], "running_left": [1.0]}, "running_left"),
        ({"num_waiting_lost": 1}, "num_waiting_lost"),
        ({"waiting": [1, 1], "num_waiting_lost": 1.5}, "num_waiting_lost"),
        ({"num_waiting_lost": None}, "num_waiting_lost"),
        ({"kv_capacity_tokens": 10**400}, "kv_capacity_tokens"),
        ({"serves_lost_last": "no"}, "serves_lost_last"),
    ],
)
def test_a_report_that_cannot_be_true_names_what_is_wrong(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ReportError, match=named):
        make_view(**changes).check(now_s=0.0)


def test_a_decode_without_tpot_target_has_an_endless_bank_and_is_no_nonsense() -> None:
    make_view(running=[10], running_bank_s=np.array([math.inf])).check(now_s=0.0)


def test_nonsense_is_ignored_and_counted_and_the_last_report_stands() -> None:
    reports = Reports()
    reports.join(make_view(waiting=[1]), now_s=0.0)

    taken = reports.report(0, make_view(kv_used_tokens=-5, reported_s=1.0), now_s=1.0)

    assert not taken
    assert reports.num_ignored == 1
    assert reports.views[0].num_waiting == 1


def test_of_nonsense_without_end_the_first_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports()
    reports.join(make_view(), now_s=0.0)

    def report(used: int, now_s: float) -> int:
        reports.report(0, make_view(kv_used_tokens=used, reported_s=now_s), now_s=now_s)
        return len(caplog.records)

    assert [report(-5, 1.0 + n) for n in range(3)] == [1, 1, 1]
    assert [report(5, 4.0), report(-5, 5.0), report(-5, 6.0)] == [1, 2, 2]
    assert reports.num_ignored == 5


def test_a_report_that_is_overtaken_by_a_newer_one_is_ignored() -> None:
    reports = Reports()
    reports.join(make_view(), now_s=0.0)
    reports.report(0, make_view(reported_s=2.0), now_s=2.0)

    assert not reports.report(0, make_view(waiting=[1], reported_s=1.0), now_s=2.1)
    assert reports.views[0].num_waiting == 0


def test_what_was_sent_counts_until_a_report_has_it() -> None:
    reports = Reports(delivery_s=0.01)
    reports.join(make_view(), now_s=0.0)
    reports.sent(0, make_routed("early", prompt_tokens=7), now_s=0.1)
    reports.sent(0, make_routed("late", prompt_tokens=9), now_s=0.2)

    reports.report(0, make_view(running=[7], reported_s=0.2), now_s=0.3)

    # "late" was still on its way when the report was made.
    assert reports.views[0].waiting_tokens.tolist() == [9.0]
    assert reports.views[0].num_unreported == 1
    assert reports.views[0].num_running == 1


def test_what_ends_before_a_report_has_it_is_gone() -> None:
    reports = Reports()
    reports.join(make_view(), now_s=0.0)
    reports.sent(0, make_routed("a"), now_s=0.1)
    reports.sent(0, make_routed("b", prompt_tokens=5), now_s=0.1)

    reports.ended(0, "a")

    assert reports.views[0].waiting_tokens.tolist() == [5.0]


def test_the_dead_stay_dead_whatever_they_report() -> None:
    reports = Reports()
    reports.join(make_view(), now_s=0.0)
    reports.died(0)

    reports.report(0, make_view(reported_s=1.0), now_s=1.0)

    assert not reports.views[0].is_alive


def test_the_silent_get_nothing_until_they_report_again() -> None:
    reports = Reports(silent_s=1.0)
    reports.join(make_view(), now_s=0.0)

    reports.sent(0, make_routed("a"), 0.5)
    reports.expire(1.5)
    assert not reports.views[0].is_alive
    reports.ended(0, "a")
    assert not reports.views[0].is_alive

    reports.report(0, make_view(reported_s=1.6), now_s=1.7)
    assert reports.views[0].is_alive


def test_an_instance_that_joins_with_nonsense_is_refused() -> None:
    with pytest.raises(ReportError, match="max_model_len"):
        Reports().join(make_view(max_model_len=0), now_s=0.0)


@given(
    events=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["send", "end", "report"]))),
)
def test_views_always_equal_the_report_and_what_is_open_since(
    events: list[tuple[int, str]],
) -> None:
    reports = Reports()
    for _ in range(3):
        reports.join(make_view(), now_s=0.0)
    open_since: list[list[str]] = [[], [], []]
    for now, (instance, event) in enumerate(events, start=1):
        if event == "send":
            reports.sent(instance, make_routed(f"r{now}"), float(now))
            open_since[instance].append(f"r{now}")
        elif event == "end" and open_since[instance]:
            reports.ended(instance, open_since[instance].pop(0))
        elif event == "report":
            reports.report(instance, make_view(reported_s=float(now)), float(now))
            open_since[instance].clear()

    assert [view.num_unreported for view in reports.views] == [len(x) for x in open_since]
    assert [view.num_waiting for view in reports.views] == [len(x) for x in open_since]


def test_candidates_are_alive_large_enough_and_not_those_that_failed() -> None:
    views = [
        make_view(),
        make_view(is_alive=False),
        make_view(kv_capacity_tokens=100),
        make_view(max_model_len=100),
        make_view(),
    ]

    assert candidates(make_routed(prompt_tokens=100), views) == [0, 4]
    assert candidates(make_routed(prompt_tokens=100, avoid=[0]), views) == [4]
    # Better one that has failed than none.
    assert candidates(make_routed(prompt_tokens=100, avoid=[0, 4]), views) == [0, 4]


def test_a_refusal_says_whether_nobody_lives_or_nobody_is_large_enough() -> None:
    request = make_routed(prompt_tokens=5000)

    assert "none of 1 instances is alive" in refusal(request, [make_view(is_alive=False)]).reason
    assert "5000 tokens" in refusal(request, [make_view(max_model_len=4096)]).reason
    assert "4096 tokens" in refusal(request, [make_view(max_model_len=4096)]).reason
