"""Swapping that nothing uses costs next to nothing, and telemetry no more."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from needs import NEEDS_SWAPPING

from serving.unused_swapping import measure, watched_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timing, NEEDS_SWAPPING]


@pytest.mark.parametrize("num_clients", [1, 8])
def test_unused_swapping_and_telemetry_take_two_percent_of_a_step_at_most_each(
    num_clients: int, model_dir: Path
) -> None:
    """A step of this model takes a millisecond or two; one of a real model five and more."""
    arguments = {
        "model": str(model_dir), "skip_tokenizer_init": True, "dtype": "float32",
        "enforce_eager": True, "max_model_len": 512, "num_gpu_blocks_override": 200,
    }  # fmt: skip
    with watched_engine(arguments) as (engine, clocks):
        row = measure(engine, clocks, num_clients, 200, 0)

    assert row["num_calls"] >= 8, "the clock is around what it is to measure"
    assert row["num_telemetry_calls"] >= 2, "the clock is around what it is to measure"
    for part_us in (row["swapping_us"], row["telemetry_us"]):
        assert part_us < 100.0
        assert part_us < 0.02 * 1e3 * row["step_ms"]
