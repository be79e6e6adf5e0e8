"""What is run, and the tables made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alise.setups import Run
from harness.markdown import markdown
from harness.resumable import Row

FCFS = "stock:2048"
STOCK = ("stock:512", FCFS, "stock:8192")
ALISE = "sola:policy=alise"
#: Name in tables to scheduler.
SCHEDULERS = {
    "SJF": "sjf",
    "alise, histogram": ALISE,
    "alise, lexical": f"{ALISE},sim.predictor={{lexical}}",
    "alise, retrieval": f"{ALISE},sim.predictor={{retrieval}}",
    "alise, oracle": f"{ALISE},sim.predictor=oracle",
    "attain, histogram": "sola",
    "attain, oracle": "sola:sim.predictor=oracle",
}
#: The same with the KV of displaced requests kept in host memory (`seeds` alone).
SWAPPING = {
    f"{name}, swap": f"{SCHEDULERS[name]},swap.mode=int8"
    for name in ("alise, histogram", "alise, retrieval", "alise, oracle")
}


@dataclass(frozen=True)
class Setup:
    """A model, its lengths, the length of the trace, rates around saturation and far past it."""

    profile: str
    dataset: str
    trace_s: float
    rates: tuple[float, ...]
    far_rates: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.profile}/{self.dataset}"


#: 30 minutes as in the paper where that is hundreds of requests, less where it is thousands.
SETUPS = (
    Setup("opt-13b-v100", "sharegpt", 1800.0, (0.06, 0.09, 0.12), (0.16, 0.2, 0.25)),
    Setup("opt-13b-v100", "alpaca", 180.0, (6.0, 12.0, 15.0, 18.0), (24.0, 30.0)),
    Setup("llama-3-8b-h100", "sharegpt", 120.0, (7.0, 9.0, 11.0), (14.0, 18.0, 22.0, 28.0)),
    Setup("llama-3-8b-h100", "alpaca", 15.0, (300.0, 400.0, 500.0, 650.0)),
)


def _setups(only: Sequence[str], is_quick: bool) -> list[Setup]:
    chosen = [setup for setup in SETUPS if not only or setup.name in only]
    if is_quick:
        chosen = [
            replace(s, trace_s=s.trace_s / 20, rates=s.rates[-2:], far_rates=()) for s in chosen[:1]
        ]
    return chosen


def rates_runs(only: Sequence[str], is_quick: bool) -> list[Run]:
    """Every scheduler at every rate."""
    return _grid(_setups(only, is_quick), (*STOCK, *SCHEDULERS.values()))


def _grid(setups: Sequence[Setup], schedulers: Sequence[str]) -> list[Run]:
    return [
        Run(setup.profile, setup.dataset, rate, setup.trace_s, scheduler)
        for setup in setups
        for rate in setup.rates
        for scheduler in schedulers
    ]


def rates_table(rows: Sequence[Row]) -> str:
    """Normalized latency over rate; rates at equal latency; mean latencies."""
    parts = []
    for profile, dataset in dict.fromkeys((row["profile"], row["dataset"]) for row in rows):
        group = [r for r in rows if (r["profile"], r["dataset"]) == (profile, dataset)]
        if not any(row["scheduler"] == FCFS for row in group):
            continue
        parts.append(f"### {profile}, {dataset}\n")
        for column, title in (
            ("normalized_latency_s", "Normalized latency, s/token"),
            ("mean_latency_s", "Mean latency, s"),
        ):
            parts.append(_over_rate(group, column, title))
        parts.append(_at_equal_latency(group))
    return "\n".join(parts)


def best_stock(rows: Sequence[Row], column: str) -> list[Row]:
    """Of each rate, vLLM at the chunk size with the least value."""
    stock = [row for row in rows if row["scheduler"] in STOCK]
    rates = sorted({row["rate_per_s"] for row in stock})
    return [min((r for r in stock if r["rate_per_s"] == x), key=lambda r: r[column]) for x in rates]


def lines_of(rows: Sequence[Row], column: str) -> dict[str, list[Row]]:
    """Rows by name in tables, ascending in rate."""
    ordered = sorted(rows, key=lambda row: row["rate_per_s"])
    lines = {"FCFS": [r for r in ordered if r["scheduler"] == FCFS]}
    lines["vLLM, best chunk"] = best_stock(ordered, column)
    for name, scheduler in (SCHEDULERS | SWAPPING).items():
        lines[name] = [r for r in ordered if r["scheduler"] == scheduler]
    return {name: line for name, line in lines.items() if line}


def _over_rate(rows: Sequence[Row], column: str, title: str) -> str:
    lines = lines_of(rows, column)
    rates = [row["rate_per_s"] for row in lines["FCFS"]]
    head = [title, *(f"{rate:g}/s" for rate in rates)]
    body = [
        [name, *(f"{row[column]:.3g}" for row in line)]
        for name, line in lines.items()
        if len(line) == len(rates)
    ]
    return markdown(head, body) + "\n"


def rate_at(rows: Sequence[Row], level: float, column: str = "normalized_latency_s") -> float:
    """Rate at which a latency is reached, log-linear between rates; inf or 0 beyond them."""
    rates = np.array([row["rate_per_s"] for row in rows])
    values = np.maximum.accumulate([row[column] for row in rows])
    if values[0] > level:
        return 0.0
    if values[-1] <= level:
        return math.inf
    above = int(np.argmax(values > level))
    share = math.log(level / values[above - 1]) / math.log(values[above] / values[above - 1])
    return float(rates[above - 1] + share * (rates[above] - rates[above - 1]))


def _at_equal_latency(rows: Sequence[Row]) -> str:
    """Rates at multiples of FCFS's normalized latency at the lowest rate, as ratios to FCFS."""
    levels, ratios = _ratios(rows)
    head = ["Rate at equal normalized latency, over FCFS", *(f"{x:.2g} s" for x in levels)]
    return markdown(head, [[name, *map(_text, cells)] for name, cells in ratios.items()]) + "\n"


