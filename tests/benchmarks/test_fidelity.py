from __future__ import annotations

import gzip
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fidelity import engine_steps as steps
from fidelity import recorded_requests as recorded
from fidelity.recording import Cycle, CycleRecorder, EngineFacts
from fidelity.report import engine_tables, request_table
from harness.command import main
from registry import EXPERIMENTS
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.data.workload import RequestSpec, Workload, random_token_ids
from sola_sched.config.slo import SloTarget
from sola_sched.cost.fit import StepShape
from sola_sched.cost.model import CostModel
from sola_sched.errors import ProfileError
from sola_sched.simulator.bound.floors import floors_of
from sola_sched.simulator.steps.curves import CURVES, LINEAR, META_KEY, Batch, StepCurves
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.time import MeasuredStepTime

#: Noise of 2 % a step leaves far less than that in a fit to some hundred of them.
FIT_TOLERANCE = 0.02
SLO = SloTarget(ttft_s=1.0, tpot_s=0.1)


def make_batch(num_decodes: int = 0, *chunks: tuple[int, int], context: int = 100) -> Batch:
    """Decodes of some context, and chunks as (tokens computed before, tokens)."""
    return Batch(
        StepShape(
            num_decodes,
            num_decodes * context,
            sum(n for _, n in chunks),
            float(sum(n * n for _, n in chunks)),
            float(sum(has * n for has, n in chunks)),
        ),
        num_prefills=len(chunks),
        num_new=sum(has == 0 for has, _ in chunks),
    )


def known_s(batch: Batch) -> float:
    """An engine whose tokens get cheaper beyond 64, and whose requests get dearer beyond 8."""
    tokens, requests = batch.num_tokens, batch.num_requests
    return (
        4e-3
        + 1e-4 * min(tokens, 64)
        + 5e-5 * max(0, tokens - 64)
        + 1e-4 * requests
        + 2e-4 * max(0, requests - 8)
        + 1e-7 * batch.shape.decode_ctx_tokens
        + 2e-8 * batch.shape.prefill_sq_tokens
    )


def random_batches(count: int, seed: int) -> list[Batch]:
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        chunks = [
            (int(rng.integers(0, 500)), int(rng.integers(2, 400)))
            for _ in range(rng.integers(0, 3))
        ]
        num_decodes = int(rng.integers(0 if chunks else 1, 60))
        batches.append(make_batch(num_decodes, *chunks, context=int(rng.integers(10, 900))))
    return batches


def make_cycle(batch: Batch, model_s: float, *, schedule_s: float = 1e-4) -> Cycle:
    return Cycle(batch, 2e-5, schedule_s, model_s, 5e-5, 3e-5)


# Step times ---------------------------------------------------------------------------------


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


# Recording ----------------------------------------------------------------------------------


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


# Ranking and tables -------------------------------------------------------------------------


def test_ranking_counts_only_pairs_that_differ() -> None:
    real = {"a": 0.90, "b": 0.88, "c": 0.50}

    assert steps.ranking(real, {"a": 0.8, "b": 0.9, "c": 0.3}) == {"num_pairs": 2, "num_right": 2}
    assert steps.ranking(real, {"a": 0.8, "b": 0.2, "c": 0.3}) == {"num_pairs": 2, "num_right": 1}


def make_report(attainment: float, error: float) -> dict[str, Any]:
    simulated = {"attainment": attainment, "mean_ttft_s": 1.1, "mean_tpot_s": 0.01}
    run = {
        "workload": "chat",
        "scheduler": "stock",
        "is_repeat": False,
        "steps": {"num_steps": 9, "mean_abs_error": error, "total_error": -0.01},
        "repeat_noise": 0.01,
        "parts": dict.fromkeys(steps.PARTS, 1e-3),
        "real": {"attainment": 0.5, "mean_ttft_s": 1.0, "mean_tpot_s": 0.01},
        **dict.fromkeys(
            (f"simulated{kind}" for kind in ("", "_slower", "_without_host", "_own_speed")),
            simulated,
        ),
    }
    return {
        "runs": [run, {**run, "is_repeat": True}],
        "forms": {"curves": run["steps"]},
        "ranking": {"chat": {"num_pairs": 1, "num_right": 1}},
    }


def test_report_says_pass_and_fail_with_the_numbers() -> None:
    good, bad = engine_tables(make_report(0.52, 0.05)), engine_tables(make_report(0.54, 0.07))

    assert "step <= 6%: pass (5.0% over 9 held-out steps)" in good
    assert "within 3 points: pass (largest difference 2.0 points; 0 of 1" in good
    assert "schedulers: pass (1 of 1 pairs" in good
    assert "step <= 6%: FAIL (7.0%" in bad
    assert "within 3 points: FAIL (largest difference 4.0 points; 1 of 1" in bad


# Virtual time -------------------------------------------------------------------------------


