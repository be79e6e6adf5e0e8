from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sola_sched.bench import values
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError
from sola_sched.workloads import lengths
from sola_sched.workloads.lengths import TruncatedLognormal
from sola_sched.workloads.workload import (
    FIRST_PLAIN_TOKEN,
    RequestSpec,
    SloClass,
    Workload,
    arrival_times,
    assign_classes,
    random_token_ids,
)

#: Kolmogorov-Smirnov bound at n = 4000: 1.95 / sqrt(n) is passed by chance once in 1,000 runs.
KS_BOUND = 1.95 / math.sqrt(4000)


def make_workload(num_requests: int, gap_s: float = 1.0) -> Workload:
    return Workload(
        tuple(
            RequestSpec(str(i), (5, 6, 7), output_tokens=4, arrival_s=i * gap_s)
            for i in range(num_requests)
        )
    )


@given(
    num_requests=st.integers(1, 300),
    rate=st.floats(0.01, 1000.0),
    burstiness=st.floats(0.05, 50.0),
    seed=st.integers(0, 1000),
)
def test_realised_rate_is_the_rate_asked_for(
    num_requests: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(num_requests, rate, burstiness, seed)

    assert len(times) == num_requests
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert num_requests / times[-1] == pytest.approx(rate)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_spread_of_the_gamma_distribution(burstiness: float) -> None:
    gaps = np.diff(arrival_times(20_000, 5.0, burstiness, seed=3))

    assert gaps.mean() == pytest.approx(1 / 5.0, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_are_exponential_with_their_long_tail() -> None:
    gaps = np.sort(np.diff(arrival_times(4001, 2.0, seed=11)))

    expected = 1 - np.exp(-2.0 * gaps)
    empirical = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(empirical - expected).max() < KS_BOUND
    assert gaps.max() > 5 / 2.0  # P(no gap of 4000 beyond 5 means) < 1e-11: nothing is cut off


def test_infinite_rate_sends_all_at_once_and_infinite_burstiness_is_even() -> None:
    assert arrival_times(3, math.inf).tolist() == [0.0, 0.0, 0.0]
    assert arrival_times(4, 2.0, math.inf).tolist() == [0.5, 1.0, 1.5, 2.0]


def test_same_seed_gives_same_arrivals() -> None:
    assert arrival_times(50, 3.0, seed=7).tolist() == arrival_times(50, 3.0, seed=7).tolist()
    assert arrival_times(50, 3.0, seed=7).tolist() != arrival_times(50, 3.0, seed=8).tolist()


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_impossible_traffic_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match="must be > 0"):
        arrival_times(3, rate, burstiness)


def test_rates_share_their_requests_and_the_shape_of_their_arrivals() -> None:
    workload = make_workload(20)

    slow, fast = workload.at_rate(1.0, seed=5), workload.at_rate(4.0, seed=5)

    assert [r.prompt_token_ids for r in slow.requests] == [
        r.prompt_token_ids for r in fast.requests
    ]
    assert [r.arrival_s for r in slow.requests] == pytest.approx(
        [4 * r.arrival_s for r in fast.requests]
    )


def test_one_request_alone_keeps_its_arrival_at_any_rate() -> None:
    alone = make_workload(1).stretched_to(5.0)

    assert [request.arrival_s for request in alone.requests] == [0.0]
    assert alone.request_rate == 5.0


def test_recorded_arrivals_are_stretched_to_a_rate() -> None:
    workload = make_workload(11, gap_s=2.0).stretched_to(5.0)

    assert workload.requests[-1].arrival_s == pytest.approx(11 / 5.0)
    assert make_workload(3).stretched_to(math.inf).requests[-1].arrival_s == 2.0
    at_once = make_workload(3, gap_s=0.0)
    assert at_once.stretched_to(math.inf) is at_once
    with pytest.raises(ConfigError, match="not all at once"):
        at_once.stretched_to(5.0)


def test_classes_are_assigned_by_share() -> None:
    chat = SloClass("chat", 3.0, SloTarget(0.5, 0.05))
    batch = SloClass("batch", 1.0, SloTarget(5.0, 0.5))

    requests = assign_classes(make_workload(4000), [chat, batch], seed=1).requests

    share = sum(r.slo_class == "chat" for r in requests) / len(requests)
    assert share == pytest.approx(0.75, abs=0.03)
    assert {(r.slo_class, r.slo) for r in requests} == {("chat", chat.slo), ("batch", batch.slo)}


def test_targets_and_classes_of_the_command_line() -> None:
    assert values.parse_slo(["e2el:9000", "ttft:500"]) == SloTarget(0.5, e2e_s=9.0)
    job = values.parse_slo_class("job:0.3:none:none:60000:2")
    assert job == SloClass("job", 0.3, SloTarget(e2e_s=60.0, weight=2.0))
    chat = values.parse_slo_class("chat:0.7:500:50")
    assert chat == SloClass("chat", 0.7, SloTarget(0.5, 0.05))


def test_random_prompts_avoid_special_tokens() -> None:
    ids = random_token_ids(np.random.default_rng(0), 5000, vocab_size=64)

    assert min(ids) == FIRST_PLAIN_TOKEN
    assert max(ids) == 63


@pytest.mark.parametrize("fit", [lengths.SHAREGPT_PROMPT, lengths.SHAREGPT_OUTPUT])
def test_samples_follow_the_documented_fit(fit: TruncatedLognormal) -> None:
    sample = np.sort(fit.sample(np.random.default_rng(0), 4000))

    support = np.unique(sample)
    empirical = np.searchsorted(sample, support, side="right") / len(sample)
    expected = np.array([fit.cdf(tokens) for tokens in support])
    assert np.abs(empirical - expected).max() < KS_BOUND
    assert sample[0] >= fit.low
    assert sample[-1] <= fit.high


def test_fits_reproduce_the_documented_quantiles() -> None:
    assert lengths.SHAREGPT_PROMPT.cdf(1681) == pytest.approx(0.5, abs=0.01)
    assert lengths.SHAREGPT_PROMPT.cdf(7101) == pytest.approx(0.95, abs=0.01)
    assert lengths.SHAREGPT_OUTPUT.cdf(408) == pytest.approx(0.5, abs=0.01)
    assert lengths.SHAREGPT_OUTPUT.cdf(944) == pytest.approx(0.95, abs=0.01)


@settings(max_examples=50)
@given(st.floats(0, 12), st.floats(0.1, 4), st.integers(1, 50), st.integers(51, 5000))
def test_truncated_lengths_stay_in_range(mu: float, sigma: float, low: int, high: int) -> None:
    fit = TruncatedLognormal(mu, sigma, low, high)
    floor, ceiling = fit._ends()
    assume(ceiling - floor > 1e-6)  # else there is no mass between the cuts

    sample = fit.sample(np.random.default_rng(0), 50)

    assert low <= sample.min() <= sample.max() <= high
    assert fit.cdf(low - 1) == 0.0
    assert fit.cdf(high) == pytest.approx(1.0)
