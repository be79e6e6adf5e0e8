"""Clients that leave after a while, under more than an engine serves: others stay in time."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL

from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.scheduler import Scheduler

pytestmark = pytest.mark.vllm

NUM, RATE_PER_S, TTFT_S, PATIENCE_S = 4000, 600, 0.3, 1.0


def test_short_requests_whose_clients_leave_do_not_stop_those_behind() -> None:
    """Some 450 a second can be served; in the order of arrival none would be in time."""
    engine = VirtualEngine(
        Scheduler,
        model=TINY_MODEL,
        num_blocks=601,
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        step_time=StepTimeModel(base_s=0.008, per_decode_s=1e-4, per_prefill_token_s=2e-5),
        additional_config={
            "sola_sched": {"ttft_s": TTFT_S, "tpot_s": 0.05, "swap": {"mode": "off"}}
        },
    )
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / RATE_PER_S, NUM)).tolist()
    prompts, outputs = 1 + rng.poisson(60, NUM), rng.integers(1, 7, NUM)
    records = engine.run([
        VirtualRequest(
            f"r{i}", arrival_s, int(outputs[i]), prompt_len=int(prompts[i]), max_tokens=64,
            abort_s=arrival_s + PATIENCE_S,
        )
        for i, arrival_s in enumerate(arrivals)
    ])  # fmt: skip

    are_in_time = [
        record.finish_reason != "abort"
        and record.first_token_s is not None
        and record.first_token_s - record.arrival_s <= TTFT_S
        for record in records
    ]
    assert min(np.mean(part) for part in np.array_split(are_in_time, 4)) > 0.4
