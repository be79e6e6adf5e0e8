"""The part of a first run on the real engine: past what stock vLLM sustains, and well below."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from sola_sched.bench import calibrate
from sola_sched.bench.backends.base import (
    Backend,
    OnDone,
    RunOutcome,
    SchedulerSpec,
    parse_scheduler,
)
from sola_sched.bench.first_run import plan as first_run_plan
from sola_sched.bench.first_run.checks import Evenness, end_wait_s, evenness, is_saturated
from sola_sched.bench.first_run.plan import HIGH_SHARE, OURS, Block, FirstRunPlan, Machine
from sola_sched.bench.first_run.verdict import Comparison, sentences
from sola_sched.bench.report import intervals, results
from sola_sched.bench.report.progress import Progress
from sola_sched.bench.report.results import Result, SloSource
from sola_sched.bench.report.table import in_ms
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.workloads.workload import Workload

Say = Callable[[str], None]

#: Token budget of the short runs and of ours.
MAX_NUM_BATCHED_TOKENS = 2048
#: The capacity is what is served with so many requests in flight, as in a full engine.
_PROBE_REQUESTS, _PROBE_CONCURRENCY = 120, 64
#: Blocks are left out once they would end so many times the budget after the start.
_MAX_OVERRUN = 1.5


class Interrupted(Exception):
    """The user ended a run."""


class _Timed:
    """A backend that remembers the wall-clock time of its last run."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name, self.model_id = backend.name, backend.model_id
        self.tokenizer_id = backend.tokenizer_id
        self.wall_s = 0.0
        self.last: RunOutcome | None = None

    def run(
        self,
        workload: Workload,
        scheduler: SchedulerSpec,
        slo: SloTarget,
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        begun_s = time.monotonic()
        outcome = self._backend.run(
            workload, scheduler, slo, max_concurrency=max_concurrency, on_done=on_done
        )
        self.wall_s, self.last = time.monotonic() - begun_s, outcome
        return outcome


@dataclass
class _Runs:
    """What has been run so far, by load and scheduler, in the order of the blocks."""

    rates: dict[float, float] = field(default_factory=dict)
    flags: dict[tuple[float, str], list[list[bool]]] = field(default_factory=dict)
    waits_s: dict[tuple[float, str], list[float]] = field(default_factory=dict)
    reference_s: dict[tuple[float, str], list[float]] = field(default_factory=dict)

    def forget(self, load: float) -> None:
        """Drop the runs at a load."""
        for table in (self.flags, self.waits_s, self.reference_s):
            for key in [key for key in table if key[0] == load]:
                del table[key]

    def stock(self, load: float) -> list[str]:
        """Stock settings that were run in every block at this load."""
        num_blocks = len(self.flags.get((load, OURS), ()))
        labels = [label for at, label in self.flags if at == load and label != OURS]
        return [label for label in labels if len(self.flags[load, label]) == num_blocks]

    def best(self, load: float) -> str | None:
        """The stock setting that attained most at this load, None if there is none."""
        labels = self.stock(load)
        return max(labels, key=lambda label: _mean(self.flags[load, label])) if labels else None


class FirstRun:
    """One comparison on a backend.

    Args:
        backend: The engine.
        pool: Requests; the first of them are run.
        directory: Of results and figures.
        say: Takes lines of text.
        budget_s: Wall-clock seconds for everything here.
        is_hidden: No progress bars.
    """

    def __init__(
        self,
        backend: Backend,
        pool: Workload,
        directory: Path,
        say: Say,
        *,
        budget_s: float = first_run_plan.BUDGET_S,
        is_hidden: bool = False,
    ) -> None:
        self._backend, self._pool, self._say = _Timed(backend), pool, say
        self._directory, self._budget_s, self._is_hidden = directory, budget_s, is_hidden
        self._runs, self._results = _Runs(), list[Result]()
        self._stem = datetime.now().strftime("%Y%m%d-%H%M%S")

    def run(self) -> list[str]:
        """Measure, compare, and return the sentences of the verdict.

        Raises:
            ConfigError: The engine cannot serve the requests.
            Interrupted: The user ended a run.
        """
        begun_s = time.monotonic()
        machine = self._measure()
        left_s = self._budget_s - (time.monotonic() - begun_s)
        plan = first_run_plan.plan_runs(machine, left_s)
        self._say_plan(plan)
        high = HIGH_SHARE
        for number, block in enumerate(plan.blocks):
            now_s = time.monotonic() - begun_s
            block_s = block.num_runs * first_run_plan.run_s(machine, block.load, block.num_requests)
            if number and now_s + block_s > _MAX_OVERRUN * max(self._budget_s, plan.seconds):
                self._say(f"   Block {number + 1} is left out: the machine is slower than it was.")
                continue
            if block.load > 1.0:
                block = replace(block, load=high)
            self._run_block(number, block, machine)
            if number == 0 and not self._is_saturated(block.load):
                raised = round(high * first_run_plan.RAISE, 2)
                self._say(
                    f"   Stock vLLM sustains {block.load:g} x, so its capacity is higher than "
                    f"measured. The block is repeated at {raised:g} x."
                )
                self._runs.forget(high)
                high = raised
                self._run_block(number, replace(block, load=high), machine)
        self._draw()
        return sentences(*self._comparisons())

    def _measure(self) -> Machine:
        """Find targets and capacity, and how fast the machine gets through them."""
        budget = {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
        reference = SchedulerSpec("stock", "stock", budget)
        with Progress("single-request latency", is_hidden=self._is_hidden) as bar:
            self._slo = calibrate.measure_slo(self._backend, self._pool, reference, bar.done)
        with Progress("capacity of stock vLLM", is_hidden=self._is_hidden) as bar:
            capacity = calibrate.measure_saturation(
                self._backend,
                self._pool,
                reference,
                bar.done,
                num_requests=_PROBE_REQUESTS,
                concurrency=_PROBE_CONCURRENCY,
            )
        outcome, target = self._backend.last, self._slo.target
        assert outcome is not None
        share = min(1.0, outcome.cpu_share or 1.0)
        worked_s = outcome.duration_s / (share if outcome.clock == "cpu" else 1.0)
        self._say(
            f"   Targets here: TTFT {in_ms(target.ttft_s)}, TPOT {in_ms(target.tpot_s)}, "
            f"10 x the latency of a request alone. Stock vLLM serves {capacity:.3g} requests/s."
        )
        return Machine(
            capacity,
            target.ttft_s,
            start_s=max(1.0, self._backend.wall_s - worked_s),
            share=share,
            skips_idle=outcome.clock != "wall",
        )

    def _say_plan(self, plan: FirstRunPlan) -> None:
        num_runs = sum(block.num_runs for block in plan.blocks)
        self._say(
            f"   {len(plan.blocks)} blocks of equal requests, {num_runs} runs, each scheduler in"
            f" turn, about {plan.seconds:.0f} s. An equal batch is timed before and after each run."
        )
        if plan.cuts:
            self._say(f"   Left out for lack of time on this machine: {'; '.join(plan.cuts)}.")

    def _run_block(self, number: int, block: Block, machine: Machine) -> None:
        rate = float(f"{block.load * machine.capacity_per_s:.3g}")
        self._runs.rates[block.load] = rate
        workload = self._workload(block, rate)
        self._say(
            f"   Block {number + 1}: {rate:g} requests/s, {block.load:g} x the capacity, "
            f"{len(workload.requests)} requests."
        )
        for name in block.schedulers(self._runs.best(block.load) or self._runs.best(HIGH_SHARE)):
            spec = parse_scheduler(name)
            spec.engine_args.setdefault("max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS)
            with Progress(
                f"{name} @ {rate:g}/s",
                len(workload.requests),
                self._slo.target,
                is_hidden=self._is_hidden,
            ) as bar:
                outcome = self._backend.run(workload, spec, self._slo.target, on_done=bar.done)
            if outcome.interrupted:
                raise Interrupted
            self._keep(block, name, spec, workload, outcome)
            if outcome.ends_all:
                raise Interrupted

    def _workload(self, block: Block, rate: float) -> Workload:
        """The requests that the capacity was measured with, in another order in every block."""
        order = np.random.default_rng([block.seed, 10]).permutation(block.num_requests)
        requests = self._pool.requests
        chosen = ((at, requests[at % len(requests)]) for at in order.tolist())
        named = tuple(replace(request, req_id=f"{at}-{request.req_id}") for at, request in chosen)
        return replace(self._pool, requests=named).at_rate(rate, seed=block.seed)

    def _keep(
        self,
        block: Block,
        name: str,
        spec: SchedulerSpec,
        workload: Workload,
        outcome: RunOutcome,
    ) -> None:
        key = block.load, name
        flags = metrics.attained(outcome.records, self._slo.target).tolist()
        wait_s = end_wait_s(outcome.records)
        self._runs.flags.setdefault(key, []).append(flags)
        self._runs.waits_s.setdefault(key, []).append(wait_s)
        self._runs.reference_s.setdefault(key, []).extend(outcome.reference_s)
        batch = ""
        if outcome.reference_s:
            times = " and ".join(f"{1e3 * time_s:.0f}" for time_s in outcome.reference_s)
            batch = f"; equal batch {times} ms"
        self._say(
            f"     {name:11} {intervals.share(flags).percent():24} within both targets; "
            f"the last waited {wait_s:.2g} s{batch}"
        )
        for note in outcome.notes:
            self._say(f"       {note}")
        info = results.RunInfo(
            backend=self._backend.name,
            model_id=self._backend.model_id,
            tokenizer_id=self._backend.tokenizer_id,
            dataset_name="sharegpt-like",
            seed=block.seed,
            slo=SloSource(self._slo.target, self._slo.source),
            label="first-run",
        )
        result = results.make_result(info, workload, spec, outcome)
        path = self._directory / f"first-run-{self._stem}.jsonl"
        results.save(path, [results.without_details(result)], append=bool(self._results))
        self._results.append(result)

    def _is_saturated(self, load: float) -> bool:
        runs, labels = self._runs, self._runs.stock(load)
        waits = {label: runs.waits_s[load, label] for label in labels}
        attained = {
            label: [float(np.mean(flags)) for flags in runs.flags[load, label]] for label in labels
        }
        return is_saturated(waits, attained, self._slo.target.ttft_s)

    def _comparisons(self) -> tuple[list[Comparison], Evenness]:
        runs, found, times_s = self._runs, list[Comparison](), []
        for load in sorted({load for load, _ in runs.flags}, reverse=True):
            best = runs.best(load)
            if best is None:
                continue
            found.append(
                Comparison(
                    load,
                    runs.rates[load],
                    best,
                    runs.flags[load, OURS],
                    runs.flags[load, best],
                    min(runs.waits_s[load, best]),
                    self._slo.target.ttft_s,
                    self._is_saturated(load),
                )
            )
            times_s.append((runs.reference_s[load, OURS], runs.reference_s[load, best]))
        return found, evenness(times_s)

    def _draw(self) -> None:
        from sola_sched.bench.report import plots

        seen: dict[tuple[object, object], Result] = {}
        for result in self._results:  # one block of each rate
            seen.setdefault((result["request_rate"], result["scheduler"]["label"]), result)
        path = self._directory / f"first-run-{self._stem}-ttft-tpot.png"
        runs = list(seen.values())
        picture = plots.drawn(lambda: plots.plot_plane(runs, self._slo.target, path))
        self._say(f"   Picture of every request: {picture}")


def _mean(groups: list[list[bool]]) -> float:
    return float(np.mean(np.concatenate(groups)))
