"""Aladdin's Fig. 9 to 12: attainment on four GPUs, and GPUs needed, by placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.cases import Case, file_of, mean_by, rows_of
from cluster.fast_error import error_of
from harness.markdown import markdown
from harness.parts import chosen
from harness.resumable import Row
from harness.setup import Outcome, Setup


@dataclass(frozen=True)
class Testbed:
    """Four GPUs and a model (Table 2), the paper's best worker (Table 3), the rates looked at."""

    kind: str
    worker_gpus: int
    ttft_s: float
    tpot_s: float
    rates_per_s: tuple[float, ...]

    def cluster(self, num_gpus: int, worker_gpus: int) -> str:
        """Workers of so many GPUs on the GPUs."""
        return f"{num_gpus // worker_gpus}*{self.kind}:{worker_gpus}"


TESTBEDS = {
    "A100, Llama2-13b": Testbed("llama-2-13b@a100-pcie", 1, 0.6, 0.03, (2.0, 3.0, 5.0)),
    "A100, Llama2-70b": Testbed("llama-2-70b@a100-pcie", 2, 1.6, 0.075, (0.75, 1.0, 1.5)),
    "V100, Llama2-7b": Testbed("llama-2-7b@v100", 1, 0.8, 0.03, (2.0, 3.0, 5.0)),
    "V100, Llama2-13b": Testbed("llama-2-13b@v100", 2, 0.8, 0.05, (1.0, 1.5, 2.0)),
}
#: GPUs of the workers (0: all four of a machine), and the router.
SYSTEMS = {
    "default": (4, "shortest-queue"),
    "JSQ": (0, "shortest-queue"),
    "power of two": (0, "power-of-two"),
    "Aladdin": (0, "aladdin"),
    "combined": (0, "combined"),
}
#: vLLM with two chunk sizes, whose better one counts, and ours.
STOCK, SOLA = ("stock:512", "stock:2048"), "sola:8192"
_ENGINES = {"vLLM": STOCK, "sola_sched": (SOLA,)}
_REQUESTS = 400
#: Share of the requests that "all" stands for: with Poisson arrivals and prompts that take most of
#: the TTFT target alone, no number of GPUs serves each of them in time.
GOAL = 0.99
_FIG_11 = ("A100, Llama2-13b", "V100, Llama2-7b")
_FIG_11_RATES = (2.0, 6.0, 25.0)
_FIG_12_RATES = (4.0, 12.0, 25.0)
_MOST_WORKERS = 96
#: GPUs of a worker that are tried for a given goal.
_WORKERS = (1, 2, 4)


def fig9(setup: Setup) -> Outcome:
    """Fig. 9 and 10: attainment and P99 of ATGT over the rate."""
    names = chosen(setup, TESTBEDS)
    cases = [
        _case(setup, TESTBEDS[name], system, engine, rate, seed=seed)
        for name in names
        for rate in TESTBEDS[name].rates_per_s[:: 2 if setup.is_quick else 1]
        for system in SYSTEMS
        for engines in _ENGINES.values()
        for engine in engines
        for seed in setup.seeds
    ]
    rows = rows_of(setup, cases, "Fig. 9, 10")
    attained = mean_by(rows, _BY)
    p99_s = mean_by(rows, _BY, "p99_tpot_s")
    lines = []
    for name in names:
        bed = TESTBEDS[name]
        for rate in bed.rates_per_s[:: 2 if setup.is_quick else 1]:
            for label, engines in _ENGINES.items():
                cells = []
                for worker, router in SYSTEMS.values():
                    cluster = bed.cluster(4, worker or bed.worker_gpus)
                    keys = [(cluster, engine, router, rate) for engine in engines]
                    # With --stored, of the rows there are.
                    best = max(keys, key=lambda key: attained.get(key, -1.0))
                    if best in attained:
                        cells.append(f"{100 * attained[best]:.1f} ({1e3 * p99_s[best]:.0f})")
                    else:
                        cells.append("-")
                if set(cells) == {"-"}:
                    continue
                lines.append([name, f"{rate:g}", label, *cells])
    head = ["testbed, model", "req/s", "engines", *SYSTEMS]
    return Outcome(rows, f"{_ABOUT_9} {error_of(setup)}\n\n{markdown(head, lines, 3)}")


def gpus(setup: Setup) -> Outcome:
    """Fig. 11: GPUs needed over the rate, prefill and decode in the same workers."""
    return _needed(setup, _FIG_11_RATES, SYSTEMS, _ABOUT_11, is_decode=False)


def decode(setup: Setup) -> Outcome:
    """Fig. 12: GPUs that the decode pool needs when prompts are computed elsewhere."""
    systems = {
        name: (worker, "aladdin-decode" if r == "aladdin" else r)
        for name, (worker, r) in SYSTEMS.items()
        if name != "default"
    }
    return _needed(setup, _FIG_12_RATES, systems, _ABOUT_12, is_decode=True)


