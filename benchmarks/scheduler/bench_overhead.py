"""What `sola_sched.Scheduler` adds to vLLM's own scheduling time per step, in traffic.

Both schedulers serve the same kind of traffic in virtual time, with no model, and are stepped in
turn, so that noise of the machine meets both. Only `schedule()` and `update_from_output()` are
timed, as CPU time of the thread and as wall time. `python benchmarks/run.py overhead` measures; run
as a script, `--out FILE` appends rows and `--table FILE` prints those of a file.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # only the table is printed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where this file is the script

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness import provenance
from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.bench.report import results
from sola_sched.simulator.engine import VirtualEngine
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.vllm_adapter.scheduler import Scheduler as SolaScheduler

#: Steps of this model are the shortest that are realistic: what they take at least, microseconds.
PROFILE, SHORTEST_STEP_US = "llama-3-8b-h100", 6500.0
#: The last one has no targets: the state is kept, and vLLM plans as ever.
OBSERVE = "observe"
POLICIES = ("attain", "paper", "alise", OBSERVE)
NUM_RUNNING = (1, 16, 64, 256)
#: Tokens of a step, for both schedulers.
_CHUNK = 8192
_GC_STEPS = 200


@dataclass(frozen=True)
class Kind:
    """Traffic: log-normal lengths and the targets that are usual for it.

    Attributes:
        prompt, output: Mean and standard deviation of the logarithm of the tokens.
        ttft_s, tpot_s: Targets, seconds.
    """

    prompt: tuple[float, float]
    output: tuple[float, float]
    ttft_s: float
    tpot_s: float


#: Means as in ShareGPT, of completions with their file, and of documents.
KINDS = {
    "chat": Kind((220.0, 1.1), (260.0, 0.9), 2.0, 0.1),
    "code": Kind((1200.0, 0.6), (120.0, 0.6), 2.0, 0.1),
    "long": Kind((5000.0, 0.4), (500.0, 0.6), 10.0, 0.2),
}
_MAX_PROMPT, _MAX_OUTPUT = 7000, 1000


@dataclass(frozen=True)
class Load:
    """What is served: `num_running` slots, and so many requests more that wait for one."""

    policy: str = "attain"
    kind: str = "chat"
    is_async: bool = True
    num_running: int = 256
    num_waiting: int = 0


class ClosedLoop(VirtualEngine):
    """Serves a constant number of requests: when one ends, the next one arrives.

    Attributes:
        times_ns: Of each step that was delivered, CPU and wall time in both calls.
        num_running: Requests in each of these steps.
    """

    def __init__(self, scheduler_cls: type[Any], load: Load, seed: int) -> None:
        kind, profile = KINDS[load.kind], load_step_profile(PROFILE)
        options: dict[str, Any] = {"log_interval_s": 0}
        if load.policy == OBSERVE:
            options |= {"ttft_s": None, "tpot_s": None}
        else:
            options |= {"policy": load.policy, "ttft_s": kind.ttft_s, "tpot_s": kind.tpot_s}
        per_request = (_MAX_PROMPT + _MAX_OUTPUT) // profile.block_size + 1
        super().__init__(
            scheduler_cls,
            model=profile.model_config(),
            num_blocks=2 * load.num_running * per_request,  # memory decides nothing here
            block_size=profile.block_size,
            max_model_len=profile.max_model_len or _MAX_PROMPT + _MAX_OUTPUT,
            max_num_seqs=load.num_running,
            max_num_batched_tokens=_CHUNK,
            async_scheduling=load.is_async,
            additional_config={"sola_sched": options},
            step_time=profile.step_time,
        )
        self.times_ns: list[tuple[int, int]] = []
        self.num_running: list[int] = []
        self._spent_ns = [0, 0]
        self._requests_to_come = requests(kind, random.Random(seed))
        self.on_finish = lambda _: self._next(1.0)
        for name in ("schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))
        left = random.Random(seed + 1)
        for _ in range(load.num_running + load.num_waiting):  # as if they had run for a while
            self._next(left.random())

    def advance(self) -> None:
        """Run until one step with tokens is delivered."""
        self._spent_ns = [0, 0]
        trace = None
        while trace is None or not trace.output.total_num_scheduled_tokens:
            trace = self.step()
        self.times_ns.append((self._spent_ns[0], self._spent_ns[1]))
        self.num_running.append(len(trace.output.num_scheduled_tokens))

    def _next(self, share_left: float) -> None:
        request = next(self._requests_to_come)
        output_len = max(1, math.ceil(share_left * request.output_len))
        self.add(replace(request, arrival_s=self.clock.now, output_len=output_len))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            result = call(*args)
            self._spent_ns[0] += time.thread_time_ns() - cpu_ns
            self._spent_ns[1] += time.perf_counter_ns() - start_ns
            return result

        return timed


def requests(kind: Kind, rng: random.Random) -> Iterator[VirtualRequest]:
    """Requests without an end; who takes them says when they arrive."""

    def tokens(mean: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    for number in itertools.count():
        prompt_len, output_len = (
            tokens(*kind.prompt, _MAX_PROMPT),
            tokens(*kind.output, _MAX_OUTPUT),
        )
        yield VirtualRequest(f"r{number}", 0.0, output_len, prompt_len, max_tokens=_MAX_OUTPUT)


def measure(
    load: Load, *, num_steps: int = 1000, num_warmups: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Step both schedulers in turn; a row with microseconds per step.

    `added` compares the distributions, since both serve their own steps: the median of ours less
    that of stock, and the same for the 99th percentile.
    """
    stock_cls = AsyncScheduler if load.is_async else Scheduler
    engines = [ClosedLoop(cls, load, seed) for cls in (stock_cls, SolaScheduler)]
    gc.collect()
    gc.disable()
    try:
        for engine in engines:
            for _ in range(num_warmups):
                engine.advance()
            engine.times_ns.clear()
            engine.num_running.clear()
        for step in range(num_steps):
            for engine in engines if step % 2 else engines[::-1]:
                engine.advance()
            if step % _GC_STEPS == _GC_STEPS - 1:
                gc.collect()
    finally:
        gc.enable()
    row: dict[str, Any] = {**load.__dict__, "num_steps": num_steps, "seed": seed}
    row["mean_running"] = float(np.mean(engines[1].num_running))
    for place, clock in enumerate(("cpu", "wall")):
        stock, ours = (_quantiles([t[place] for t in e.times_ns]) for e in engines)
        added = {name: ours[name] - stock[name] for name in stock}
        row |= {f"{clock}_stock_us": stock, f"{clock}_ours_us": ours, f"{clock}_added_us": added}
    return row