#: A ratio, and ">" or "<" where it lies beyond the rates that were run; None without a base.
_Ratio = tuple[float, str] | None


def _ratios(rows: Sequence[Row]) -> tuple[list[float], dict[str, list[_Ratio]]]:
    """Levels of normalized latency, and by scheduler the rate at each over FCFS's."""
    lines = lines_of(rows, "normalized_latency_s")
    fcfs = lines["FCFS"]
    floor = fcfs[0]["normalized_latency_s"]
    levels = [2.0 * floor, 5.0 * floor, 10.0 * floor]
    return levels, {name: [_ratio(line, fcfs, x) for x in levels] for name, line in lines.items()}


def _ratio(line: Sequence[Row], fcfs: Sequence[Row], level: float) -> _Ratio:
    base, rate = rate_at(fcfs, level), rate_at(line, level)
    if not 0.0 < base < math.inf:
        return None
    if math.isinf(rate):
        return line[-1]["rate_per_s"] / base, "> "
    return (rate / base, "") if rate else (line[0]["rate_per_s"] / base, "< ")


def _text(ratio: _Ratio) -> str:
    return "-" if ratio is None else f"{ratio[1]}{ratio[0]:.2f}"


def _mean_ratio(ratios: Sequence[_Ratio]) -> _Ratio:
    """Beyond the rates that were run as soon as one is; None where one has no base."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None
    return sum(value for value, _ in known) / len(known), max(side for _, side in known)


_SEEDS = (0, 1, 2)
_SEEDED = (
    *STOCK,
    *(SCHEDULERS[f"alise, {name}"] for name in ("histogram", "retrieval", "oracle")),
    *SWAPPING.values(),
)


def seeds_runs(only: Sequence[str], is_quick: bool) -> list[Run]:
    """`rates` on three seeds and far past saturation, for the paper's scheduler and its rivals."""
    setups = [replace(s, rates=s.rates + s.far_rates) for s in _setups(only, is_quick)]
    return [replace(run, seed=seed) for run in _grid(setups, _SEEDED) for seed in _SEEDS]


