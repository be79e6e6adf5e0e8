"""Tables made of rows: stock at its best setting, means over seeds, rates at a level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.points import BOUND, HINDSIGHT
from harness.resumable import Row
from simulation.setups import ORACLE, PAPER, REJECT, SPF, crossing, mean


def head(first: str, others: Sequence[str]) -> list[str]:
    return [first, "load", "req/s", "best stock", *map(short, others), BOUND]


def load_lines(
    rows: Sequence[Row], name: str, base_rate: float, compared: Sequence[str]
) -> list[list[str]]:
    """One line per rate: mean over seeds of each scheduler, stock at its best setting."""
    lines = []
    for rate, group in _by_rate(rows):
        stock = _best_setting(group)
        lines.append(
            [
                name, f"{rate / base_rate:.2f}", f"{rate:.3g}",
                _with_setting(stock),
                *(percent(of_scheduler(group, s)) for s in compared if not _is_stock(s)),
                percent(group, BOUND),
            ]
        )  # fmt: skip
    return lines


def rule_lines(
    rows: Sequence[Row], name: str, base_rate: float, rules: Sequence[str]
) -> list[list[str]]:
    """One line per rate: stock and each rule at its best setting, the bound, and our share of it.

    Args:
        rules: As `rule_of` names them.
    """
    lines = []
    for rate, group in _by_rate(rows):
        cells = []
        for rule in ("stock", *rules):
            best = _best_of([row for row in group if rule_of(row["scheduler"]) == rule])
            has_chunk = best[0]["scheduler"].partition(":")[2].isdecimal()
            cells.append(_with_setting(best) if has_chunk else percent(best))
        share = mean(of_scheduler(group, "sola"), "attainment") / mean(group, BOUND)
        lines.append(
            [name, f"{rate / base_rate:.2f}", f"{rate:.3g}", *cells, percent(group, BOUND),
             f"{share:.2f}"]
        )  # fmt: skip
    return lines


def goodput_head(first: str, others: Sequence[str]) -> list[str]:
    return [first, "level", "best stock", *map(short, others), BOUND, "sola / stock",
            "sola / bound"]  # fmt: skip


def goodput_lines(rows: Sequence[Row], name: str, compared: Sequence[str]) -> list[list[str]]:
    """Rate at 90 and 99 % attainment of each scheduler and of the bound."""
    lines = []
    stock = best_stock_rows(rows)
    for level in (0.9, 0.99):
        at = {s: crossing(of_scheduler(rows, s), level) for s in compared if not _is_stock(s)}
        first, limit = crossing(stock, level), crossing(stock, level, BOUND)
        cells = [_rate(rate) for rate in (first, *at.values(), limit)]
        ratios = [_ratio(at["sola"], first), _ratio(at["sola"], limit)]
        lines.append([name, f"{level:.0%}", *cells, *ratios])
    return lines


def level_line(
    name: str, factor: float, level: float, stock: float, ours: float, highest: float
) -> list[str]:
    """Rates at a level, and their ratio.

    Args:
        name: Of the data set.
        factor: Of the targets.
        level: Share attained.
        stock: Rate at it, requests per second; 0 and inf where it lies outside the rates run.
        ours: Likewise.
        highest: The highest rate that was run.
    """
    rates = [_rate(stock), _rate(ours), _ratio(ours, stock, highest)]
    return [name, f"{factor:g}", f"{level:.0%}", *rates]


def effect_lines(rows: Sequence[Row], name: str) -> list[list[str]]:
    """What `sola` does beside attainment, against the best stock setting at the same rate."""
    lines = []
    for rate, group in _by_rate(rows):
        stock, ours = _best_setting(group), of_scheduler(group, "sola")
        tokens = mean(ours, "tokens_per_s") / mean(stock, "tokens_per_s")
        lines.append(
            [
                name, f"{rate:.3g}", f"{tokens:.3f}",
                *(f"{mean(r, 'p99_ttft_s'):.3g}" for r in (stock, ours)),
                *(f"{max(x['worst_wait_s'] for x in r):.3g}" for r in (stock, ours)),
                *(f"{mean(r, 'num_preemptions'):.0f}" for r in (stock, ours)),
                *(percent(r, "longest_attainment") for r in (stock, ours)),
            ]
        )  # fmt: skip
    return lines


def share_table(rows: Sequence[Row], names: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Attained % and worst wait at each rate; a line for stock at its best, and one per name."""
    rates = sorted({row["rate_per_s"] for row in rows})
    at = {rate: [row for row in rows if row["rate_per_s"] == rate] for rate in rates}
    columns = ["best_effort_share"]
    columns += [text for rate in rates for text in (f"attained at {rate:.3g}/s", "worst wait, s")]
    lines = [["best stock", *_share_cells([_best_setting(at[rate]) for rate in rates])]]
    lines += [
        [name, *_share_cells([of_scheduler(at[rate], scheduler) for rate in rates])]
        for name, scheduler in names.items()
    ]
    return columns, lines


def _share_cells(groups: Sequence[Sequence[Row]]) -> list[str]:
    return [
        text
        for group in groups
        for text in (percent(group), f"{max(row['worst_wait_s'] for row in group):.0f}")
    ]


def wait_cells(rows: Sequence[Row], schedulers: Iterable[str]) -> list[str]:
    """Attained % and worst wait of each scheduler."""
    groups = [of_scheduler(rows, scheduler) for scheduler in schedulers]
    return [
        f"{percent(group)}, {max(row['worst_wait_s'] for row in group):.0f} s" for group in groups
    ]


EFFECTS = ("data", "req/s", "tokens/s, sola / stock", "TTFT p99, s: stock", "sola",
            "worst wait, s: stock", "sola", "preemptions: stock", "sola",
            "longest tenth of the prompts, attained: stock", "sola")  # fmt: skip


