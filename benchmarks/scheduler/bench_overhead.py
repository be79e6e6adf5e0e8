"""What `sola_sched.Scheduler` adds to vLLM's own scheduling time per step, in traffic.

vLLM's scheduler, ours, and ours with a stopwatch in each part serve the same kind of traffic in
virtual time, with no model, and step in turn. Only `schedule()` and `update_from_output()` are
timed, as CPU time of the thread and as wall time. `python benchmarks/run.py overhead` measures.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # only the table is printed

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness import provenance
from harness.markdown import markdown
from harness.setup import Outcome, Setup
from scheduler import lockstep
from scheduler.closed_loop import Load
from scheduler.parts import PARTS, TimedSola
from sola_sched.bench.report import results
from sola_sched.vllm_adapter.scheduler import Scheduler as SolaScheduler

#: What the shortest realistic step takes at least: Llama-3-8B on an H100.
SHORTEST_STEP_US = 6500.0


def measure(
    load: Load, *, num_steps: int = 1000, num_warmups: int = 200, seed: int = 0
) -> dict[str, Any]:
    """A row with microseconds per step.

    `added` compares the distributions, since both serve their own steps: the median of ours less
    that of stock, and the same for the 99th percentile.
    """
    stock_cls = AsyncScheduler if load.is_async else Scheduler
    stock, ours, parted = lockstep.run(
        (stock_cls, SolaScheduler, TimedSola),
        load,
        num_steps=num_steps,
        num_warmups=num_warmups,
        seed=seed,
    )
    row: dict[str, Any] = {**load.__dict__, "num_steps": num_steps, "seed": seed}
    row["mean_running"] = float(np.mean(ours.num_running))
    for place, clock in enumerate(("cpu", "wall")):
        of_stock, of_ours = (_quantiles([t[place] for t in e.times_ns]) for e in (stock, ours))
        added = {name: of_ours[name] - of_stock[name] for name in of_stock}
        row |= {f"{clock}_stock_us": of_stock, f"{clock}_ours_us": of_ours}
        row[f"{clock}_added_us"] = added
    row["parts_us"] = {
        part: _quantiles([step.get(part, 0) for step in parted.parts_ns]) for part in PARTS
    }
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
    columns = ("policy", "traffic", "mode", "situation", "slots", "waiting", "running", "vLLM us",
               "ours us", "added us", "added", "of 6.5 ms")  # fmt: skip
    lines = []
    for row in rows:
        stock, ours, added = (row[f"{clock}_{name}_us"] for name in ("stock", "ours", "added"))
        both = (f"{t['median']:.0f} / {t['p99']:.0f}" for t in (stock, ours, added))
        lines.append([
            *_load_of(row), f"{row['mean_running']:.0f}", *both,
            f"{added['median'] / stock['median']:+.0%}",
            f"{added['median'] / SHORTEST_STEP_US:.2%}",
        ])  # fmt: skip
    return markdown(columns, lines, 4)


def _load_of(row: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    """Policy, traffic, mode, situation, slots and waiting; older rows are of plain situations."""
    slots = row["num_running"] + row.get("num_free_slots", 0)
    return (
        row["policy"], row["kind"], "async" if row["is_async"] else "sync",
        row.get("situation", "plain"), str(slots), str(row["num_waiting"]),
    )  # fmt: skip


def comparison(rows: Sequence[dict[str, Any]], labels: Sequence[str], *, clock: str) -> str:
    """A line per load with what is added under each label: median and, behind the stroke, p99."""
    by_load: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        load = *_load_of(row), str(row["num_running"])
        by_load.setdefault(load, {})[row["label"]] = row
    columns = [f"{name}, {label}" for label in labels for name in ("vLLM us", "added us", "added")]
    lines = []
    for key, found in by_load.items():
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
        lines.append([*key, *cells])
    of_load = ("policy", "traffic", "mode", "situation", "slots", "waiting", "running")
    return markdown([*of_load, *columns], lines, 4)


def parts_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per part and load: the median, the 99th percentile and the mean of a step."""
    lines = [
        [_name_of(row), PARTS[part], *(f"{us[name]:.0f}" for name in ("median", "p99", "mean"))]
        for row in rows
        for part, us in row.get("parts_us", {}).items()
    ]
    return markdown(["load", "part", "median us", "p99 us", "mean us"], lines, 2)


def _name_of(row: Mapping[str, Any]) -> str:
    *what, slots, waiting = _load_of(row)
    return f"{' '.join(what)}, {row['num_running']} of {slots} + {waiting}"


def rows_of(choices: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """A row per combination of policies, kinds, modes, numbers of requests and situations."""
    for policy, kind, mode, running, waiting, free, situation in itertools.product(
        choices["policies"], choices["kinds"], choices["modes"], choices["num_running"],
        choices["num_waiting"], choices["num_free_slots"], choices["situations"],
    ):  # fmt: skip
        load = Load(policy, kind, mode == "async", running, waiting, free, situation)
        row = measure(load, num_steps=choices["num_steps"], seed=seed)
        yield {"label": choices["label"], **row, **circumstances()}


def overhead(setup: Setup) -> Outcome:
    """What is added under each label; of a run what it measured."""
    clock, labels = setup.options["clock"], setup.options["compare"]
    if not setup.is_stored:
        rows = [row for seed in setup.seeds for row in setup.keep(rows_of(setup.options, seed))]
        return Outcome(rows, f"{table(rows, clock=clock)}\n\n{parts_table(rows)}")
    rows = setup.all_rows()
    labels = labels or list(dict.fromkeys(row["label"] for row in rows))
    return Outcome(rows, comparison(rows, labels, clock=clock))
