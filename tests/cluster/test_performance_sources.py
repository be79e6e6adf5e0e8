"""Samples from step profiles, results of `vllm bench` and measured tables."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from placements import make_model

from cluster import fit_models
from sola_sched.cluster.performance import (
    fit_performance,
    load_performance,
    samples_of_bench,
)
from sola_sched.cluster.performance.from_profile import fit_profile
from sola_sched.cluster.performance.from_tables import kernel_steps, splitwise_steps
from sola_sched.cluster.performance.model import KvUse
from sola_sched.errors import DatasetError, ProfileError
from sola_sched.simulator import load_step_profile, profile_names

DATA = Path(os.environ.get("SOLA_SCHED_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_that_ships_gives_a_model_near_its_step_times(name: str) -> None:
    profile = load_step_profile(name)

    fitted = fit_profile(profile)

    assert fitted.model.num_gpus == profile.tensor_parallel
    assert fitted.errors["kv"].worst_ratio < 0.01
    # The profiles have a kink where computing takes longer than reading weights, lines have not;
    # a measured H100 takes as long for 256 tokens as for 128.
    assert fitted.errors["prefill"].mean_ratio < (0.08 if "h100-measured" in name else 0.05)
    assert fitted.errors["decode"].mean_ratio < 0.065
    assert profile.num_blocks is not None
    tokens = (profile.num_blocks - 1) * profile.block_size
    assert fitted.model.kv_capacity_tokens == pytest.approx(tokens, rel=0.01)


def test_a_profile_without_memory_is_refused(tmp_path: Path) -> None:
    from sola_sched.cost.file import Coefficients
    from sola_sched.cost.model import CostModel

    path = tmp_path / "live.json"
    coefficients = Coefficients(0.0, 0.0, 1e-4, 0.01, 1e-5, 1e-7, 0.01, 0.0)
    CostModel.from_coefficients(coefficients).save(path, meta={})

    with pytest.raises(ProfileError, match="must tell num_blocks"):
        fit_profile(load_step_profile(str(path)))


def _run_batches(path: Path) -> None:
    """Write what `vllm bench serve` would of an engine with the times of `make_model`."""
    engine = make_model()
    result: dict[str, list[object]] = {
        key: [] for key in ("input_lens", "output_lens", "ttfts", "itls", "start_times")
    }

    def add(prompt: int, start_s: float, ttft_s: float, gaps: list[float]) -> None:
        for key, value in zip(result, (prompt, len(gaps) + 1, ttft_s, gaps, start_s), strict=True):
            result[key].append(value)

    now_s = 0.0
    for prompt in (64, 256, 700, 1500):  # alone on the engine
        ttft_s = float(engine.prefill_s(prompt))
        gaps = [float(engine.decode_s(1, prompt + 1 + k)) for k in range(12)]
        add(prompt, now_s, ttft_s, gaps)
        now_s += ttft_s + sum(gaps) + 1.0
    for size in (2, 6, 12):  # prompts together in one step, then equal decodes
        ttft_s = float(engine.prefill_s(size * 200))
        gaps = [float(engine.decode_s(size, size * (201 + k))) for k in range(20)]
        for _ in range(size):
            add(200, now_s, ttft_s, gaps)
        now_s += ttft_s + sum(gaps) + 1.0
    path.write_text(json.dumps(result))


def test_detailed_results_of_vllm_bench_give_the_engine_that_made_them(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    _run_batches(path)

    prefill, decode = samples_of_bench([path])
    model, errors = fit_performance("bench", prefill, decode, KvUse(1.0))

    assert sorted(prefill.total_tokens) == [64, 256, 700, 1500]
    assert set(np.unique(decode.num_requests)) == {1, 2, 6, 12}
    assert errors["decode"].worst_ratio < 1e-6
    assert model.decode.per_request_s == pytest.approx(1e-4, rel=1e-3)
    assert model.prefill.per_token_s == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a JSON file"),
        ('{"mean_ttft_ms": 5}', "--save-detailed"),
        (
            '{"input_lens": [1], "output_lens": [], "ttfts": [], "itls": [], "start_times": []}',
            "one length",
        ),
    ],
)
def test_a_result_without_details_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)

    with pytest.raises(ProfileError, match=message):
        samples_of_bench([path])


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="derived_step_times"):
        next(kernel_steps(tmp_path))


needs_tables = pytest.mark.skipif(
    not (DATA / "gpu_steps").is_dir(), reason="the measured tables are not on this machine"
)


@needs_tables
def test_models_that_ship_are_those_of_the_measured_tables() -> None:
    for steps in kernel_steps(DATA / "gpu_steps"):
        shipped = load_performance(steps.name).model

        model, _ = fit_performance(steps.name, steps.prefill, steps.decode, shipped.kv)

        assert shipped.prefill.per_token_s == pytest.approx(model.prefill.per_token_s, rel=1e-4)
        assert shipped.decode.per_ctx_s == pytest.approx(model.decode.per_ctx_s, rel=1e-4)
        assert shipped.decode.base_s == pytest.approx(model.decode.base_s, rel=1e-4)


@needs_tables
def test_decode_steps_of_a_whole_engine_follow_eq_3_within_5_percent() -> None:
    errors = {
        steps.name: fit_performance(steps.name, steps.prefill, steps.decode, KvUse(1.0))[1]
        for steps in splitwise_steps(DATA / "gpu_steps")
    }

    assert len(errors) == 12
    # 5.1 % for Llama-2-70B on two A100: what memory leaves there holds few requests.
    assert max(error["decode"].mean_ratio for error in errors.values()) < 0.055


def test_every_error_of_a_fit_is_printed_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit_models.main(["--profile", "llama-3-8b-a100", "--output", str(tmp_path)]) == 0

    head, _, line = capsys.readouterr().out.splitlines()
    errors = load_performance(tmp_path / "llama-3-8b-a100.json").errors
    assert head == "| model | kv | kv_each | prefill | decode | p1 to p4 | p5 to p8 |"
    assert list(errors) == list(fit_models.PARTS)
    assert line == f"| llama-3-8b-a100 | {' | '.join(map(str, errors.values()))} |"
