"""Step times are fitted to the recorded requests of a GPU."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from fidelity import recorded_requests as recorded
from fidelity.report import request_table
from harness.command import main
from registry import EXPERIMENTS

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
