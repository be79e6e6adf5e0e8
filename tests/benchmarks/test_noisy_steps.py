"""Steps that take longer or shorter than predicted: nobody is given up for a false alarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from harness.points import SYNTHETIC, Point, make_workload
from sola_sched.bench.backends.base import RunOutcome, parse_scheduler
from sola_sched.bench.backends.simulation import SimBackend, SimOptions
from sola_sched.bench.first_run.virtual import PROFILE, TPOT_S, TTFT_S
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.simulator.steps.profile import load_step_profile

SLO = SloTarget(TTFT_S, TPOT_S)
#: Spread of step times; a slow spell begins after one step in 100, lasts 5 and doubles them.
_SIGMA, _SPELLS, _SPELL_STEPS, _SLOWER = 0.08, 0.01, 5, 2.0
_NUM_REQUESTS = 120
#: Below what stock vLLM sustains by itself: it meets every TTFT target.
_RATE_PER_S = 2.0


class NoisyStepTime:
    """The step times of the profile, each off by chance, with slow spells."""

    def __init__(self, seed: int) -> None:
        self._exact: Any = load_step_profile(PROFILE).step_time
        self._rng = np.random.default_rng([seed, 11])
        self._num_slow = 0

    def __call__(self, output: Any, requests: Mapping[str, Any]) -> float:
        factor = float(np.exp(self._rng.normal(0.0, _SIGMA)))
        if self._num_slow:
            self._num_slow -= 1
            factor *= _SLOWER
        elif self._rng.random() < _SPELLS:
            self._num_slow = _SPELL_STEPS
        return factor * float(self._exact(output, requests))


def outcome_of(scheduler: str, seed: int) -> RunOutcome:
    profile: Any = replace(load_step_profile(PROFILE), step_time=NoisyStepTime(seed))
    backend = SimBackend(SimOptions(profile, engine_args={"max_num_batched_tokens": 8192}))
    point = Point(
        PROFILE, SYNTHETIC, _RATE_PER_S, TTFT_S, TPOT_S, scheduler, "poisson", _NUM_REQUESTS, seed
    )
    return backend.run(make_workload(point, backend.limits), parse_scheduler(scheduler), SLO)


def test_where_first_come_first_served_is_in_time_ours_loses_no_more_than_a_point() -> None:
    ours, stock = (outcome_of(scheduler, seed=0) for scheduler in ("sola", "stock:2048"))

    assert ours.scheduler is not None
    assert ours.scheduler.cost_model_error > 0.06
    assert all(record.ttft_s <= SLO.ttft_s for record in stock.records)
    num_lost = (
        metrics.attained(stock.records, SLO).sum() - metrics.attained(ours.records, SLO).sum()
    )
    assert num_lost <= 0.01 * _NUM_REQUESTS
