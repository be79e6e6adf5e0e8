"""Requests whose KV another connector loads resume as soon as it is there, in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from fake_loads import LoadingScheduler
from virtual_model import TINY_MODEL
from virtual_runs import STEP_TIME

from sola_sched.simulator import VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm


def make_workload(num_loads: int, num_long: int) -> list[VirtualRequest]:
    rng = np.random.default_rng(0)
    decodes = [VirtualRequest(f"d{i}", 0.0, 300, prompt_len=40) for i in range(8)]
    loads = [
        VirtualRequest(
            f"load{i}", 1.0 + 0.1 * i, 20, prompt_len=int(rng.integers(100, 900)), priority=i % 2
        )
        for i in range(num_loads)
    ]
    long = [VirtualRequest(f"p{i}", 1.0 + 0.5 * i, 20, prompt_len=1900) for i in range(num_long)]
    return [*decodes, *loads, *long]


@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
@pytest.mark.parametrize("num_long", [0, 8], ids=["decodes", "prefills"])
@pytest.mark.parametrize("options", [
    {}, {"async_scheduling": True}, {"scheduling_policy": "priority"},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
], ids=["sync", "async", "priority", "whole"])  # fmt: skip
def test_loaded_requests_resume_in_the_step_in_which_the_load_has_ended(
    policy: str, num_long: int, options: dict[str, Any]
) -> None:
    sola = {"policy": policy, "ttft_s": 2.0, "tpot_s": 0.05}
    defaults = {"max_num_batched_tokens": 1024, "max_num_seqs": 64, "num_blocks": 4000}
    engine = VirtualEngine(
        LoadingScheduler,
        model=TINY_MODEL,
        max_model_len=2048,
        step_time=STEP_TIME,
        additional_config={"sola_sched": sola},
        **(defaults | options),
    )
    records = engine.run(make_workload(40, num_long))
    assert all(r.is_finished for r in records)
    assert engine.scheduler.sola_guard.num_failures.total() == 0
    assert engine.scheduler.num_resumed == 40
    assert engine.scheduler.late == []
