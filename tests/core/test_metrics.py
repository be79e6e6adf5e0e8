from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.core.metrics import RequestRecord

SLO = SloTarget(ttft_s=0.5, tpot_s=0.1)


def make_record(
    *times_s: float, arrival_s: float = 0.0, completed: bool = True, **fields: object
) -> RequestRecord:
    return RequestRecord(
        req_id="r",
        arrival_s=arrival_s,
        num_prompt_tokens=10,
        token_times_s=list(times_s),
        completed=completed,
        **fields,  # type: ignore[arg-type]
    )


def test_latencies_run_from_arrival() -> None:
    record = make_record(10.4, 10.5, 10.8, arrival_s=10.0, sent_s=10.3)

    assert record.ttft_s == pytest.approx(0.4)
    assert record.latency_s == pytest.approx(0.8)
    assert record.tpot_s == pytest.approx((0.8 - 0.4) / 2)
    assert record.itls_s == pytest.approx([0.1, 0.3])


def test_single_token_output_has_no_tpot_and_meets_it() -> None:
    record = make_record(0.2)

    assert math.isnan(record.tpot_s)
    assert record.itls_s == []
    assert record.attains(SloTarget(ttft_s=0.5, tpot_s=1e-9))


@pytest.mark.parametrize(
    ("record", "attains"),
    [
        pytest.param(make_record(0.5, 0.6), True, id="both exactly on target"),
        pytest.param(make_record(0.51, 0.6), False, id="first token late"),
        pytest.param(make_record(0.1, 0.3), False, id="tokens slow"),
        pytest.param(make_record(0.1, 0.15, completed=False), False, id="lost"),
        pytest.param(make_record(completed=False, error="rejected"), False, id="rejected"),
        pytest.param(make_record(), False, id="no token although marked complete"),
    ],
)
def test_request_attains_iff_complete_and_within_both_targets(
    record: RequestRecord, attains: bool
) -> None:
    assert record.attains(SLO) is attains


def test_own_targets_of_a_request_replace_those_of_the_run() -> None:
    slow = make_record(0.9, 1.5, slo=SloTarget(ttft_s=1.0, tpot_s=1.0))
    strict = make_record(0.2, 0.21, slo=SloTarget(ttft_s=0.1))

    assert metrics.attained([slow, strict], SLO).tolist() == [True, False]


def test_the_last_token_has_to_be_in_time_where_it_is_due() -> None:
    record = make_record(10.4, 10.5, 10.8, arrival_s=10.0)

    assert record.attains(SloTarget(e2e_s=0.8 + 1e-9))
    assert not record.attains(SloTarget(e2e_s=0.79))
    assert not record.attains(SloTarget(ttft_s=0.3, e2e_s=0.9))


def test_weights_count_in_goodput_and_share() -> None:
    heavy = SloTarget(ttft_s=0.5, weight=3.0)
    records = [make_record(0.1, slo=heavy), make_record(0.9, slo=heavy), make_record(0.1)]

    flags, worth = metrics.attained(records, SLO), metrics.weights(records, SLO)

    assert worth.tolist() == [3.0, 3.0, 1.0]
    assert metrics.goodput_per_s(flags, 2.0, worth) == 2.0
    assert metrics.weighted_ratio(flags, worth) == pytest.approx(4 / 7)
    assert math.isnan(metrics.weighted_ratio([], []))


def test_goodput_counts_attained_requests_per_second() -> None:
    records = [make_record(0.1), make_record(0.9), make_record(completed=False), make_record(0.4)]

    flags = metrics.attained(records, SLO)

    assert metrics.attainment_ratio(flags) == 0.5
    assert metrics.goodput_per_s(flags, duration_s=4.0) == 0.5


def test_goodput_needs_a_duration() -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        metrics.goodput_per_s([True], 0.0)


def test_attainment_of_no_requests_is_undefined() -> None:
    assert math.isnan(metrics.attainment_ratio([]))


