"""Curves of step times are fitted to recorded steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_steps import FIT_TOLERANCE, known_s, make_batch, random_batches

from sola_sched.cost.model import CostModel
from sola_sched.errors import ProfileError
from sola_sched.simulator.bound.floors import floors_of
from sola_sched.simulator.steps.curves import CURVES, META_KEY, StepCurves
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.time import MeasuredStepTime


def test_fit_recovers_a_known_step_time_on_batches_it_has_not_seen() -> None:
    noise = np.random.default_rng(1).normal(1.0, 0.02, 600)
    training = random_batches(600, seed=0)

    fitted = StepCurves.fit(
        training, [known_s(b) * n for b, n in zip(training, noise, strict=True)]
    )

    errors = [fitted.step_s(b) / known_s(b) - 1.0 for b in random_batches(200, seed=2)]
    assert np.mean(np.abs(errors)) < FIT_TOLERANCE
    assert abs(np.mean(errors)) < FIT_TOLERANCE / 2


def test_a_fit_never_gets_faster_with_more_work() -> None:
    rng = np.random.default_rng(3)
    batches = random_batches(100, seed=0)

    fitted = StepCurves.fit(batches, [known_s(b) * rng.lognormal(0, 0.5) for b in batches])

    for name in CURVES:
        assert all(y0 <= y1 and x0 < x1 for (x0, y0), (x1, y1) in pairwise(fitted.curves[name]))
    assert min(fitted.linear.values()) >= 0.0


def test_a_pause_of_the_engine_does_not_spoil_a_fit() -> None:
    batches = random_batches(400, seed=0)
    times = [known_s(b) for b in batches]
    times[::40] = [5.0] * len(times[::40])

    fitted = StepCurves.fit(batches, times)

    errors = [abs(fitted.step_s(b) / known_s(b) - 1.0) for b in random_batches(100, seed=2)]
    assert np.mean(errors) < FIT_TOLERANCE


def test_an_empty_step_takes_no_time_and_an_empty_fit_is_refused() -> None:
    fitted = StepCurves.fit([make_batch(1)], [1.0])

    assert fitted.step_s(make_batch()) == 0.0
    with pytest.raises(ProfileError, match="needs measured steps"):
        StepCurves.fit([], [])


def test_curves_in_a_profile_are_used_by_the_simulator_and_ignored_by_the_scheduler(
    tmp_path: Path,
) -> None:
    batches = random_batches(100, seed=0)
    curves = StepCurves.fit(batches, [known_s(b) for b in batches])
    cost = CostModel.fit([(b.shape, known_s(b)) for b in batches])
    path = tmp_path / "engine.json"
    cost.save(path, meta={META_KEY: curves.to_json(), "async_scheduling": False})

    profile = load_step_profile(str(path))

    assert isinstance(profile.step_time, MeasuredStepTime)
    assert profile.step_time.curves == curves
    assert CostModel.load(path).coefficients == cost.coefficients
    output = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 20}, scheduled_new_reqs=["b"])
    requests = {
        "a": SimpleNamespace(num_computed_tokens=101, num_prompt_tokens=50, num_tokens=101),
        "b": SimpleNamespace(num_computed_tokens=20, num_prompt_tokens=20, num_tokens=20),
    }
    expected = make_batch(1, (0, 20), context=101)
    assert profile.step_time(output, requests) == pytest.approx(curves.step_s(expected))


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored.pop("linear"),
        lambda stored: stored["linear"]["is_step"].update(value=-1.0),
        lambda stored: stored["curves"]["num_tokens"].update(points=[[0, 0], [2, 1], [4, 0.5]]),
        lambda stored: stored["curves"]["num_tokens"].update(points=[[1, 1], [2, 1]]),
    ],
)
def test_damaged_curves_are_refused(change: Any) -> None:
    stored = StepCurves.fit([make_batch(2), make_batch(9)], [1.0, 2.0]).to_json()
    change(stored)

    with pytest.raises(ProfileError, match=META_KEY):
        StepCurves.from_json(stored)


@settings(max_examples=50, deadline=None)
@given(
    decodes=st.integers(0, 200),
    context=st.integers(1, 5000),
    chunks=st.lists(st.tuples(st.integers(0, 3000), st.integers(2, 3000)), max_size=4),
    seed=st.integers(0, 3),
)
def test_no_curved_step_is_shorter_than_its_floor(
    decodes: int, context: int, chunks: list[tuple[int, int]], seed: int
) -> None:
    batches = random_batches(60, seed)
    curves = StepCurves.fit(batches, [known_s(b) for b in batches])
    cost = CostModel.fit([(b.shape, known_s(b)) for b in batches])
    cost.meta = {META_KEY: curves.to_json()}
    batch = make_batch(decodes, *chunks, context=context)
    if not batch.num_tokens:
        return

    (floor,) = floors_of(MeasuredStepTime(cost))

    low_s = floor.base_s + decodes * (floor.per_decode_s + floor.per_ctx_s * (context - 1))
    for has, n in chunks:
        low_s += floor.per_prefill_token_s * n + floor.per_prefill_attn_s * n * (has + n / 2)
    assert low_s <= curves.step_s(batch) * (1 + 1e-9)
