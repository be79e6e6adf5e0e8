"""Profiles of another engine, in virtual time: named at start, and what they cost is made good."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL

import sola_sched
from sola_sched.cost.model import Coefficients, CostModel
from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

Said = Callable[[str], list[str]]

TTFT_S, TPOT_S = 0.5, 0.03
STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)
RIGHT = Coefficients(a0=0, b0=0, c0=1e-4, d0=0.01, a1=2e-4, b1=0, c1=0.01, overlap=0.01)


def make_engine(profile: Path) -> VirtualEngine:
    return VirtualEngine(
        sola_sched.Scheduler,
        model=TINY_MODEL,
        num_blocks=2000,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        step_time=STEP_TIME,
        additional_config={
            "sola_sched": {"ttft_s": TTFT_S, "tpot_s": TPOT_S, "profile": str(profile)}
        },
    )


def make_workload(count: int, rate_per_s: float) -> list[VirtualRequest]:
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        VirtualRequest(
            f"r{i}",
            arrival_s=float(arrivals[i]),
            prompt_len=int(rng.integers(100, 800)),
            output_len=int(rng.integers(2, 120)),
            max_tokens=1000,
        )
        for i in range(count)
    ]


def attained(profile: Path, coefficients: Coefficients) -> tuple[float, CostModel]:
    """Attainment of 300 requests somewhat past what the engine sustains, and its cost model."""
    CostModel.from_coefficients(coefficients).save(profile, meta={})
    engine = make_engine(profile)
    records = engine.run(make_workload(300, 15.0))
    monitor = engine.scheduler.sola_monitor
    assert all(r.is_finished for r in records)
    return monitor.stats.num_attained / len(records), monitor.cost


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> float:
    share, cost = attained(tmp_path_factory.mktemp("right") / "profile.json", RIGHT)
    assert not cost.is_relearned
    return share


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """What the scheduler has logged with some words in it."""
    caplog.set_level(logging.INFO, "vllm.sola_sched")
    return lambda words: [m for r in caplog.records if words in (m := r.getMessage())]


def scaled(factor: float) -> Coefficients:
    return Coefficients(**{name: factor * value for name, value in asdict(RIGHT).items()})


@pytest.mark.parametrize("factor", [0.1, 0.2, 5.0, 10.0])
def test_a_profile_wrong_by_a_factor_costs_next_to_no_attainment(
    right: float, factor: float, tmp_path: Path
) -> None:
    share, cost = attained(tmp_path / "profile.json", scaled(factor))

    assert share > right - 0.03, f"{share:.3f}, the right profile {right:.3f}"
    decode_s = STEP_TIME.base_s + 10 * STEP_TIME.per_decode_s
    assert cost.decode_s(10.0, 1000.0) == pytest.approx(decode_s, rel=0.15)


@pytest.mark.parametrize(
    "wrong",
    [{"c0": 1e-3}, {"c0": 1e-5}, {"a1": 2e-3}],
    ids=["dear tokens", "cheap tokens", "dear decodes"],
)
def test_a_profile_with_one_wrong_price_is_replaced_and_costs_little(
    right: float, wrong: dict[str, float], tmp_path: Path, said: Said
) -> None:
    share, cost = attained(tmp_path / "profile.json", replace(RIGHT, **wrong))

    assert share > right - 0.04, f"{share:.3f}, the right profile {right:.3f}"
    assert cost.is_relearned
    [message] = said("learned from live steps")
    assert "profile.json" in message


def start_with(profile: Path, meta: dict[str, Any]) -> None:
    CostModel.from_coefficients(RIGHT).save(profile, meta=meta)
    make_engine(profile)


def test_a_profile_of_another_engine_is_named_with_what_differs(tmp_path: Path, said: Said) -> None:
    meta = {
        "model": "meta-llama/Llama-3-8B",
        "device": "NVIDIA H100 80GB HBM3",
        "dtype": "torch.float32",
        "tensor_parallel_size": 8,
        "max_num_batched_tokens": 8192,
        "machine": "of no interest",
    }

    start_with(tmp_path / "profile.json", meta)

    [message] = said("another engine")
    assert "profile.json was measured on another engine" in message
    for said in (
        "model meta-llama/Llama-3-8B (here ",
        "device NVIDIA H100 80GB HBM3 (here cpu)",
        "dtype torch.float32 (here torch.bfloat16)",
        "tensor_parallel_size 8 (here 1)",
        "max_num_batched_tokens 8192 (here 1024)",
        "python -m sola_sched.profile",
    ):
        assert said in message


@pytest.mark.parametrize(
    "meta",
    [{}, {"dtype": "bfloat16", "device": "cpu", "max_num_batched_tokens": 1024}],
    ids=["of an old version", "of this engine"],
)
def test_a_profile_that_says_nothing_else_is_taken_silently(
    tmp_path: Path, said: Said, meta: dict[str, Any]
) -> None:
    start_with(tmp_path / "profile.json", meta)

    assert said("another engine") == []
    assert len(said("cost model ")) == 1
