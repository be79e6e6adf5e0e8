"""sola_sched inside an engine of your own: no vLLM, no torch.

A toy engine with a made-up step time serves a burst of chat requests, first come first served and
with the planner, and prints how many met both targets. What an engine does is in `Engine.step`:
report events to the `StateMonitor`, ask the planner, obey the `StepPlan`.

    python examples/custom_engine.py
"""

from __future__ import annotations

import numpy as np

from sola_sched import CostModel, EngineLimits, SloTarget, SolaConfig, StateMonitor, make_planner
from sola_sched.length_predictor.histogram import LengthHistogram

SLO = SloTarget(ttft_s=1.0, tpot_s=0.05)
MAX_TOKENS, SLOTS, BLOCKS, BLOCK_SIZE = 2048, 64, 4000, 16
LIMITS = EngineLimits(MAX_TOKENS, SLOTS, BLOCKS, BLOCK_SIZE)


class Engine:
    """Requests are (arrival_s, prompt tokens, output tokens); time is virtual."""

    def __init__(self, policy: str | None, requests: list[tuple[float, int, int]]) -> None:
        self.now = 0.0
        self.requests = {f"r{i}": request for i, request in enumerate(requests)}
        self.arriving = sorted(self.requests, key=lambda name: self.requests[name][0])
        self.waiting: list[int] = []  # rows of the monitor's table, first come first served
        self.running: list[int] = []
        self.monitor = StateMonitor(CostModel(), LengthHistogram(), clock=lambda: self.now)
        self.planner = make_planner(SolaConfig(policy=policy)) if policy else None

    def run(self) -> float:
        while self.arriving or self.waiting or self.running:
            self.step()
        return self.monitor.stats.num_attained / self.monitor.stats.num_finished

    def step(self) -> None:
        self.take_arrivals()
        run, admit, budget = self.planned()
        table, num_free = self.monitor.table, BLOCKS - self.num_used()
        decodes, prefills, chunks = [], [], []
        for row in run + admit:
            is_new = row in self.waiting
            if budget <= 0 or (is_new and len(self.running) == SLOTS):
                continue
            computed = 0 if is_new else int(table.num_computed[row])
            left = int(table.prefill_target[row]) - computed
            chunk = min(left, budget) if left > 0 else 1
            num_blocks = blocks_of(computed + chunk) - blocks_of(computed)
            if num_blocks > num_free:
                continue
            budget, num_free = budget - chunk, num_free - num_blocks
            if is_new:
                self.waiting.remove(row)
                self.running.append(row)
                target = int(table.prefill_target[row])  # after a preemption its output as well
                self.monitor.admitted(row, num_computed=0, prefill_target=target)
            if left > 0:
                prefills.append(row)
                chunks.append(chunk)
            else:
                decodes.append(row)
        if not decodes and not prefills:  # all wait for memory that the others have
            self.preempt(self.running[-1])
        self.compute(decodes, prefills, chunks)
        self.monitor.set_busy(bool(self.waiting or self.running))

    def take_arrivals(self) -> None:
        if not self.waiting and not self.running:
            self.now = max(self.now, self.requests[self.arriving[0]][0])
        while self.arriving and self.requests[self.arriving[0]][0] <= self.now:
            name = self.arriving.pop(0)
            arrival, prompt, _ = self.requests[name]
            row = self.monitor.add(
                name, num_prompt_tokens=prompt, max_tokens=1000, slo=SLO, arrival_s=arrival
            )
            self.waiting.append(row)

    def num_used(self) -> int:
        table = self.monitor.table
        return sum(blocks_of(int(table.num_computed[row])) for row in self.running)

    def planned(self) -> tuple[list[int], list[int], int]:
        """Who of the running takes part, who of the waiting may start, and the token budget."""
        if self.planner is None:
            return list(self.running), list(self.waiting), MAX_TOKENS
        free = BLOCKS - self.num_used()
        plan = self.planner.plan(self.monitor.state(self.running, LIMITS, free))
        for row in plan.preempt.tolist():
            self.preempt(row)
        run = self.running if plan.run is None else plan.run.tolist()
        admit = self.waiting if plan.admit is None else plan.admit.tolist()
        return list(run), list(admit), plan.token_budget or MAX_TOKENS

    def preempt(self, row: int) -> None:
        table = self.monitor.table
        self.running.remove(row)
        self.waiting.insert(0, row)
        tokens = int(table.num_prompt[row] + table.num_output[row])
        self.monitor.requeued(row, num_tokens=tokens, at_front=True)

    def compute(self, decodes: list[int], prefills: list[int], chunks: list[int]) -> None:
        table = self.monitor.table
        sampled = decodes + [
            row
            for row, chunk in zip(prefills, chunks, strict=True)
            if table.num_computed[row] + chunk >= table.prefill_target[row]
        ]
        self.monitor.scheduled(
            np.array(decodes, int), np.array(prefills, int), np.array(chunks, int)
        )
        self.now += 0.008 + 0.0002 * len(decodes) + 0.00008 * sum(chunks)  # the "forward pass"
        self.monitor.completed(np.array(sampled, int), np.ones(len(sampled), int))
        for row in sampled:
            name = table.req_id[row]
            if name is not None and table.num_output[row] >= self.requests[name][2]:
                self.running.remove(row)
                self.monitor.finished(name)


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def main() -> dict[str, float]:
    """Serve the same requests with each policy; returns and prints the attainment."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / 24, 400))
    prompts = rng.integers(50, 1200, 400)
    outputs = rng.integers(2, 200, 400)
    requests = list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True))
    attainment = {}
    for policy in (None, "paper", "attain"):
        attainment[policy or "fcfs"] = Engine(policy, requests).run()
        print(f"{policy or 'fcfs':>8}: {attainment[policy or 'fcfs']:.1%} met both targets")
    return attainment


if __name__ == "__main__":
    main()
