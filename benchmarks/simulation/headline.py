"""The headline: stock vLLM, other rules, SOLA as published and `attain`, on measured step times.

Every rule has its best chunk size on each data set: all of `CHUNKS` are run with seed 0 at
`_TUNED_AT`, then the best one, of stock vLLM the best two, with every seed and at every load.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from harness.markdown import markdown
from harness.points import BOUND, Point
from harness.resumable import Row
from harness.setup import Outcome, Setup
from simulation.setups import (
    NAMES,
    PAPER,
    at_stock_rate,
    datasets,
    grid,
    multiples,
    rate_at,
    single_request_slo,
    with_bound,
)
from simulation.tables import (
    EFFECTS,
    effect_lines,
    level_line,
    percent,
    rule_lines,
    seed_lines,
)
from sola_sched.bench.calibrate import SLO_FACTOR

#: The one that all but `models` use.
MEASURED = "llama-3-8b-a100-measured"
#: Never used to choose anything in `attain`.
HELD_OUT = ("llama-3-8b-h100-measured", "llama-3-70b-a100-measured")
LENGTHS = ("sharegpt", "azure-conv", "arxiv")
#: What `load` has beyond those that the other experiments are made of.
MORE_LENGTHS = ("azure-code", "mooncake")
LOADS = (1.0, 1.25, 2.0)
LEVEL_LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
CHUNKS = (512, 1024, 2048, 4096, 8192)
#: Settings of stock with which load 1 and the rates at a level are found: on measured steps a
#: chunk of 512 is behind at every rate at which stock keeps up.
STOCK = tuple(f"stock:{size}" for size in (4096, 2048, 8192, 1024))
#: Load at which settings are chosen, with seed 0.
_TUNED_AT = 1.25
#: How many settings of a rule are run with every seed.
_KEPT = {"stock": 2, "reject": 1, "spf": 1}
#: What else `paper` is told of the TTFT target than all of it.
_TTFT_SHARES = (0.8, 0.6, 0.4)
_RULES = ("reject", "spf", "sola")


def load(setup: Setup) -> Outcome:
    """Attained share at multiples of the rate at which stock attains 90 %, means of the seeds."""
    names = (*LENGTHS, *MORE_LENGTHS)
    return _attained(setup, [(MEASURED, name) for name in names], LOADS)


def models(setup: Setup) -> Outcome:
    """`load` on other measured profiles, which nothing in `attain` was chosen by."""
    parts = [(profile, "azure-conv") for profile in HELD_OUT]
    return _attained(setup, parts, (1.25, 1.5))


def _attained(setup: Setup, parts: Sequence[tuple[str, str]], loads: Sequence[float]) -> Outcome:
    """Attainment, seeds one by one, and what else differs, for each profile and data set."""
    known = list(dict.fromkeys(name for part in parts for name in part))
    setup.check_only(known)
    rows: list[Row] = []
    tables: list[list[list[str]]] = [[], [], []]
    several = len({profile for profile, _ in parts}) > 1
    for profile, name in parts[:1] if setup.is_quick else parts:
        if setup.only and not {profile, name} & set(setup.only):
            continue
        file = datasets(setup, (name,))[0]
        base = _base(setup, profile, file)
        found = _compared(setup, base, (0.75, 1.5) if setup.is_quick else loads)
        rows += found
        label = f"{profile}, {NAMES[file]}" if several else NAMES[file]
        targets = f"{label} ({base.ttft_s:g} s, {1e3 * base.tpot_s:.0f} ms)"
        tables[0] += rule_lines(found, targets, base.rate_per_s, _RULES)
        tables[1] += seed_lines(found, label, base.rate_per_s)
        tables[2] += effect_lines(found, label)
    heads = (
        ["data (TTFT, TPOT)", "load", "req/s", "best stock", *_RULES, BOUND, "sola / bound"],
        ["data, each seed", "load", "req/s", "best stock", "sola", BOUND],
        EFFECTS,
    )
    return Outcome(rows, "\n\n".join(map(markdown, heads, tables)))


def levels(setup: Setup) -> Outcome:
    """Rates at which stock and `sola` attain 90 and 99 %, closer than the steps of `load`."""
    rows: list[Row] = []
    lines = []
    parts = {
        f"{NAMES[file]}/{100 * level:.0f}": (file, level)
        for file, level in itertools.product(datasets(setup, LENGTHS), (0.9, 0.99))
    }
    setup.check_only(list(parts))
    for name, (file, level) in parts.items():
        if setup.only and name not in setup.only:
            continue
        base = _base(setup, MEASURED, file)
        rates = multiples(base.rate_per_s, (0.75, 1.5) if setup.is_quick else LEVEL_LOADS)
        stock, of_stock = rate_at(setup, base, STOCK, level, rates)
        ours, of_ours = rate_at(setup, base, ("sola",), level, rates)
        rows += of_stock + of_ours
        lines.append(level_line(NAMES[file], SLO_FACTOR, level, stock, ours, rates[-1]))
    columns = ["data", "targets, x", "level", "best stock", "sola", "sola / stock"]
    return Outcome(rows, markdown(columns, lines))


def rivals(setup: Setup) -> Outcome:
    """Every rule at each chunk size, and `paper` told less than the real target; seed 0."""
    rows: list[Row] = []
    by_chunk, by_told = [], []
    rules = tuple(_KEPT)
    for file in datasets(setup, LENGTHS):
        base = _where_tuned(_base(setup, MEASURED, file))
        swept = [f"{rule}:{size}" for rule in rules for size in CHUNKS]
        told = [PAPER, *(f"{PAPER},ttft_s={each * base.ttft_s:.3g}" for each in _TTFT_SHARES)]
        points = grid(base, scheduler=[*swept, *told, "sola"])
        found = setup.rows(with_bound(points), f"rivals, {NAMES[file]}")
        rows += found
        at = {row["scheduler"]: percent([row]) for row in found}
        start = [NAMES[file], f"{base.rate_per_s:.3g}"]
        by_chunk += [
            [*start, rule, *(at.get(f"{rule}:{n}", "-") for n in CHUNKS)] for rule in rules
        ]
        by_told.append(
            [*start, *(at.get(name, "-") for name in told), at["sola"], percent(found, BOUND)]
        )
    heads = (
        ["data", "req/s", "chunks of", *map(str, CHUNKS)],
        ["data", "req/s", "paper", *(f"told {each} of TTFT" for each in _TTFT_SHARES), "sola",
         BOUND],
    )  # fmt: skip
    return Outcome(rows, "\n\n".join(map(markdown, heads, (by_chunk, by_told))))


def _base(setup: Setup, profile: str, file: str) -> Point:
    """A point at the rate that stock sustains, with targets of `SLO_FACTOR` single latencies."""
    slo = single_request_slo(profile, file, SLO_FACTOR, setup.data)
    point = Point(profile, file, 0.0, slo.ttft_s, slo.tpot_s, "stock")
    return at_stock_rate(setup, point, STOCK)


def _compared(setup: Setup, base: Point, loads: Sequence[float]) -> list[Row]:
    """Rows of every seed: stock's best settings, of each rule its best, and ours."""
    names = [name for rule in _KEPT for name in _best_chunks(setup, base, rule)]
    rates = multiples(base.rate_per_s, loads)
    points = grid(base, rate_per_s=rates, seed=setup.seeds, scheduler=[*names, "sola"])
    return setup.rows(with_bound(points), NAMES[base.dataset])


def _best_chunks(setup: Setup, base: Point, rule: str) -> list[str]:
    return _best(setup, base, [f"{rule}:{size}" for size in CHUNKS])[: _KEPT[rule]]


def _best(setup: Setup, base: Point, names: Sequence[str]) -> list[str]:
    """Schedulers, the one that attains most first, then by mean TTFT."""
    rows = setup.rows(grid(_where_tuned(base), scheduler=names), f"{NAMES[base.dataset]}, settings")
    rows.sort(key=lambda row: (-row["attainment"], row["mean_ttft_s"]))
    return [str(row["scheduler"]) for row in rows]


def _where_tuned(base: Point) -> Point:
    return replace(base, rate_per_s=multiples(base.rate_per_s, (_TUNED_AT,))[0])
