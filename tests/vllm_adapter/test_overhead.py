"""The scheduler's own cost per step stays small beside vLLM's, while requests come and go."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("vllm")

from scheduler import bench_overhead as bench

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timing]

#: What the median of a step may cost on top, as a share of vLLM's own time: the same on machines
#: of any speed. Shares of 0.16 to 0.24 were measured on a busy machine (benchmarks/scheduler).
MAX_RATIO = 0.5
#: A fixed cost of one plan is not growth: added times are never taken as smaller than this.
LEAST_US = 100.0
NUM_STEPS = 100


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("attain", "chat"),
        ("attain", "long"),
        ("paper", "chat"),
        ("alise", "chat"),
        pytest.param("observe", "chat", marks=pytest.mark.long),
        *(
            pytest.param(policy, "long", marks=pytest.mark.long)
            for policy in ("paper", "alise", "observe")
        ),
    ],
)
def test_added_time_is_small_beside_vllms_at_256_running(policy, kind):
    row = bench.measure(bench.Load(policy, kind), num_steps=NUM_STEPS, num_warmups=100)

    assert row["cpu_added_us"]["median"] <= MAX_RATIO * row["cpu_stock_us"]["median"], row


@pytest.mark.parametrize("policy", ["attain", pytest.param("paper", marks=pytest.mark.long)])
def test_added_time_grows_no_faster_than_n_log_n_in_waiting(policy):
    few, many = 500, 4000
    loads = [bench.Load(policy, num_running=64, num_waiting=n) for n in (0, few, many)]
    rows = [bench.measure(load, num_steps=NUM_STEPS, num_warmups=100) for load in loads]

    none_us, few_us, many_us = (row["cpu_added_us"]["median"] for row in rows)
    growth = many * math.log(many) / (few * math.log(few))
    assert many_us - none_us <= growth * max(few_us - none_us, LEAST_US), rows
