"""Says which of two servers met more targets, and whether that may be chance.

    python -m sola_sched.compare http://one:8000 http://other:8000
    python -m sola_sched.compare monday.json tuesday.json

Each is a vLLM server with a scheduler of ours, or a file that `python -m sola_sched.explain --save`
wrote. To have vLLM's own order as one of them, start it with the option `"steer": false`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sola_sched.bench.report.intervals import Worth, wilson, worth
from sola_sched.config.flags import LineParser
from sola_sched.errors import ConfigError
from sola_sched.explain.source import read
from sola_sched.reports.fates import engine_of, tpot_s, ttft_s

EXIT_USAGE = 2
#: Fewer requests than these say little.
_FEWEST = 30

Fate = Mapping[str, Any]


@dataclass(frozen=True)
class Share:
    """How many of some requests met their targets.

    Attributes:
        attained: These.
        count: All but those that their clients ended in time.
        worth: As many independent ones, since requests that wait in one queue are alike; None for
            `count`.
    """

    attained: int
    count: int
    worth: Worth | None = None

    @classmethod
    def of(cls, fates: Sequence[Fate]) -> Share:
        """Of these requests."""
        counted = [fate for fate in fates if fate["end"] != "aborted"]
        counted.sort(key=lambda fate: (engine_of(fate), float(fate["arrival_s"])))
        flags = [fate["end"] == "attained" for fate in counted]
        return cls(sum(flags), len(flags), worth(flags, has_trend=False))

    @property
    def value(self) -> float:
        """In [0, 1]; NaN of none."""
        return self.attained / self.count if self.count else math.nan

    def interval(self) -> tuple[float, float]:
        """That holds 95 %."""
        return wilson(self.value, self.worth or Worth(self.count))


def difference(one: Share, other: Share) -> tuple[float, float, float]:
    """Other minus one, and its 95 % interval (Newcombe's, from the two Wilson intervals)."""
    low_1, high_1 = one.interval()
    low_2, high_2 = other.interval()
    by = other.value - one.value
    low = by - math.hypot(other.value - low_2, high_1 - one.value)
    high = by + math.hypot(high_2 - other.value, one.value - low_1)
    return by, low, high


def main(argv: Sequence[str] | None = None) -> int:
    """Compare from the command line; return the exit code, 2 where nothing could be compared."""
    parser = LineParser(
        prog="python -m sola_sched.compare",
        description="Which of two servers met more targets, and whether that may be chance.",
    )
    for name in ("one", "other"):
        parser.add_argument(
            name, metavar=name.upper(), help="http://HOST:PORT, or a file of explain --save"
        )
    args = parser.parse_args(argv)
    try:
        windows = [read(source) for source in (args.one, args.other)]
        for name, window in zip(("ONE", "OTHER"), windows, strict=True):
            if window.left_out:
                print(f"{name}: {window.left_out}", file=sys.stderr)
        print(compared(*(window.requests for window in windows)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def compared(one: Sequence[Fate], other: Sequence[Fate]) -> str:
    """The table, and what it says.

    Raises:
        ConfigError: One of them has too few requests.
    """
    shares = Share.of(one), Share.of(other)
    for name, share in zip(("ONE", "OTHER"), shares, strict=True):
        if share.count < _FEWEST:
            raise ConfigError(
                f"'{name}' must have at least {_FEWEST} requests that have ended "
                f"(got {share.count}); compare again when it has served more."
            )
    lines = [("", "ONE", "OTHER"), ("requests", *(f"{share.count:,}" for share in shares))]
    lines.append(("in time", *(f"{share.value:.1%}" for share in shares)))
    for name, time_s in (("TTFT", ttft_s), ("TPOT", tpot_s)):
        for percent in (50, 99):
            cells = (_percentile(fates, time_s, percent) for fates in (one, other))
            lines.append((f"{name} p{percent}", *cells))
    text = "\n".join(f"{a:10}{b:>12}{c:>12}" for a, b, c in lines)
    return f"{text}\n\n{_conclusion(*difference(*shares))} {_loads(one, other)}".rstrip()


def _conclusion(by: float, low: float, high: float) -> str:
    interval = f"{100 * by:+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
    if low > 0.0:
        return f"OTHER is better: {interval}."
    if high < 0.0:
        return f"ONE is better: {interval}."
    return f"Which is better cannot be said: {interval} ({_more(by, low, high)})."


def _more(by: float, low: float, high: float) -> str:
    half = (high - low) / 2
    if abs(by) < half / 10:
        return "they may be equal"
    return f"about {math.ceil((half / abs(by)) ** 2)} times as many requests would tell"


def _loads(one: Sequence[Fate], other: Sequence[Fate]) -> str:
    """What is to be known of the difference: it is of the schedulers at equal loads alone."""
    rates = [_rate(fates) for fates in (one, other)]
    if not all(rates) or max(rates) <= 1.1 * min(rates):
        return ""
    return (
        f"But they had unequal loads: {rates[0]:.2f} and {rates[1]:.2f} requests a second. Give "
        "both the same, or see what one would have done with `explain --replay`."
    )


def _rate(fates: Sequence[Fate]) -> float:
    """Requests a second: the sum of the engines', each of which has a clock of its own."""
    times: dict[int, list[float]] = {}
    for fate in fates:
        times.setdefault(engine_of(fate), []).append(float(fate["arrival_s"]))
    spans_s = [(len(own) - 1, max(own) - min(own)) for own in times.values()]
    return sum(count / span_s for count, span_s in spans_s if span_s > 0.0)


def _percentile(fates: Sequence[Fate], time_s: Callable[[Fate], float | None], percent: int) -> str:
    times = sorted(t for fate in fates if (t := time_s(fate)) is not None)
    if not times:
        return "-"
    place = max(0, math.ceil(percent / 100 * len(times)) - 1)
    return f"{1e3 * times[place]:,.0f} ms"
