"""The scheduler's own cost per step stays small beside vLLM's (medians of paired steps)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timing]

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scheduler" / "bench_overhead.py"
#: What a step may cost on top, at 256 running: the larger of both.
MAX_RATIO, MAX_ADDED_US = 0.10, 100.0
#: Medians of 200 paired steps repeat within a quarter of their value on a shared machine.
NOISE = 1.25


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("scheduler", "bench_overhead")


@pytest.mark.parametrize("num_waiting", [0, 256, 2000])
@pytest.mark.parametrize("slots", ["full", "free"])
@pytest.mark.parametrize("policy", ["attain", "paper", "alise"])
def test_added_time_is_small_beside_vllms_at_256_running(bench, policy, slots, num_waiting):
    row = bench.measure(policy, slots, 256, num_waiting, num_steps=200)

    limit_us = max(MAX_RATIO * row.stock_us, MAX_ADDED_US)
    assert row.added_us <= NOISE * limit_us, row


@pytest.mark.parametrize("slots", ["full", "free"])
@pytest.mark.parametrize("policy", ["attain", "paper"])
def test_added_time_grows_no_faster_than_n_log_n_in_waiting(bench, policy, slots):
    few, many = 500, 4000
    rows = [bench.measure(policy, slots, 64, n, num_steps=200) for n in (0, few, many)]

    none_us, few_us, many_us = (row.added_us for row in rows)
    growth = many * math.log(many) / (few * math.log(few))
    # A fixed cost of one plan is not growth: `few` is never taken as cheaper than this.
    few_us = max(few_us - none_us, MAX_ADDED_US)
    assert many_us - none_us <= NOISE * growth * few_us, rows


def test_pytest_benchmark_times_whole_steps(tmp_path):
    out = tmp_path / "steps.json"
    sizes = ("stock", "attain")
    chosen = " or ".join(f"full-16-0-{name}" for name in sizes)

    subprocess.run(
        [sys.executable, "-P", "-m", "pytest", SCRIPT, "-q", "-k", chosen, "--benchmark-json", out],
        cwd=SCRIPT.parents[2],
        check=True,
    )

    found = json.loads(out.read_text())["benchmarks"]
    assert {row["params"]["policy"] for row in found} == set(sizes)
    assert {row["group"] for row in found} == {"16 running, 0 waiting, slots full"}
    assert all(row["stats"]["rounds"] == 100 for row in found)