def side_by_side_lines(
    groups: Sequence[Sequence[Row]], name: str, base_rate: float
) -> list[list[str]]:
    """One line per rate: the best stock setting and `sola` of each group of rows, in turn."""
    lines = []
    for rate in sorted({row["rate_per_s"] for row in groups[0]}):
        cells = [name, f"{rate / base_rate:.2f}", f"{rate:.3g}"]
        for group in groups:
            at_rate = [row for row in group if row["rate_per_s"] == rate]
            stock = _best_setting(at_rate)
            cells += [_with_setting(stock), percent(of_scheduler(at_rate, "sola"))]
        lines.append(cells)
    return lines


def _by_rate(rows: Sequence[Row]) -> Iterator[tuple[float, list[Row]]]:
    """The rates, ascending, and the rows at each."""
    for rate in sorted({row["rate_per_s"] for row in rows}):
        yield rate, [row for row in rows if row["rate_per_s"] == rate]


def _with_setting(rows: Sequence[Row]) -> str:
    """Attained %, and the setting of the scheduler that the rows are of."""
    return f"{percent(rows)} ({rows[0]['scheduler'].partition(':')[2]})"


def _is_stock(scheduler: str) -> bool:
    return scheduler.startswith("stock:") and scheduler[6:].isdecimal()


def of_scheduler(rows: Sequence[Row], scheduler: str) -> list[Row]:
    return [row for row in rows if row["scheduler"] == scheduler]


def _best_setting(rows: Sequence[Row]) -> list[Row]:
    """Rows of the stock setting that attains most on average over these rows' seeds."""
    return _best_of([row for row in rows if _is_stock(row["scheduler"])])


def _best_of(rows: Sequence[Row]) -> list[Row]:
    """Rows of the setting that attains most on average over these rows' seeds."""
    names = dict.fromkeys(row["scheduler"] for row in rows)
    return max(
        (of_scheduler(rows, name) for name in names),
        key=lambda group: (mean(group, "attainment"), -mean(group, "mean_ttft_s")),
    )


def best_stock_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each rate the rows of the stock setting that attains most."""
    rates = dict.fromkeys(row["rate_per_s"] for row in rows)
    return [
        row
        for rate in rates
        for row in _best_setting([row for row in rows if row["rate_per_s"] == rate])
    ]


def short(scheduler: str) -> str:
    names = {PAPER: "paper", REJECT: "reject", SPF: "spf"}
    if scheduler in names:
        return names[scheduler]
    return scheduler.removeprefix("sola:sim.predictor=")


def rule_of(scheduler: str) -> str:
    """A scheduler's name without its chunk size."""
    name, _, setting = scheduler.partition(":")
    return name if setting.isdecimal() else short(scheduler)


def percent(rows: Sequence[Row], column: str = "attainment") -> str:
    return f"{100 * mean(rows, column):.1f}"


def _rate(value: float) -> str:
    if value == 0:
        return "below"
    return "above" if math.isinf(value) else f"{value:.3g}"


def _ratio(value: float, other: float, highest: float = math.inf) -> str:
    """Where the value lies beyond `highest`, the ratio is at least that of `highest`."""
    sign = ""
    if math.isinf(value):
        value, sign = highest, "> "
    known = 0 < value < math.inf and 0 < other < math.inf
    return f"{sign}{value / other:.2f}" if known else "-"


def part_lines(
    rows: Sequence[Row], name: str, base_rate: float, parts: Mapping[str, str]
) -> list[list[str]]:
    """One line per rate: stock at its best setting, and schedulers that are no setting of stock.

    Args:
        parts: Schedulers, in the order of the columns; they may look like stock by name.
    """
    lines = []
    for rate, group in _by_rate(rows):
        stock = _best_setting([row for row in group if row["scheduler"] not in parts.values()])
        lines.append(
            [
                name, f"{rate / base_rate:.2f}", f"{rate:.3g}", percent(stock),
                *(percent(of_scheduler(group, part)) for part in parts.values()),
                percent(group, BOUND),
            ]
        )  # fmt: skip
    return lines


GAP = ["data", "load", "req/s", "sola", "oracle", HINDSIGHT, BOUND, "oracle / hindsight",
       "oracle / bound"]  # fmt: skip


def gap_lines(rows: Sequence[Row], name: str, base_rate: float) -> list[list[str]]:
    """One line per rate: ours, with true lengths, with knowledge of the future, and the bound."""
    lines = []
    for rate, group in _by_rate(rows):
        known = mean(of_scheduler(group, ORACLE), "attainment")
        lines.append(
            [
                name, f"{rate / base_rate:.2f}", f"{rate:.3g}",
                percent(of_scheduler(group, "sola")), f"{100 * known:.1f}",
                percent(group, HINDSIGHT), percent(group, BOUND),
                *(_ratio(known, mean(group, column)) for column in (HINDSIGHT, BOUND)),
            ]
        )  # fmt: skip
    return lines


def seed_lines(rows: Sequence[Row], name: str, base_rate: float) -> list[list[str]]:
    """One line per rate, the seeds side by side; stock at the best setting of each seed."""
    seeds = sorted({row["seed"] for row in rows})
    lines = []
    for rate in sorted({row["rate_per_s"] for row in rows}):
        groups = [[r for r in rows if (r["rate_per_s"], r["seed"]) == (rate, n)] for n in seeds]
        lines.append(
            [
                name, f"{rate / base_rate:.2f}", f"{rate:.3g}",
                ", ".join(percent(_best_setting(group)) for group in groups),
                ", ".join(percent(of_scheduler(group, "sola")) for group in groups),
                ", ".join(percent(group, BOUND) for group in groups),
            ]
        )  # fmt: skip
    return lines
