"""SeaLLM's section 6 in virtual time: rates, ablation, sensitivity, the search, replacement."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.import_closure import digest, import_closure
from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sharing import systems, workload
from sharing.systems import SYSTEMS
from sharing.workload import Traffic
from sola_sched.cluster.sharing.exhaustive import search_exhaustively
from sola_sched.cluster.sharing.placement import Cluster
from sola_sched.cluster.sharing.search import Problem, search
from sola_sched.cluster.sharing.turns import DoublingBudget
from sola_sched.simulator.sharing.cluster import Evaluator, Setting
from sola_sched.simulator.sharing.hardware import Hardware
from sola_sched.simulator.sharing.replaced import ReplacingCluster, expected

_NUM_SERVICES, _NUM_GPUS, _DURATION_S = 16, 32, 60.0
#: Requests per second; the paper's go from 2 to 50.
RATES = (2.0, 10.0, 20.0, 30.0, 40.0, 50.0)
#: The rate of the sensitivity tables, where the systems are apart and none is lost.
_MIDDLE = 40.0
_NAMES = tuple(system.name for system in SYSTEMS)
_BASELINES = tuple(name for name in _NAMES if name not in ("SeaLLM", "slack"))
#: What is measured: how it is shown, and whether more of it is better.
_MEASURES = {
    "norm": ("normalized latency", "{:.2f}", False),
    "p99": ("P99 latency, s", "{:.1f}", False),
    "attained": ("attained", "{:.1%}", True),
    "ttft": ("mean TTFT, s", "{:.2f}", False),
    "tpot": ("mean TPOT, ms", "{:.1f}", False),
}


@dataclass(frozen=True)
class Case:
    """One run of all systems.

    Attributes:
        part: What is varied beside the rate: ``rate``, ``scale``, ``gpus``, ``skew``, ``blur``.
        value: Of it.
    """

    part: str
    value: float
    rate: float
    seed: int
    data: Path | None
    systems: tuple[str, ...] = _NAMES


def rates(setup: Setup) -> Outcome:
    """Fig. 6, 7 and 8: five measures over the rate, mean of the seeds."""
    some: Sequence[float] = RATES[3:4] if setup.is_quick else RATES
    cases = [Case("rate", rate, rate, seed, setup.data) for rate in some for seed in setup.seeds]
    rows = _rows(setup, cases, "rates")
    some = [rate for rate in some if any(row["value"] == rate for row in rows)]
    num_seeds = {f"{rate:g}": sum(row["value"] == rate for row in rows) for rate in some}
    parts = [
        f"{_NUM_SERVICES} services on {_NUM_GPUS} GPUs (A800), {_DURATION_S:.0f} s of arrivals, "
        "mean of the seeds (how many, by rate: "
        + ", ".join(f"{rate}: {num}" for rate, num in num_seeds.items())
        + f"). SLO: {workload.SLO_SCALE:g} x a service's mean "
        "execution time. MLFQ is SeaLLM-M of Fig. 8, AlpaServe SeaLLM-F, vLLM placed SeaLLM-P."
    ]
    for key, (title, shown, is_up) in _MEASURES.items():
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n" + _over(rows, some, key, shown))
        parts.append(_against(rows, some, key, is_up))
    return Outcome(rows, "\n\n".join(parts))


def sensitivity(setup: Setup) -> Outcome:
    """Fig. 10 to 13: SLO scale, GPUs, skew and profiling accuracy at one rate."""
    varied = {
        "scale": ("SLO scale (Fig. 10)", (2.5, 5.0, 10.0)),
        "gpus": ("GPUs (Fig. 11, densities 0.5 to 2)", (64, 48, 32, 16)),
        "skew": ("requests of one service in a row (Fig. 12)", (1, 4, 16)),
        "blur": ("deviation of outputs from the profile (Fig. 13)", (0, 1, 4, 16)),
    }
    names = ("vLLM, placed", "AlpaServe", "MuxServe", "MLFQ", "SeaLLM", "slack")
    setup.check_only(list(varied))
    chosen = {k: v for k, v in varied.items() if not setup.only or k in setup.only}
    cases = [
        Case(part, float(value), _MIDDLE, seed, setup.data, names)
        for seed in setup.seeds
        for part, (_, values) in chosen.items()
        for value in values
    ]
    rows = _rows(setup, cases, "sensitivity")
    parts = [f"{_MIDDLE:g} requests a second, mean of {len(setup.seeds)} seeds."]
    for part, (title, values) in chosen.items():
        own = [row for row in rows if row["part"] == part]
        for key in ("attained", "norm"):
            shown = _MEASURES[key][1]
            table = _over(own, [float(v) for v in values], key, shown, names)
            parts.append(f"### {_MEASURES[key][0].capitalize()}: {title}\n\n{table}")
    return Outcome(rows, "\n\n".join(parts))


def make(case: Case) -> Row:
    """All systems on one case."""
    scale = case.value if case.part == "scale" else workload.SLO_SCALE
    num_gpus = int(case.value) if case.part == "gpus" else _NUM_GPUS
    traffic = _traffic(case.data, case.rate, case.seed, scale)
    change: Callable[[Any], Any] = list
    if case.part == "skew":
        change = functools.partial(workload.skewed, consecutive=int(case.value))
    if case.part == "blur":
        change = functools.partial(workload.blurred, factor=case.value, seed=case.seed)
    found = {
        system.name: systems.run(system, traffic, num_gpus, change)
        for system in SYSTEMS
        if system.name in case.systems
    }
    return {
        "part": case.part, "value": case.value, "rate": case.rate, "seed": case.seed,
        "num_requests": len(traffic.arrivals), "systems": found,
    }  # fmt: skip


@functools.lru_cache(maxsize=8)
def _traffic(data: Path | None, rate: float, seed: int, scale: float) -> Traffic:
    return workload.traffic(data, _NUM_SERVICES, rate, _DURATION_S, seed, scale)


def _rows(setup: Setup, cases: Sequence[Case], title: str) -> list[Row]:
    """The rows of the cases; they change with the source and the data."""
    digest_now = source()

    def key_of(case: Case) -> str:
        name = "made-up" if case.data is None else "data"
        parts = (case.part, case.value, case.rate, case.seed, name, *case.systems, digest_now)
        return " ".join(map(str, parts))

    if not setup.is_stored:
        return setup.rows_of(cases, key_of, make, title)
    wanted = {(c.part, c.value, c.rate, c.seed) for c in cases}
    found = {(r["part"], r["value"], r["rate"], r["seed"]): r for r in setup.all_rows()}
    return [row for key, row in found.items() if key in wanted]


def source() -> str:
    """Digest of what rows depend on."""
    folder = Path(__file__).resolve().parent
    closure = import_closure(
        ["sola_sched.simulator.sharing.cluster", folder / "systems.py", folder / "workload.py"]
    )
    return digest(closure)[:12]


def _mean(rows: Iterable[Row], value: float, system: str, key: str) -> float | None:
    """Mean of the seeds; None where one seed found no placement."""
    own = [row["systems"][system] for row in rows if row["value"] == value]
    if not own or any(one is None for one in own):
        return None
    return float(np.mean([one[key] for one in own]))


def _over(
    rows: Sequence[Row],
    values: Sequence[float],
    key: str,
    shown: str,
    names: Sequence[str] = _NAMES,
) -> str:
    lines = []
    for value in values:
        means = [_mean(rows, value, name, key) for name in names]
        cells = ["no place" if mean is None else shown.format(mean) for mean in means]
        lines.append([f"{value:g}", *cells])
    return markdown(["", *names], lines)


def _against(rows: Sequence[Row], values: Sequence[float], key: str, is_up: bool) -> str:
    """How many times better than the best and than the worst baseline, and where."""
    said = []
    for ours in ("SeaLLM", "slack"):
        best, worst = [], []
        for value in values:
            own = _mean(rows, value, ours, key)
            others = [m for name in _BASELINES if (m := _mean(rows, value, name, key)) is not None]
            assert own is not None
            better = [own / m if is_up else m / own for m in others]
            best.append(min(better))
            worst.append(max(better))
        each = ", ".join(f"{factor:.2f}" for factor in best)
        said.append(
            f"`{ours}` over the best baseline, by rate: {each}; at most {max(worst):.1f} x "
            "over the worst."
        )
    return " ".join(said)


def placement_search(setup: Setup) -> Outcome:
    """Fig. 14: time of the search; and the gap of Algorithm 1 to every placement."""
    lines = []
    for num_gpus in (8, 16, 32) if not setup.is_quick else (8,):
        num_services = num_gpus // 2
        traffic = workload.traffic(
            setup.data, num_services, _MIDDLE * num_gpus / 32, 60.0, setup.seeds[0]
        )
        problem = _problem(traffic, num_gpus)
        begin_s, cpu_s = time.perf_counter(), _cpu_s()
        found = search(problem, setup.num_workers)
        took_s = time.perf_counter() - begin_s
        used_s = _cpu_s() - cpu_s
        lines.append(
            [f"{num_gpus}", f"{num_services}", f"{took_s:.1f}",
             f"{used_s:.1f}", f"{found.score.attainment:.1%}"]
        )  # fmt: skip
    gaps = [_gap(setup.data, seed, setup.is_quick) for seed in setup.seeds]
    first = markdown(["GPUs", "services", "wall s", "CPU s", "attained, estimate"], lines)
    second = markdown(
        ["seed", "Algorithm 1", "best of all", "placements' gap, points", "latency ratio"],
        [
            [str(seed), f"{mine.attainment:.2%}", f"{best.attainment:.2%}",
             f"{100 * (mine.missed - best.missed):.2f}", f"{mine.latency / best.latency:.2f}"]
            for seed, (mine, best) in zip(setup.seeds, gaps, strict=True)
        ],
    )  # fmt: skip
    return Outcome(
        [],
        f"Time of Algorithm 1 with {setup.num_workers} process(es), history of 40 s:\n\n{first}\n\n"
        "Against every placement of 3 services on 4 GPUs, 15 requests a second (estimate):"
        f"\n\n{second}",
    )


def _cpu_s() -> float:
    """Processor time of this process and of those that it has ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _problem(traffic: Traffic, num_gpus: int) -> Problem:
    cluster = Cluster.of(num_gpus)
    setting = Setting.of(traffic.services, Hardware(), cluster, DoublingBudget, systems.CHUNK)
    evaluate = Evaluator(setting, traffic.past)
    return Problem(traffic.services, cluster, setting.hardware.fits, evaluate)


