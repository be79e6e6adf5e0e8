"""Millions of requests in virtual time: does memory grow, or what a step costs?

The policy is the real one: table, length histogram, cost model and planner, as an engine of one's
own drives them. Only the engine is not vLLM's: prompts and answers are short, the load is 1.5 x
what it serves, late requests are refused, and some clients leave before their request begins.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from soak.census import census
from soak.verdict import slope

Row = dict[str, Any]
_SLOTS, _MAX_TOKENS, _BLOCKS, _BLOCK_SIZE = 64, 512, 600, 16
_MEAN_PROMPT, _MOST_OUTPUTS = 60, 6
_TTFT_S, _TPOT_S, _PATIENCE_S = 0.3, 0.05, 0.1
#: Of so many clients one leaves so soon, if its request has not begun.
_ONE_LEAVES = 10
#: Requests a second: 1.5 x what these slots and step times serve.
_RATE = 600.0
_NUM_BLOCKS = 20
#: Growth over the second half that says nothing: of memory, and of the time of a step.
_MEMORY_KIB, _STEP_SHARE = 8192.0, 0.2


def virtual(setup: Setup) -> Outcome:
    """A row for each twentieth of the requests.

    Raises:
        SystemExit: Memory or steps have grown.
    """
    rows = setup.all_rows() if setup.is_stored else list(setup.keep(run(setup.num_requests)))
    last = [row for row in rows if row["run"] == rows[-1]["run"]]
    if found := problems(last):
        raise SystemExit(f"{table(last)}\n\nerror: {'; '.join(found)}")
    return Outcome(last, table(last))


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has grown over the second half."""
    half = rows[len(rows) // 2 :]
    found = []
    for name, bound in (
        ("memory_kib", _MEMORY_KIB), ("step_us", _STEP_SHARE * half[0]["step_us"]),
        ("entries", 0.02 * half[0]["entries"] + 64),
    ):  # fmt: skip
        grown = slope([row[name] for row in half]) * (len(half) - 1)
        if grown > bound:
            found.append(f"{name} grew from {half[0][name]:,} to {half[-1][name]:,}")
    return found


def run(num_requests: int, seed: int = 0) -> Iterator[Row]:
    """Serve so many requests; a row for each twentieth."""
    name = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    engine = _Engine(seed)
    for block in range(_NUM_BLOCKS):
        began_s, steps = time.process_time(), engine.num_steps
        goal = num_requests * (block + 1) // _NUM_BLOCKS
        while engine.num_ended < goal:
            engine.step()
        spent_s = time.process_time() - began_s
        held = census()
        yield {
            "run": name,
            "num_requests": engine.num_ended,
            "virtual_s": round(engine.now),
            "step_us": round(1e6 * spent_s / (engine.num_steps - steps), 1),
            "num_steps": engine.num_steps,
            "memory_kib": _memory_kib(),
            "entries": sum(held["tables"].values()),
            "attained": round(engine.monitor.stats.num_attained / engine.num_ended, 4),
        }


def _memory_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


class _Engine:
    """One engine under a load that does not end."""

    def __init__(self, seed: int) -> None:
        from sola_sched.config.slo import SloTarget
        from sola_sched.config.sola_config import SolaConfig
        from sola_sched.core.monitor import StateMonitor
        from sola_sched.core.state import EngineLimits
        from sola_sched.cost.model import CostModel
        from sola_sched.length_predictor.histogram import LengthHistogram
        from sola_sched.planner import make_planner

        self.now, self.num_steps, self.num_ended = 0.0, 0, 0
        self.monitor = StateMonitor(CostModel(), LengthHistogram(), clock=lambda: self.now)
        self._planner = make_planner(SolaConfig(policy="attain", overload="reject"))
        self._limits = EngineLimits(_MAX_TOKENS, _SLOTS, _BLOCKS, _BLOCK_SIZE)
        self._slo = SloTarget(ttft_s=_TTFT_S, tpot_s=_TPOT_S)
        self._rng = np.random.default_rng(seed)
        self._running: list[int] = []
        self._waiting: list[int] = []
        self._begun: set[int] = set()
        self._outputs: dict[int, int] = {}
        self._leaving: deque[tuple[float, int, str]] = deque()
        self._next: list[tuple[float, int, int]] = []
        self._last_s = 0.0
        self._num_come = 0

    def step(self) -> None:
        """One step, and the requests that have come and gone by its end."""
        self._arrive()
        self._leave()
        if not self._running and not self._waiting:
            self.now = self._next[-1][0]
            return
        self._compute(*self._planned())
        self.num_steps += 1

    def _arrive(self) -> None:
        while True:
            if not self._next:
                self._make_arrivals()
            arrival_s, prompt, output = self._next[-1]
            if arrival_s > self.now:
                return
            self._next.pop()
            name = f"r{self._num_come}"
            self._num_come += 1
            row = self.monitor.add(
                name, num_prompt_tokens=prompt, max_tokens=64, slo=self._slo, arrival_s=arrival_s
            )
            self._waiting.append(row)
            self._outputs[row] = output
            if self._num_come % _ONE_LEAVES == 0:
                self._leaving.append((arrival_s + _PATIENCE_S, row, name))

    def _make_arrivals(self) -> None:
        gaps = self._rng.exponential(1 / _RATE, 1000)
        arrivals = self._last_s + np.cumsum(gaps)
        self._last_s = float(arrivals[-1])
        prompts = 1 + self._rng.poisson(_MEAN_PROMPT, 1000)
        outputs = self._rng.integers(1, _MOST_OUTPUTS + 1, 1000)
        self._next = list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True))
        self._next.reverse()

    def _leave(self) -> None:
        """Clients whose request has not begun go."""
        names = self.monitor.table.req_id
        while self._leaving and self._leaving[0][0] <= self.now:
            _, row, name = self._leaving.popleft()
            if names[row] == name and row not in self._begun:
                self._waiting.remove(row)
                self._end(row, by_itself=False)

    def _end(self, row: int, *, by_itself: bool = True, rejected: bool = False) -> None:
        name = self.monitor.table.req_id[row]
        assert name is not None
        self._begun.discard(row)
        del self._outputs[row]
        self.monitor.finished(name, by_itself=by_itself, rejected=rejected)
        self.num_ended += 1

    def _planned(self) -> tuple[list[int], list[int], int]:
        """Those that run in the next step, those that it may admit, and its tokens."""
        table = self.monitor.table
        computed = table.num_computed[self._running] if self._running else np.zeros(0)
        free = _BLOCKS - int(np.sum(-(-computed // _BLOCK_SIZE)))
        plan = self._planner.plan(self.monitor.state(self._running, self._limits, free))
        for row in plan.preempt.tolist():
            self._running.remove(row)
            self._waiting.insert(0, row)
            tokens = int(table.num_prompt[row] + table.num_output[row])
            self.monitor.requeued(row, num_tokens=tokens, at_front=True)
        for row in plan.reject.tolist():
            self._waiting.remove(row)
            self._end(row, rejected=True)
        run = list(self._running) if plan.run is None else plan.run.tolist()
        admit = list(self._waiting) if plan.admit is None else plan.admit.tolist()
        return run, admit[: _SLOTS - len(self._running)], plan.token_budget or _MAX_TOKENS

    def _admit(self, row: int) -> None:
        table = self.monitor.table
        self._waiting.remove(row)
        self._running.append(row)
        self._begun.add(row)
        target = int(table.num_prompt[row] + table.num_output[row])
        self.monitor.admitted(row, num_computed=0, prefill_target=target)

    def _compute(self, run: list[int], admit: list[int], budget: int) -> None:
        table = self.monitor.table
        decodes, prefills, chunks, sampled = [], [], [], []
        for place, row in enumerate(run + admit):
            if budget <= 0:
                break
            if place >= len(run):
                self._admit(row)
            left = int(table.prefill_target[row] - table.num_computed[row])
            if left <= 0:
                decodes.append(row)
                sampled.append(row)
                budget -= 1
            else:
                chunk = min(left, budget)
                prefills.append(row)
                chunks.append(chunk)
                budget -= chunk
                if chunk == left:
                    sampled.append(row)
        columns: list[Any] = [np.array(rows, np.int64) for rows in (decodes, prefills, chunks)]
        self.monitor.scheduled(*columns)
        self.now += 0.008 + 0.0001 * len(decodes) + 0.00002 * sum(chunks)
        rows = np.array(sampled, dtype=np.int64)
        self.monitor.completed(rows, np.ones(len(rows), dtype=np.int64))
        for row in rows[table.num_output[rows] >= [self._outputs[row] for row in sampled]].tolist():
            self._running.remove(row)
            self._end(row)
        self.monitor.set_busy(bool(self._waiting or self._running))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Five lines of the twenty."""
    shown = [rows[place] for place in (0, 4, 9, 14, 19)]
    lines = [
        [f"{row['num_requests']:,}", f"{row['num_steps']:,}", f"{row['memory_kib'] / 1024:.1f}",
         f"{row['entries']:,}", f"{row['step_us']:.0f}", f"{100 * row['attained']:.1f}"]
        for row in shown
    ]  # fmt: skip
    head = ("requests", "steps", "MiB", "entries of our tables", "CPU of a step, µs",
            "attained, %")  # fmt: skip
    about = (
        f"{rows[-1]['virtual_s'] / 3600:.1f} hours of one engine with {_SLOTS} slots in virtual "
        f"time, {_RATE:.0f} requests/s; late requests are refused, and one client in {_ONE_LEAVES} "
        f"leaves after {_PATIENCE_S:g} s."
    )
    return f"{about}\n\n{markdown(head, lines)}"
