"""Rough machines: the pace by hand, the same whatever the steps are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sola_sched.simulator.steps.rough import CELL_S, ROUGHNESSES, Roughness, RoughStepTime


def machine(roughness: Roughness, seed: int = 0) -> RoughStepTime:
    rough = RoughStepTime(lambda output, requests: output.work_s, roughness, seed)
    rough.begin(lambda: 0.0, 0.0)
    return rough


def total_s(roughness: Roughness, work_s: float = 1200.0) -> float:
    """How long work takes that takes 20 minutes by the profile."""
    return machine(roughness).end_s(0.0, work_s)


def test_an_even_machine_keeps_to_its_profile() -> None:
    assert machine(Roughness()).end_s(1.23, 4.56) == pytest.approx(5.79)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("stalls", 1200.0 * 20.0 / 19.5),
        ("bursts", 1200.0 * 10.0 / (8.0 + 2.0 / 1.6)),
        ("drift", 1200.0 * 0.3 / np.log(1.3)),
        ("jitter", 1200.0 / np.exp(0.25**2 / 2.0)),
    ],
)
def test_the_mean_pace_is_what_the_roughness_says(name: str, seconds: float) -> None:
    assert total_s(ROUGHNESSES[name]) == pytest.approx(seconds, rel=0.01)


def test_a_stall_is_half_a_second_in_which_nothing_ends() -> None:
    rough = machine(ROUGHNESSES["stalls"])
    ends = np.array([rough.end_s(start, 0.01) - start for start in np.arange(0.0, 20.0, 0.01)])
    assert ends.max() == pytest.approx(0.51, abs=CELL_S)
    assert np.count_nonzero(ends > 0.011) * 0.01 == pytest.approx(0.5, abs=2 * CELL_S)


@pytest.mark.parametrize("name", ["stalls", "bursts", "drift", "jitter"])
def test_the_pace_does_not_depend_on_the_steps(name: str) -> None:
    """Whole or in small parts, the same work ends at the same time; other seeds differ."""
    rough = machine(ROUGHNESSES[name])
    now_s = 0.0
    for _ in range(3000):
        now_s = rough.end_s(now_s, 0.01)
    assert now_s == pytest.approx(rough.end_s(0.0, 30.0))
    paces = [[ROUGHNESSES[name].pace(cell, seed) for cell in range(400)] for seed in (0, 1)]
    assert (paces[0] != paces[1]) == (name != "drift")


def test_a_step_begins_when_that_before_has_ended_and_pays_for_its_requests() -> None:
    """While one runs the next is scheduled: its start is not the clock's time."""
    rough = machine(Roughness(drift=1.0, drift_s=1.0, host_s_per_request=0.01))
    step = SimpleNamespace(work_s=0.1, num_scheduled_tokens={"a": 1, "b": 1})
    first = rough(step, {})
    assert first == pytest.approx(rough.end_s(0.0, 0.12))
    assert rough(step, {}) == pytest.approx(rough.end_s(first, 0.12) - first)


def test_before_its_start_it_is_even() -> None:
    rough = machine(Roughness(drift=1.0))
    rough.begin(lambda: 0.0, 10.0)
    assert rough.end_s(5.0, 1.0) == 6.0
    assert rough.end_s(10.0, 1.0) > 11.0