def _gap(data: Path | None, seed: int, is_quick: bool) -> tuple[Any, Any]:
    services = workload.services(data, 16, 8.0, seed)[:3]
    rate = sum(service.rate for service in services)
    services = [replace(s, rate=max(0.2, 15.0 * s.rate / rate)) for s in services]
    duration_s = 10.0 if is_quick else 30.0
    past = workload.arrivals(services, duration_s, seed)
    problem = _problem(Traffic(services, past, past), 4)
    return search(problem).score, search_exhaustively(problem).score


def replacement(setup: Setup) -> Outcome:
    """Fig. 8's SeaLLM-A: placements that follow a load that moves between services."""
    lines = []
    rows: list[Row] = []
    for seed in setup.seeds:
        found = _replaced(setup.data, seed, 20.0 if setup.is_quick else 60.0)
        rows.append({"seed": seed, **found})
    for name in ("fixed placement", "fixed interval", "adaptive interval"):
        means = {key: np.mean([row[name][key] for row in rows]) for key in _MEASURES}
        changed = np.mean([row[name]["changed"] for row in rows])
        lines.append(
            [name, *(_MEASURES[key][1].format(value) for key, value in means.items()),
             f"{changed:.1f}"]
        )  # fmt: skip
    head = ["placement", *(title for title, _, _ in _MEASURES.values()), "times replaced"]
    return Outcome(
        rows,
        "16 services, 32 GPUs, doubling budget; the popularity of the services is drawn anew in "
        f"each of four phases, {_REPLACED_RATE:g} requests a second, mean of {len(setup.seeds)} "
        "seeds. Weights are loaded from the host at 25 GB/s for each GPU.\n\n"
        + markdown(head, lines),
    )