def make_workload(count: int) -> Workload:
    rng = np.random.default_rng(0)
    return Workload(
        tuple(
            RequestSpec(str(i), random_token_ids(rng, 20 + 30 * (i % 4), 1000), 5 + i % 7)
            for i in range(count)
        )
    ).at_rate(20.0)


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["stock", "sola"])
def test_simulated_runs_repeat_exactly_and_take_what_the_steps_take(name: str) -> None:
    batches = random_batches(200, seed=0)
    fitted = steps.fit_engine({name: [make_cycle(b, known_s(b)) for b in batches]})[name]
    workload = make_workload(30)
    facts = EngineFacts(64, 16, 512, 8, 128, True, False)

    runs = [
        steps.simulate(workload, workload.requests[:0], parse_scheduler(name), SLO, facts, fitted)
        for _ in range(2)
    ]

    assert runs[0] == runs[1]
    assert all(record.completed for record in runs[0])
    fastest_s = fitted.step_s(make_batch(1, context=20))
    assert all(gap_s >= fastest_s for record in runs[0] for gap_s in record.itls_s)
    assert steps.summary(runs[0], SLO)["attainment"] > 0.0


# Recorded requests --------------------------------------------------------------------------

TRUE_COEFFICIENTS = np.array([2e-3, 5e-5, 1e-7, 0.0, 6e-3, 6e-5])
DEPLOYMENT = recorded.Deployment(16, 500, max_num_batched_tokens=512, max_model_len=2048)


def make_recorded(count: int) -> list[recorded.MeasuredRequest]:
    """Requests whose times come from a simulation with known coefficients."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(0.08, count))
    requests = [
        recorded.MeasuredRequest(
            int(rng.integers(30, 900)), int(rng.integers(20, 80)), float(at), at + 1.0, at + 2.0
        )
        for at in arrivals
    ]
    truth = recorded.simulate(requests, DEPLOYMENT, TRUE_COEFFICIENTS)
    return [
        recorded.MeasuredRequest(
            r.prompt_tokens,
            r.output_tokens,
            r.arrival_s,
            r.arrival_s + ttft_s,
            r.arrival_s + ttft_s + tpot_s * (r.output_tokens - 1),
        )
        for r, ttft_s, tpot_s in zip(
            requests, truth.ttft_s.tolist(), truth.tpot_s.tolist(), strict=True
        )
    ]


@pytest.mark.vllm
def test_fit_to_half_of_the_requests_predicts_the_other_half() -> None:
    requests = make_recorded(60)
    is_training = np.arange(60) % 2 == 0

    fitted = recorded.fit(requests, DEPLOYMENT, is_training)

    report = recorded.evaluate(requests, fitted, ~is_training)
    assert report["num_requests"] == 30
    assert abs(report["mean_ttft_error"]) < 0.03
    assert abs(report["mean_tpot_error"]) < 0.03
    assert report["p90_abs_tpot_error"] < 0.1
    assert min(report["ttft_correlation"], report["tpot_correlation"]) > 0.97
    row = {"gpu": "none", "model": "known", "test": report}
    assert "known" in request_table([row])


@pytest.mark.vllm
def test_derivatives_give_the_simulated_times_back() -> None:
    requests = make_recorded(20)

    simulated = recorded.simulate(requests, DEPLOYMENT, TRUE_COEFFICIENTS)

    arrivals = np.array([request.arrival_s for request in requests])
    first_s = simulated.first_offset_s + simulated.first @ TRUE_COEFFICIENTS
    decode_s = simulated.decode_offset_s + simulated.decode @ TRUE_COEFFICIENTS
    gaps = np.array([request.output_tokens - 1 for request in requests])
    np.testing.assert_allclose(first_s - arrivals, simulated.ttft_s, rtol=1e-6)
    np.testing.assert_allclose(decode_s / gaps, simulated.tpot_s, rtol=1e-6)


def test_recorded_requests_are_read_by_run_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / recorded.REQUESTS_FILE
    header = "gpu,model,prompt_tokens,output_tokens,queued_s,scheduled_s,first_token_s,last_token_s"
    rows = ["g,m,5,3,2.0,2.1,2.5,3.5", "g,m,7,1,1.0,1.1,1.5,1.5", "h,m,7,2,0,0,1,2"]
    path.write_bytes(gzip.compress("\n".join([header, *rows]).encode()))

    runs = recorded.read_requests(path)

    assert list(runs) == [("g", "m"), ("h", "m")]
    late = runs["g", "m"][1]
    assert (late.prompt_tokens, late.ttft_s, late.tpot_s) == (5, 0.5, 0.5)
    assert math.isnan(runs["g", "m"][0].tpot_s)


def test_command_needs_the_recorded_requests_that_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--only", "requests", "--data", str(tmp_path), "--results", str(tmp_path)]
    assert main(EXPERIMENTS, ["fidelity", *argv]) == 2
    assert "--data" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.slow
def test_command_runs_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    argv = ["fidelity", "--quick", "--only", "chat", "--num-requests", "8", "--schedulers",
            "stock:128", "sola:128", "--results", str(tmp_path)]  # fmt: skip

    assert main(EXPERIMENTS, [*argv, "--save-profile", str(profile)]) == 0

    assert "Ranking of the schedulers" in capsys.readouterr().out
    table = (tmp_path / "fidelity-quick.md").read_text()
    assert "Commit" in table.splitlines()[0]
    assert main(EXPERIMENTS, [*argv, "--stored"]) == 0
    assert (tmp_path / "fidelity-quick.md").read_text() == table
    assert MeasuredStepTime(CostModel.load(profile)).curves is not None
    assert set(LINEAR) == set(MeasuredStepTime(CostModel.load(profile)).curves.linear)
