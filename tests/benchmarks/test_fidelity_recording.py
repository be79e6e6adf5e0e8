"""What is recorded of an engine's steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from known_steps import FIT_TOLERANCE, known_s, make_batch, make_cycle, random_batches

from fidelity import engine_steps as steps
from fidelity.recording import CycleRecorder, scheduler_of
from sola_sched.errors import ConfigError, ProfileError


class FakeEngine:
    """One decode a step; every part takes a known time on a fake clock."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.num_left = 0
        self.requests: dict[str, Any] = {}

    def add_request(self, req_id: str, num_tokens: int) -> None:
        self.now_s += 0.5
        self.num_left += num_tokens
        self.requests[req_id] = SimpleNamespace(
            num_prompt_tokens=4, num_tokens=5, num_computed_tokens=5
        )

    def abort_request(self, req_ids: list[str]) -> None:
        raise AssertionError(req_ids)

    def has_unfinished_requests(self) -> bool:
        return self.num_left > 0

    def schedule(self) -> Any:
        self.now_s += 1.0
        return SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(self.requests, 1), scheduled_new_reqs=[]
        )

    def update_from_output(self, output: Any) -> None:
        self.now_s += 3.0
        self.num_left -= 1

    def step(self) -> list[str]:
        output = self.schedule()
        self.now_s += 20.0
        self.update_from_output(output)
        self.now_s += 7.0
        return ["token"]


def test_cycles_add_up_to_the_time_between_tokens_and_leave_pauses_out() -> None:
    engine = FakeEngine()
    recorder = CycleRecorder(engine, engine, lambda: engine.now_s)

    recorder.add_request("a", 2)
    assert recorder.step() == ["token"]
    engine.now_s += 0.25  # the client stamps its tokens
    recorder.step()
    engine.now_s += 1000.0  # nothing to do
    recorder.add_request("b", 1)
    recorder.step()

    parts = [(c.admit_s, c.schedule_s, c.model_s, c.update_s, c.output_s) for c in recorder.cycles]
    assert parts == [(0.5, 1, 20, 3, 7), (0.25, 1, 20, 3, 7), (0.5, 1, 20, 3, 7)]
    assert [c.total_s for c in recorder.cycles] == [31.5, 31.25, 31.5]
    assert recorder.cycles[0].span_s == 24.0
    assert [c.batch.num_requests for c in recorder.cycles] == [1, 1, 2]


def test_a_schedulers_own_time_is_fitted_apart_from_the_engines() -> None:
    batches = random_batches(300, seed=0)
    training = {
        label: [make_cycle(b, known_s(b), schedule_s=own_s) for b in batches]
        for label, own_s in (("stock", 1e-4), ("sola", 9e-4))
    }

    fitted = steps.fit_engine(training)

    for label, cycles in training.items():
        predicted = [fitted[label].step_s(cycle.batch) for cycle in cycles]
        errors = steps.step_errors(predicted, cycles)
        assert errors["mean_abs_error"] < FIT_TOLERANCE
    batch = make_batch(8)
    difference_s = fitted["sola"].step_s(batch) - fitted["stock"].step_s(batch)
    assert difference_s == pytest.approx(8e-4)
    with pytest.raises(ProfileError, match="'sola' must have run"):
        steps.fit_engine({**training, "sola": []})


def test_without_host_time_every_scheduler_takes_what_vllms_own_does() -> None:
    batches = random_batches(300, seed=0)
    training = {
        label: [make_cycle(b, known_s(b), schedule_s=own_s) for b in batches]
        for label, own_s in (("stock", 1e-4), ("sola", 9e-4))
    }
    batch = make_batch(8)

    full, bare = steps.fit_engine(training), steps.fit_without_host(training, ["stock"])

    assert bare["sola"].step_s(batch) == bare["stock"].step_s(batch)
    # 20 us to take requests in and 30 us to make outputs.
    left_out_s = full["stock"].step_s(batch) - bare["stock"].step_s(batch)
    assert left_out_s == pytest.approx(5e-5, rel=0.1)


def test_noise_is_what_equal_neighbours_differ_by() -> None:
    batch, other = make_batch(3), make_batch(4)
    cycles = [make_cycle(b, s) for b, s in ((batch, 0.01), (batch, 0.01), (other, 0.03))]

    assert steps.repeat_noise(cycles) == 0.0
    assert math.isnan(steps.repeat_noise(cycles[1:]))


def test_only_schedulers_that_virtual_time_has_too_are_compared() -> None:
    assert [scheduler_of(text).kind for text in ("stock:512", "sola")] == ["stock", "sola"]
    with pytest.raises(ConfigError, match=r"must be stock or sola here \(got 'prefill-first'\)"):
        scheduler_of("prefill-first")