def draw(name: str, setup: Setup, outcome: Outcome, folder: Path) -> Path:
    """Attainment over the rate of every testbed, a panel each."""
    import matplotlib.pyplot as plt

    attained = mean_by(outcome.rows, _BY)
    figure, axes = plt.subplots(1, len(TESTBEDS), figsize=(14, 3.2), sharey=True)
    for axis, (title, bed) in zip(axes, TESTBEDS.items(), strict=True):
        for label, engines in _ENGINES.items():
            for system, (worker, router) in SYSTEMS.items():
                if label == "sola_sched" and system not in ("JSQ", "combined"):
                    continue
                cluster = bed.cluster(4, worker or bed.worker_gpus)
                values = [
                    max(attained.get((cluster, e, router, rate), math.nan) for e in engines)
                    for rate in bed.rates_per_s
                ]
                style = "--" if label == "sola_sched" else "-"
                shown = f"{system}, {label}"
                axis.plot(bed.rates_per_s, [100 * v for v in values], style, label=shown)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("requests/s")
    axes[0].set_ylabel("attained, %")
    axes[-1].legend(fontsize=6)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


_BY = ("cluster", "scheduler", "router", "rate_per_s")
_ABOUT_9 = (
    "Attained, %, and P99 of the average time per output token, ms. Of vLLM the better of chunks "
    "of 512 and 2048; `default` has all four GPUs in one worker, the others the best worker of the "
    "paper's Table 3."
)
_ABOUT_11 = (
    f"GPUs with which {GOAL:.0%} of the requests attain / GPUs of a worker, the fewest of those "
    f"tried; in brackets what combined placement saves against the column. `default` has four GPUs "
    f"in a worker, the others the best of {', '.join(map(str, _WORKERS))}."
)
_ABOUT_12 = f"{_ABOUT_11} Prompts come computed; waiting for the pool counts as decoding."


def _case(
    setup: Setup, bed: Testbed, system: str, engine: str, rate: float, seed: int, gpus: int = 4
) -> Case:
    worker, router = SYSTEMS[system]
    cluster = bed.cluster(gpus, worker or bed.worker_gpus)
    return Case(
        cluster, engine, router, file_of(setup, "sharegpt"), rate, bed.ttft_s, bed.tpot_s,
        num_requests=_REQUESTS, seed=seed,
    )  # fmt: skip


def _needed(
    setup: Setup,
    rates: Sequence[float],
    systems: dict[str, tuple[int, str]],
    about: str,
    *,
    is_decode: bool,
) -> Outcome:
    rows: list[Row] = []
    lines = []
    for name in chosen(setup, _FIG_11):
        bed = TESTBEDS[name]
        for rate in rates[:1] if setup.is_quick else rates:
            for label, engines in _ENGINES.items():
                # Decode pools have no prompts to chunk.
                some = engines[:1] if is_decode else engines
                found: dict[str, tuple[int, int] | None] = {}
                for system, (worker, router) in systems.items():
                    numbers = []
                    for size in (worker,) if worker else _WORKERS:
                        case = Case(
                            bed.cluster(size, size), some[0], router, file_of(setup, "sharegpt"),
                            rate, bed.ttft_s, bed.tpot_s, num_requests=_REQUESTS,
                            is_decode=is_decode,
                        )  # fmt: skip
                        for engine in some:
                            number = _fewest(setup, replace(case, scheduler=engine), rows)
                            if number is not None:
                                numbers.append((size * number, size))
                    found[system] = min(numbers, default=None)
                lines.append([name, f"{rate:g}", label, *_saved(found)])
    head = ["testbed, model", "req/s", "engines", *systems]
    return Outcome(rows, f"{about} {error_of(setup)}\n\n{markdown(head, lines, 3)}")


def _fewest(setup: Setup, case: Case, rows: list[Row]) -> int | None:
    """The fewest workers with which the goal is met on the mean of the seeds; None above most."""
    worker = case.cluster.partition("*")[2]

    def meets(number: int) -> bool:
        cases = [replace(case, cluster=f"{number}*{worker}", seed=seed) for seed in setup.seeds]
        made = rows_of(setup, cases, "GPUs needed")
        rows.extend(made)
        return bool(sum(row["attainment"] for row in made) >= GOAL * len(made))

    low, high = 0, 2
    while not meets(high):
        if high == _MOST_WORKERS:
            return None
        low, high = high, min(2 * high, _MOST_WORKERS)
    while high - low > max(1, high // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _saved(found: dict[str, tuple[int, int] | None]) -> list[str]:
    ours = found["combined"]
    cells = []
    for system, best in found.items():
        if best is None:
            cells.append(f"> {_MOST_WORKERS} workers")
            continue
        number, size = best
        cell = f"{number} / {size}"
        if system != "combined" and ours is not None:
            cell += f" ({100 * (1 - ours[0] / number):.0f} %)"
        cells.append(cell)
    return cells