def test_attainment_is_split_by_class() -> None:
    records = [
        make_record(0.1, slo_class="chat"),
        make_record(0.9, slo_class="chat"),
        make_record(0.9),
    ]

    assert metrics.attainment_by_class(records, SLO) == {
        "chat": {"attainment": 0.5, "num_requests": 2, "weight": 1.0},
        "default": {"attainment": 0.0, "num_requests": 1, "weight": 1.0},
    }
    assert metrics.worst_class(metrics.attainment_by_class(records, SLO)) == "default"


@pytest.mark.parametrize(
    ("rates", "ratios", "crossing"),
    [
        ([4, 6, 8], [1.0, 0.95, 0.85], 7.0),
        ([8, 4, 6], [0.85, 1.0, 0.95], 7.0),
        ([4, 6], [0.8, 0.5], 0.0),
        ([4, 6], [1.0, 0.9], math.inf),
        ([4, 6, 8, 10], [1.0, 0.89, 0.91, 0.89], 9.0),
        ([5], [0.95], math.inf),
    ],
)
def test_crossing_rate(rates: list[float], ratios: list[float], crossing: float) -> None:
    assert metrics.crossing_rate(rates, ratios, level=0.9) == pytest.approx(crossing)


def test_crossing_rate_needs_pairs() -> None:
    with pytest.raises(ValueError, match="of one length"):
        metrics.crossing_rate([1.0, 2.0], [0.5])


def test_describe_skips_undefined_values() -> None:
    row = metrics.describe([1.0, math.nan, 3.0], [50, 99.9])

    assert row["mean"] == 2.0
    assert row["median"] == row["p50"] == 2.0
    assert row["p99.9"] == pytest.approx(np.percentile([1, 3], 99.9))
    assert math.isnan(metrics.describe([], [99])["p99"])


def test_peak_rates_count_one_second_buckets() -> None:
    records = [
        make_record(5.1, 5.2, 6.5, arrival_s=5.0),
        make_record(6.6, 6.7, 6.8, arrival_s=6.2),
        make_record(6.9, arrival_s=6.0, completed=False),
    ]

    assert metrics.peak_rates(records) == (4.0, 2)
    assert metrics.peak_rates([]) == (0.0, 0)


@given(
    st.lists(st.floats(0.001, 5.0), min_size=2, max_size=40),
    st.floats(0.0, 100.0),
    st.floats(0.0, 3.0),
)
def test_tpot_is_the_mean_gap_and_latency_their_sum(
    gaps_s: list[float], arrival_s: float, first_s: float
) -> None:
    times_s = arrival_s + first_s + np.cumsum([0.0, *gaps_s])
    record = make_record(*times_s.tolist(), arrival_s=arrival_s)

    assert record.tpot_s == pytest.approx(np.mean(gaps_s), rel=1e-6, abs=1e-9)
    assert record.ttft_s + sum(record.itls_s) == pytest.approx(record.latency_s)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.4)), min_size=1, max_size=30))
def test_looser_targets_never_lower_attainment(points: list[tuple[float, float]]) -> None:
    records = [make_record(ttft_s, ttft_s + tpot_s) for ttft_s, tpot_s in points]

    strict = metrics.attainment_ratio(metrics.attained(records, SLO))
    loose = metrics.attainment_ratio(metrics.attained(records, SloTarget(1.0, 0.2)))

    assert loose >= strict


def test_peaks_of_rare_arrivals_need_no_bucket_for_every_second() -> None:
    far = RequestRecord("b", arrival_s=1e15, num_prompt_tokens=1)
    near = RequestRecord("a", arrival_s=0.0, num_prompt_tokens=1)
    near.token_times_s, far.token_times_s = [0.5, 0.75, 1.5], [1e15 + 1.0]
    near.completed = far.completed = True

    assert metrics.peak_rates([near, far]) == (2.0, 1)