def seeds_table(rows: Sequence[Row]) -> str:
    """Rates at equal normalized latency over FCFS's: mean over the seeds, and each."""
    body = []
    for setup in dict.fromkeys((row["profile"], row["dataset"]) for row in rows):
        group = [r for r in rows if (r["profile"], r["dataset"]) == setup]
        if not set(_SEEDS) <= {r["seed"] for r in group if r["scheduler"] == FCFS}:
            continue  # has not been run on all of them
        found = [_ratios([r for r in group if r["seed"] == seed])[1] for seed in _SEEDS]
        for name in found[0]:
            cells = [f"{setup[0]}, {setup[1]}", name]
            for place in range(len(found[0][name])):
                ratios = [ratios[name][place] for ratios in found]
                cells.append(f"{_text(_mean_ratio(ratios))} ({', '.join(map(_text, ratios))})")
            body.append(cells)
    return markdown(["setup", "scheduler", "2 x", "5 x", "10 x"], body)


_WRONG = {
    "FCFS": FCFS,
    "alise, oracle": f"{ALISE},sim.predictor=oracle",
    "alise, noisy (e^0.5)": f"{ALISE},sim.predictor=noisy:0.5",
    "alise, noisy (e^1)": f"{ALISE},sim.predictor=noisy:1",
    "alise, wrong x 10 / 10": f"{ALISE},sim.predictor=wrong:10",
    "alise, histogram": ALISE,
}


def wrong_runs(only: Sequence[str], is_quick: bool) -> list[Run]:
    """Predictions that are off, at FCFS's knee and past it, on two seeds."""
    return [
        Run(setup.profile, setup.dataset, rate, setup.trace_s, scheduler, seed)
        for setup in _setups(only, is_quick)
        for rate in setup.rates[1::2]
        for seed in ((0,) if is_quick else (0, 1))
        for scheduler in _WRONG.values()
    ]


def wrong_table(rows: Sequence[Row]) -> str:
    """Means over seeds, as ratios to FCFS."""
    body = []
    for key in dict.fromkeys((r["profile"], r["dataset"], r["rate_per_s"]) for r in rows):
        group = [r for r in rows if (r["profile"], r["dataset"], r["rate_per_s"]) == key]
        base = [r for r in group if r["scheduler"] == FCFS]
        cells = [f"{key[0]}, {key[1]}", f"{key[2]:g}", f"{_mean(base, 'mean_latency_s'):.3g}"]
        for name, scheduler in _WRONG.items():
            found = [r for r in group if r["scheduler"] == scheduler]
            if name != "FCFS" and not (found and base):
                cells.append("-")
            elif name != "FCFS":
                ratio = _mean(found, "mean_latency_s") / _mean(base, "mean_latency_s")
                norm = _mean(found, "normalized_latency_s") / _mean(base, "normalized_latency_s")
                cells.append(f"{ratio:.2f}, {norm:.2f}")
        body.append(cells)
    return markdown(["setup", "req/s", "FCFS mean latency, s", *list(_WRONG)[1:]], body)


_AGING = {"none": "null", "1800 s": "1800", "300 s": "300", "60 s": "60", "10 s": "10"}


def aging_runs(only: Sequence[str], is_quick: bool) -> list[Run]:
    """The aging threshold, at the highest rate."""
    return [
        Run(setup.profile, setup.dataset, setup.rates[-1], setup.trace_s, scheduler)
        for setup in _setups(only, is_quick)
        for scheduler in (FCFS, *(_aged(value) for value in _AGING.values()))
    ]


def _aged(value: str) -> str:
    return f"{ALISE},aging_s={value},sim.predictor=oracle"


def aging_table(rows: Sequence[Row]) -> str:
    """Mean, normalized and worst latency by threshold."""
    names = {FCFS: "FCFS"} | {_aged(v): f"aging {name}" for name, v in _AGING.items()}
    body = [
        [
            f"{r['profile']}, {r['dataset']}, {r['rate_per_s']:g}/s", names[r["scheduler"]],
            *(f"{r[c]:.3g}" for c in ("normalized_latency_s", "mean_latency_s", "p99_latency_s",
                                      "worst_latency_s", "num_preemptions")),
        ]
        for r in rows
    ]  # fmt: skip
    columns = ["setup", "scheduler", "normalized, s", "mean, s", "p99, s", "worst, s",
               "preemptions"]  # fmt: skip
    return markdown(columns, body)


def _mean(rows: Sequence[Row], column: str) -> float:
    return sum(row[column] for row in rows) / max(1, len(rows))
