"""What SeaLLM's gain hangs on: the same services and systems under one other condition each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sharing import systems, workload
from sharing.systems import SYSTEMS
from sharing.workload import Traffic
from sola_sched.errors import InfeasibleError
from sola_sched.simulator.sharing.cluster import SharedCluster

_OURS = "SeaLLM"
_BASELINES = ("vLLM, even", "vLLM, placed", "AlpaServe", "MuxServe", "MLFQ")
_RATE = 50.0


@dataclass(frozen=True)
class Condition:
    """How a run differs from those of `sharing` at its highest rate.

    Attributes:
        name: Shown, and what `--only` takes.
        rate: Requests per second.
        duration_s: Of arrivals.
        past_s: Seconds that placements are made of; 0 for the run itself.
        burst_cv: Coefficient of variation of the gaps.
        window_std: Of the logarithm of the rates of windows.
        loads: What the 32 GPUs have to do at 50 requests a second, from and to.
        num_functions: Functions of the trace in each service: fewer make popularity more uneven.
        how: Baselines that share are placed so, see `systems.place`.
        are_all: Whether SeaLLM and `slack` are placed like the baselines that share.
        enough: Attainment above which the search goes by latency alone.
    """

    name: str
    rate: float = _RATE
    duration_s: float = 60.0
    past_s: float = workload.PAST_S
    burst_cv: float = workload.BURST_CV
    window_std: float = workload.WINDOW_STD
    loads: tuple[float, float] = workload.LOADS
    num_functions: int = workload.FUNCTIONS_PER_SERVICE
    how: str = "searched"
    enough: float = 1.0
    are_all: bool = False


CONDITIONS = (
    Condition("as in sharing"),
    Condition("placed with hindsight", past_s=0.0),
    Condition("90 % attained is enough", enough=0.9),
    Condition("five minutes, 90 % is enough", duration_s=300.0, enough=0.9),
    Condition("baselines placed by load", how="load"),
    Condition("baselines placed by load, once", how="once"),
    Condition("all placed by load, once", how="once", are_all=True),
    Condition("ten functions a service", num_functions=10),
    Condition("five minutes", duration_s=300.0),
    Condition("five minutes, by load", duration_s=300.0, how="load"),
    Condition("five minutes, by load, once", duration_s=300.0, how="once"),
    Condition("five minutes, all by load, once", duration_s=300.0, how="once", are_all=True),
    Condition(
        "five minutes, by load, once, ten functions", duration_s=300.0, how="once", num_functions=10
    ),
    Condition("bursts, variation 8", duration_s=300.0, burst_cv=8.0),
    Condition("windows vary twice as much", duration_s=300.0, window_std=1.0),
    Condition("GPUs loaded 85 to 95 %", duration_s=300.0, loads=(0.85, 0.95)),
    Condition("70 requests a second", duration_s=300.0, rate=70.0),
)


@dataclass(frozen=True)
class Case:
    """One condition with one seed."""

    condition: Condition
    seed: int
    data: Path | None


def conditions(setup: Setup) -> Outcome:
    """Normalized latency of all systems, and ours against the best and the worst baseline."""
    setup.check_only([condition.name for condition in CONDITIONS])
    chosen = [c for c in CONDITIONS if not setup.only or c.name in setup.only]
    if setup.is_quick:
        chosen = chosen[:2]
    cases = [Case(c, seed, setup.data) for c in chosen for seed in setup.seeds]
    rows = setup.rows_of(cases, _key, make, "conditions") if not setup.is_stored else _stored(setup)
    parts = [
        f"16 services on 32 GPUs (A800), {_RATE:g} requests a second unless named, mean of the "
        "seeds. Where systems are placed by load, `vLLM, placed`, SeaLLM and `slack` are placed by "
        "the search nevertheless, unless it says all."
    ]
    for key, shown, is_up in (("norm", "{:.2f}", False), ("p99", "{:.0f}", False),
                              ("attained", "{:.1%}", True)):  # fmt: skip
        title = {"norm": "Normalized latency", "p99": "P99 latency, s", "attained": "Attained"}[key]
        parts.append(f"### {title}\n\n" + _table(rows, chosen, key, shown, is_up))
    return Outcome(rows, "\n\n".join(parts))


def make(case: Case) -> Row:
    """All systems under one condition."""
    condition, seed = case.condition, case.seed
    made = workload.services(
        case.data, 16, condition.rate, seed, loads=condition.loads,
        num_functions=condition.num_functions,
    )  # fmt: skip
    bursts = {"burst_cv": condition.burst_cv, "window_std": condition.window_std}
    run = workload.arrivals(made, condition.duration_s, 2 * seed + 1, **bursts)
    past = run
    if condition.past_s:
        past = workload.arrivals(made, condition.past_s, 2 * seed, **bursts)
    traffic = Traffic(made, run, past)
    found: dict[str, Any] = {}
    for system in SYSTEMS:
        is_ours = system.name in (_OURS, "slack")
        is_searched = system.name == "vLLM, placed" or (is_ours and not condition.are_all)
        how = "searched" if is_searched else condition.how
        try:
            setting, placement = systems.place(
                system, traffic, 32, how=how, enough=condition.enough
            )
        except InfeasibleError:
            found[system.name] = None
            continue
        requests = SharedCluster(setting, placement).run(setting.requests(run))
        shared = sum(len(group.services) > 1 for group in placement.groups)
        found[system.name] = systems.measure(setting, requests) | {"shared_groups": shared}
    return {"condition": condition.name, "seed": seed, "num_requests": len(run), "systems": found}


def _key(case: Case) -> str:
    from sharing.experiments import source

    return f"{case.condition} {case.seed} {case.data is None} {source()}"


def _stored(setup: Setup) -> list[Row]:
    """The last row of each condition and seed."""
    found = {(row["condition"], row["seed"]): row for row in setup.all_rows()}
    return [row for (_, seed), row in found.items() if seed in setup.seeds]


def _table(
    rows: Sequence[Row], chosen: Sequence[Condition], key: str, shown: str, is_up: bool
) -> str:
    names = [system.name for system in SYSTEMS]
    lines = []
    for condition in chosen:
        own = [row["systems"] for row in rows if row["condition"] == condition.name]
        means = {
            name: None if any(one[name] is None for one in own)
            else float(np.mean([one[name][key] for one in own]))
            for name in names
        }  # fmt: skip
        ours = means[_OURS]
        assert ours is not None
        others = [mean for name in _BASELINES if (mean := means[name]) is not None]
        factors = [ours / other if is_up else other / ours for other in others]
        cells = ["no place" if mean is None else shown.format(mean) for mean in means.values()]
        lines.append([condition.name, *cells, f"{min(factors):.2f}", f"{max(factors):.2f}"])
    return markdown(["", *names, "over the best", "over the worst"], lines)
