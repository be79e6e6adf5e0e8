"""Workloads for engines in virtual time, and how many of their requests met both targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from virtual_model import TINY_MODEL

from sola_sched.simulator import RequestRecord, StepTimeModel, VirtualEngine, VirtualRequest

STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)


def make_small_engine(
    scheduler_cls: type[Any], sola: dict[str, Any] | None = None, **options: Any
) -> VirtualEngine:
    """64 slots of a tiny model; `sola` is our configuration, None for vLLM's own scheduler."""
    defaults: dict[str, Any] = {
        "model": TINY_MODEL,
        "num_blocks": 2000,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "step_time": STEP_TIME,
    }
    if sola is not None:
        defaults["additional_config"] = {"sola_sched": sola}
    return VirtualEngine(scheduler_cls, **(defaults | options))


def warm_up(engine: VirtualEngine, num: int = 60) -> None:
    """Short requests of the first second, of many lengths, by which steps are learned."""
    for number in range(num):
        engine.add(
            VirtualRequest(
                f"warm{number}", arrival_s=0.02 * number, prompt_len=20 + 7 * number, output_len=6
            )
        )


def step_until(
    engine: VirtualEngine, is_enough: Callable[[], bool], most_steps: int = 20_000
) -> None:
    """Step until something holds, nobody is left, or so many steps have passed."""
    for _ in range(most_steps):
        if is_enough() or not (engine.has_work or engine.has_arrivals):
            return
        if not engine.has_work:
            engine._advance(engine._arrivals[0][0])
        engine.step()


def make_workload(
    count: int, rate_per_s: float, seed: int = 0, prompt: int = 400, **options: Any
) -> list[VirtualRequest]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        VirtualRequest(
            f"r{i}",
            arrival_s=float(arrivals[i]),
            prompt_len=int(rng.integers(prompt // 4, 2 * prompt)),
            output_len=int(rng.integers(2, 120)),
            max_tokens=1000,
            **options,
        )
        for i in range(count)
    ]


def attained(records: list[RequestRecord], ttft_s: float, tpot_s: float) -> float:
    met = 0
    for r in records:
        if r.is_finished and r.first_token_s is not None and r.last_token_s is not None:
            tpot = (r.last_token_s - r.first_token_s) / max(1, r.num_output_tokens - 1)
            met += r.first_token_s - r.arrival_s <= ttft_s and tpot <= tpot_s
    return met / len(records)
