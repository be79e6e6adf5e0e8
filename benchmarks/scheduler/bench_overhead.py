"""What `sola_sched.Scheduler` adds to vLLM's own scheduling time per step.

    python benchmarks/scheduler/bench_overhead.py
    pytest benchmarks/scheduler/bench_overhead.py   # the same sizes with pytest-benchmark

Both schedulers serve the same requests in virtual time and are stepped in turn, so that noise
of the machine meets both. Only `schedule()` and `update_from_output()` are timed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # only the table is printed
pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import sola_sched
from sola_sched.simulator import LLAMA_3_8B_A100, VirtualEngine, VirtualRequest
from sola_sched.state import StepPlan, StepState

NUM_RUNNING = (16, 64, 256)
NUM_WAITING = (0, 256, 2000)
POLICIES = ("attain", "paper", "alise")
#: All slots taken, so that nobody can start; or room for more, and a prefill in every step.
SLOTS = ("full", "free")
#: Prompt and output tokens: long decodes run, long prompts wait.
_LENGTHS = {"running": (64, 1900), "waiting": (1500, 400)}
_MAX_MODEL_LEN, _BLOCK_SIZE, _NUM_LENGTHS = 2000, 16, 7
_MAX_FILL_STEPS, _NUM_SPARE_SLOTS, _CHUNK = 10_000, 64, 128


@dataclass(frozen=True)
class Overhead:
    """Medians of one size, microseconds per step.

    Attributes:
        stock_us: vLLM's `schedule()` and `update_from_output()`.
        ours_us: The same two calls of `sola_sched.Scheduler`.
        added_us: Median of the differences of paired steps.
    """

    policy: str
    slots: str
    num_running: int
    num_waiting: int
    stock_us: float
    ours_us: float
    added_us: float

    @property
    def added_ratio(self) -> float:
        """Added time relative to vLLM's own."""
        return self.added_us / self.stock_us


class _NeutralPlanner:
    def plan(self, state: StepState) -> StepPlan:
        return StepPlan()


class TimedEngine(VirtualEngine):
    """Serves `num_running` long decodes while `num_waiting` requests wait."""

    def __init__(
        self,
        scheduler_cls: type[Any],
        num_running: int,
        num_waiting: int,
        slots: str,
        policy: str = "attain",
        ttft_s: float = 2.0,
    ) -> None:
        super().__init__(
            scheduler_cls,
            # Twice what the running requests can grow to: memory decides nothing here.
            num_blocks=2 * (num_running + _NUM_SPARE_SLOTS) * (_MAX_MODEL_LEN // _BLOCK_SIZE + 2),
            block_size=_BLOCK_SIZE,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=num_running + (_NUM_SPARE_SLOTS if slots == "free" else 0),
            max_num_batched_tokens=num_running + _CHUNK + _NUM_SPARE_SLOTS,
            additional_config={
                "sola_sched": {"log_interval_s": 0, "policy": policy, "ttft_s": ttft_s}
            },
            step_time=LLAMA_3_8B_A100,
        )
        self._learn()
        self.elapsed_s = 0.0
        for name in ("schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))
        planner = getattr(self.scheduler, "sola_planner", None)
        self.scheduler.sola_planner = _NeutralPlanner()
        self._add("running", num_running)
        for _ in range(_MAX_FILL_STEPS):
            if self._all_decode(num_running):
                break
            self.step()
        assert self._all_decode(num_running), f"not {num_running} at once"
        self._add("waiting", num_waiting)
        self.scheduler.sola_planner = planner

    def time_step(self) -> float:
        """Step once; returns the seconds spent in the scheduler."""
        self.elapsed_s = 0.0
        self.step()
        return self.elapsed_s

    def _learn(self) -> None:
        """Serve mixed lengths first: without a cost model the planner would do nothing."""
        rng = random.Random(0)
        self.run(
            [
                VirtualRequest(f"mixed{i}", 0.05 * i, rng.randrange(1, 80), rng.randrange(1, 1500))
                for i in range(150)
            ]
        )
        if hasattr(self.scheduler, "sola_stats"):
            assert self.scheduler.sola_stats()["cost_model_ready"]

    def _add(self, name: str, count: int) -> None:
        prompt_len, output_len = _LENGTHS[name]
        for i in range(count):
            length = prompt_len + i % _NUM_LENGTHS
            self.add(
                VirtualRequest(
                    f"{name}{i}", self.clock.now, output_len, length, max_tokens=output_len
                )
            )

    def _all_decode(self, num_running: int) -> bool:
        running = self.scheduler.running
        return len(running) == num_running and all(r.num_output_tokens for r in running)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self.elapsed_s += time.perf_counter() - start
            return result

        return timed


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(
    policy: str,
    slots: str,
    num_running: int,
    num_waiting: int,
    *,
    num_steps: int = 300,
    ttft_s: float = 2.0,
) -> Overhead:
    """Step both schedulers in turn and compare them."""
    stock = TimedEngine(AsyncScheduler, num_running, num_waiting, slots)
    ours = TimedEngine(sola_sched.Scheduler, num_running, num_waiting, slots, policy, ttft_s)
    for _ in range(30):
        stock.time_step()
        ours.time_step()
    with _no_collection():
        pairs = [(stock.time_step(), ours.time_step()) for _ in range(num_steps)]
    return Overhead(
        policy,
        slots,
        num_running,
        num_waiting,
        stock_us=1e6 * statistics.median(a for a, _ in pairs),
        ours_us=1e6 * statistics.median(b for _, b in pairs),
        added_us=1e6 * statistics.median(b - a for a, b in pairs),
    )


@pytest.mark.parametrize("policy", ["stock", *POLICIES])
@pytest.mark.parametrize("num_waiting", NUM_WAITING)
@pytest.mark.parametrize("num_running", NUM_RUNNING)
@pytest.mark.parametrize("slots", SLOTS)
def test_step(benchmark: Any, slots: str, num_running: int, num_waiting: int, policy: str) -> None:
    benchmark.group = f"{num_running} running, {num_waiting} waiting, slots {slots}"
    if policy == "stock":
        engine = TimedEngine(AsyncScheduler, num_running, num_waiting, slots)
    else:
        engine = TimedEngine(sola_sched.Scheduler, num_running, num_waiting, slots, policy)
    benchmark.pedantic(engine.step, rounds=100, warmup_rounds=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-steps", type=int, default=300, help="steps measured per size")
    parser.add_argument(
        "--ttft-s", type=float, default=2.0, help="TTFT target; long: all that wait can be on time"
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--slots", nargs="+", choices=SLOTS, default=SLOTS)
    parser.add_argument("--num-running", nargs="+", type=int, default=NUM_RUNNING)
    parser.add_argument("--num-waiting", nargs="+", type=int, default=NUM_WAITING)
    args = parser.parse_args()
    options = {"num_steps": args.num_steps, "ttft_s": args.ttft_s}
    columns = ("policy", "slots", "running", "waiting", "vLLM us", "ours us", "added us", "added")
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join(["---"] * 2 + ["---:"] * 6) + " |")
    for size in product(args.policies, args.slots, args.num_running, args.num_waiting):
        row = measure(*size, **options)
        print(
            f"| {row.policy} | {row.slots} | {row.num_running} | {row.num_waiting} "
            f"| {row.stock_us:.0f} | {row.ours_us:.0f} | {row.added_us:.0f} "
            f"| {row.added_ratio:+.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