_REPLACED_RATE = 30.0


def _replaced(data: Path | None, seed: int, phase_s: float) -> dict[str, Any]:
    base = workload.services(data, _NUM_SERVICES, _REPLACED_RATE, seed)
    run: list[Any] = []
    first: list[Any] = []
    for phase in range(4):
        rng = np.random.default_rng([seed, phase, 19])
        order = rng.permutation(len(base)) if phase else np.arange(len(base))
        # Only services of one model change places, so that the work stays about the same.
        moved = [
            replace(service, rate=base[_same(base, place, order)].rate)
            for place, service in enumerate(base)
        ]
        came = workload.arrivals(moved, phase_s, 100 * seed + phase)
        run += [(phase * phase_s + at_s, *rest) for at_s, *rest in came]
        if not phase:
            first = workload.arrivals(moved, phase_s, 100 * seed + 99)
    found: dict[str, Any] = {}
    for name, interval_s, is_adaptive in (
        ("fixed placement", 1e9, False),
        ("fixed interval", phase_s / 2, False),
        ("adaptive interval", phase_s / 2, True),
    ):
        cluster = Cluster.of(_NUM_GPUS)
        setting = Setting.of(base, Hardware(), cluster, DoublingBudget, systems.CHUNK)

        def place(past: Sequence[Any], setting: Setting = setting) -> Any:
            span_s = max(1.0, max(at_s for at_s, *_ in past))
            counts = dict.fromkeys(setting.services, 0)
            for _, service, *_ in past:
                counts[service] += 1
            now = [
                replace(service, rate=max(0.5, counts[service.name]) / span_s)
                for service in setting.services.values()
            ]
            evaluate = Evaluator(setting, past)
            problem = Problem(now, setting.cluster, setting.hardware.fits, evaluate)
            return search(problem).placement

        placement = place(first)
        served = ReplacingCluster(
            setting, placement, expected(setting, placement, first), place,
            interval_s=interval_s, is_adaptive=is_adaptive,
        )  # fmt: skip
        requests = served.run(setting.requests(run))
        found[name] = systems.measure(setting, requests) | {
            "changed": sum(1 for interval in served.intervals if interval.num_changed)
        }
    return found


def _same(base: Sequence[Any], place: int, order: Any) -> int:
    """Where the service's rate comes from: a service of the same model, by the new order."""
    mine = [i for i, service in enumerate(base) if service.model == base[place].model]
    shuffled = sorted(mine, key=lambda i: int(order[i]))
    return shuffled[mine.index(place)]