def _quantiles(times_ns: Sequence[int]) -> dict[str, float]:
    times_us = np.asarray(times_ns) / 1e3
    return {
        "median": float(np.median(times_us)),
        "p99": float(np.quantile(times_us, 0.99)),
        "mean": float(times_us.mean()),
    }


def circumstances() -> dict[str, Any]:
    """Machine, versions and commit of a row."""
    return {
        **provenance.columns(1),
        "versions": results.environment()["versions"],
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
    }


def table(rows: Sequence[dict[str, Any]], *, clock: str = "cpu") -> str:
    """A line per row; microseconds are medians and, behind the stroke, 99th percentiles."""
    columns = ("policy", "traffic", "mode", "slots", "waiting", "running", "vLLM us", "ours us",
               "added us", "added", "of 6.5 ms")  # fmt: skip
    lines = []
    for row in rows:
        stock, ours, added = (row[f"{clock}_{name}_us"] for name in ("stock", "ours", "added"))
        both = (f"{t['median']:.0f} / {t['p99']:.0f}" for t in (stock, ours, added))
        lines.append([
            row["policy"], row["kind"], "async" if row["is_async"] else "sync",
            str(row["num_running"]), str(row["num_waiting"]), f"{row['mean_running']:.0f}", *both,
            f"{added['median'] / stock['median']:+.0%}",
            f"{added['median'] / SHORTEST_STEP_US:.2%}",
        ])  # fmt: skip
    return markdown(columns, lines, 3)


def comparison(rows: Sequence[dict[str, Any]], labels: Sequence[str], *, clock: str) -> str:
    """A line per load with what is added under each label: median and, behind the stroke, p99."""
    keys = ("policy", "kind", "is_async", "num_running", "num_waiting")
    by_load: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_load.setdefault(tuple(row[key] for key in keys), {})[row["label"]] = row
    columns = [f"{name}, {label}" for label in labels for name in ("vLLM us", "added us", "added")]
    lines = []
    for (policy, kind, is_async, slots, waiting), found in by_load.items():
        cells = []
        for label in labels:
            if label not in found:
                cells += ["", "", ""]
                continue
            stock, added = (found[label][f"{clock}_{name}_us"] for name in ("stock", "added"))
            cells += [
                f"{stock['median']:.0f}",
                f"{added['median']:.0f} / {added['p99']:.0f}",
                f"{added['median'] / stock['median']:+.0%}",
            ]
        mode = "async" if is_async else "sync"
        lines.append([policy, kind, mode, str(slots), str(waiting), *cells])
    return markdown(["policy", "traffic", "mode", "slots", "waiting", *columns], lines, 3)


def rows_of(choices: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """A row per combination of policies, kinds, modes and numbers of requests."""
    for policy, kind, mode, running, waiting in itertools.product(
        choices["policies"], choices["kinds"], choices["modes"], choices["num_running"],
        choices["num_waiting"],
    ):  # fmt: skip
        load = Load(policy, kind, mode == "async", running, waiting)
        row = measure(load, num_steps=choices["num_steps"], seed=seed)
        yield {"label": choices["label"], **row, **circumstances()}


def overhead(setup: Setup) -> Outcome:
    """What is added under each label; of a run what it measured."""
    clock, labels = setup.options["clock"], setup.options["compare"]
    if not setup.is_stored:
        rows = [row for seed in setup.seeds for row in setup.keep(rows_of(setup.options, seed))]
        return Outcome(rows, table(rows, clock=clock))
    rows = setup.all_rows()
    labels = labels or list(dict.fromkeys(row["label"] for row in rows))
    return Outcome(rows, comparison(rows, labels, clock=clock))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["attain"])
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--modes", nargs="+", choices=("sync", "async"), default=("sync", "async"))
    parser.add_argument("--num-running", nargs="+", type=int, default=NUM_RUNNING)
    parser.add_argument("--num-waiting", nargs="+", type=int, default=[0])
    parser.add_argument("--num-steps", type=int, default=1000, help="steps measured per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="of the table")
    parser.add_argument("--out", type=Path, help="JSON lines to append the rows to")
    parser.add_argument("--label", default="", help="kept in the rows, e.g. before")
    parser.add_argument("--table", type=Path, help="print these rows, run nothing")
    parser.add_argument(
        "--compare", nargs="+", default=[], help="with --table: labels side by side"
    )
    args = parser.parse_args()
    if args.table is not None:
        rows = [json.loads(line) for line in args.table.read_text().splitlines()]
        if args.compare:
            print(comparison(rows, args.compare, clock=args.clock))
            return
        rows = [row for row in rows if row["label"] == args.label]
        print(table(rows, clock=args.clock))
        return
    rows = []
    for row in rows_of(vars(args), args.seed):
        rows.append(row)
        if args.out is not None:
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
    print(table(rows, clock=args.clock))


if __name__ == "__main__":
    main()
