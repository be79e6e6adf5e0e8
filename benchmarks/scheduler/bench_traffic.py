"""What `sola_sched.Scheduler` adds to vLLM's own scheduling time while requests come and go.

    python benchmarks/scheduler/bench_traffic.py

Both schedulers serve the same arrivals in virtual time and are stepped in turn, so that noise of
the machine meets both; the steps, and who is in them, are their own. Only `schedule()` and
`update_from_output()` are timed, as CPU time of the thread.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # only the table is printed

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import sola_sched
from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.simulator.step_profile import StepProfile, load_step_profile

#: Profile, requests per second, TTFT and TPOT in seconds: about 100 running, as in `table4`.
LOADS = {
    "llama-3-8b-a100": (16.0, 0.4, 0.15),
    "llama-3-70b-a100": (7.0, 0.5, 0.2),
}
#: The last one has no targets: the state is kept, and vLLM plans as ever.
OBSERVE = "observe"
POLICIES = ("attain", "paper", "alise", OBSERVE)
#: Token budgets: what stock attains most with, and what our planners choose within.
_STOCK_CHUNK, _OUR_CHUNK = 1024, 8192
#: Mean and standard deviation of the logarithm; means are about those of ShareGPT.
_PROMPT, _OUTPUT, _MAX_TOKENS = (220.0, 1.1), (260.0, 0.9), 2000


@dataclass
class Served:
    """What one scheduler needed for the traffic.

    Attributes:
        cpu_s: In `schedule()` and `update_from_output()`.
        num_steps: Steps with tokens.
        num_running: Requests in them, in sum.
        duration_s: Virtual time.
    """

    cpu_s: float = 0.0
    num_steps: int = 0
    num_running: int = 0
    duration_s: float = 0.0

    @property
    def us_per_step(self) -> float:
        return 1e6 * self.cpu_s / self.num_steps

    @property
    def step_s(self) -> float:
        return self.duration_s / self.num_steps


class TrafficEngine(VirtualEngine):
    """Serves requests as they arrive, a step at a time."""

    def __init__(
        self, scheduler_cls: type[Any], profile: StepProfile, chunk: int, options: dict[str, Any]
    ) -> None:
        assert profile.num_blocks is not None
        assert profile.max_model_len is not None
        super().__init__(
            scheduler_cls,
            model=profile.model_config(),
            num_blocks=profile.num_blocks,
            block_size=profile.block_size,
            max_model_len=profile.max_model_len,
            max_num_batched_tokens=chunk,
            async_scheduling=True,
            additional_config={"sola_sched": {"log_interval_s": 0, **options}},
            step_time=profile.step_time,
        )
        self.served = Served()
        for name in ("schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))

    @property
    def is_done(self) -> bool:
        return not (self._arrivals or self.has_work)

    def advance(self) -> None:
        """One step, or on to the next arrival."""
        if not self.has_work:
            self._advance(self._arrivals[0][0])
        before_s = self.clock.now
        trace = self.step()
        self.served.duration_s += self.clock.now - before_s
        if trace is not None and trace.output.total_num_scheduled_tokens:
            self.served.num_steps += 1
            self.served.num_running += len(trace.output.num_scheduled_tokens)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start_s = time.thread_time()
            result = call(*args)
            self.served.cpu_s += time.thread_time() - start_s
            return result

        return timed


def traffic(rate_per_s: float, num_requests: int, seed: int) -> list[VirtualRequest]:
    """Poisson arrivals with log-normal lengths."""
    rng = random.Random(seed)

    def tokens(mean: float, sigma: float) -> int:
        drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return max(1, min(_MAX_TOKENS, round(drawn)))

    requests, now_s = [], 0.0
    for number in range(num_requests):
        now_s += rng.expovariate(rate_per_s)
        requests.append(VirtualRequest(f"r{number}", now_s, tokens(*_OUTPUT), tokens(*_PROMPT)))
    return requests


def measure(
    policy: str, profile_name: str, *, num_requests: int = 1000, seed: int = 0
) -> tuple[Served, Served]:
    """Serve the same requests with both schedulers, stepped in turn; stock's and ours.

    The first fifth of the requests is not counted: the engine fills, and the cost model is learned.
    """
    rate_per_s, ttft_s, tpot_s = LOADS[profile_name]
    profile = load_step_profile(profile_name)
    options = {"policy": policy, "ttft_s": ttft_s, "tpot_s": tpot_s}
    chunk = _OUR_CHUNK
    if policy == OBSERVE:
        options, chunk = {"ttft_s": None, "tpot_s": None}, _STOCK_CHUNK
    engines = (
        TrafficEngine(AsyncScheduler, profile, _STOCK_CHUNK, {}),
        TrafficEngine(sola_sched.Scheduler, profile, chunk, options),
    )
    requests = traffic(rate_per_s, num_requests, seed)
    start_s, end_s = requests[num_requests // 5].arrival_s, requests[-1].arrival_s
    for engine in engines:
        for request in requests:
            engine.add(request)
    gc.collect()
    gc.disable()
    try:
        for engine in engines:
            _serve_until(engine, start_s)
            engine.served = Served()
        while any(engine.clock.now < end_s for engine in engines):
            for engine in engines:
                if engine.clock.now < end_s:
                    engine.advance()
    finally:
        gc.enable()
    for engine in engines:  # both must serve all of it
        _serve_until(engine, math.inf)
    return engines[0].served, engines[1].served


def _serve_until(engine: TrafficEngine, time_s: float) -> None:
    served, engine.served = engine.served, Served()
    while not engine.is_done and engine.clock.now < time_s:
        engine.advance()
    engine.served = served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--profiles", nargs="+", choices=tuple(LOADS), default=tuple(LOADS))
    args = parser.parse_args()
    columns = ("profile", "policy", "running", "step ms", "vLLM us", "ours us", "added us",
               "added", "of the step")  # fmt: skip
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join(["---"] * 2 + ["---:"] * 7) + " |")
    for name in args.profiles:
        for policy in args.policies:
            stock, ours = measure(policy, name, num_requests=args.num_requests, seed=args.seed)
            added_us = ours.us_per_step - stock.us_per_step
            print(
                f"| {name} | {policy} | {ours.num_running / ours.num_steps:.0f} "
                f"| {1e3 * ours.step_s:.1f} | {stock.us_per_step:.0f} | {ours.us_per_step:.0f} "
                f"| {added_us:.0f} | {added_us / stock.us_per_step:+.1%} "
                f"| {1e-6 * added_us / ours.step_s:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
