"""Published schedulers beside stock vLLM and ours, each at its best setting at every point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from scipy import stats

from harness.markdown import markdown
from harness.points import BOUND, HINDSIGHT
from harness.resumable import Row
from harness.setup import Outcome, Setup
from rivals.points import EVEN, PLACES, WRONG, Place
from rivals.runs import Case, key_of, run_case
from rivals.settings import RIVALS, short
from simulation.setups import LEVEL, bracketed_rate, multiples

STOCK = tuple(f"stock:{chunk}" for chunk in (2048, 4096, 1024, 8192))
OURS, REJECT = "sola", "sola:overload=reject"
#: Shares of stock's rate at which the references are run.
_ASKED = {HINDSIGHT: (1.25,), BOUND: (0.9, 1.0, 1.25, 2.0)}
_FIRST_RATE_PER_S, _QUICK_SHARE = 4.0, 1.25
#: Of the requests by which a lead is judged: no setting is chosen by them.
FRESH_SEEDS = tuple(range(100, 110))


def published(setup: Setup) -> Outcome:
    """Attained % of every scheduler at every point, which is ahead, and by how much we are."""
    setup.check_only([*(place.name for place in PLACES), *RIVALS])
    places = [place for place in PLACES if place.name in setup.only] or list(PLACES)
    names = [name for name in RIVALS if name in setup.only] or list(RIVALS)
    rows: list[Row] = []
    lines, settings = [], []
    if setup.is_quick:
        places = [place for place in places if place.share == _QUICK_SHARE][:1]
    for place in places:
        found = _Point(setup, place)
        shares = {"stock": found.best(STOCK)}
        shares |= {name: found.best(_settings(setup, name, place)) for name in names}
        shares |= {OURS: found.best([OURS]), "reject": found.best([REJECT])}
        line = [place.name, f"{found.rate_per_s:.3g}", *_line(shares)]
        lines.append([*line, found.judged_lead(shares), *found.references()])
        rows += found.rows
        settings.append([place.name, *(short(best) for best, _ in shares.values())])
    head = ["point", "req/s", "stock", *names, "sola", "reject", "closest", "lead", "reject's lead",
            "judged lead (95 %)", HINDSIGHT, BOUND]  # fmt: skip
    heads = (head, ["settings", "stock", *names, "sola", "reject"])
    return Outcome(rows, "\n\n".join(map(markdown, heads, (lines, settings))))


class _Point:
    """Runs at one place; keeps the rows."""

    def __init__(self, setup: Setup, place: Place) -> None:
        self._setup, self._place = setup, place
        self.rows: list[Row] = []
        self.rate_per_s = place.rate_per_s
        if place.share:
            (self.rate_per_s,) = multiples(stock_rate(setup, place.load), (place.share,))

    def best(self, schedulers: Sequence[str]) -> tuple[str, float]:
        """The setting that attains most with the first seed, and what it attains on average."""
        first, *others = self._setup.seeds
        tried = self._run(schedulers, (first,))
        best = max(tried, key=lambda row: row["attainment"])["scheduler"]
        runs = [row for row in tried if row["scheduler"] == best] + self._run((best,), others)
        return str(best), _mean(runs)

    def judged_lead(self, shares: Mapping[str, tuple[str, float]]) -> str:
        """Of ours over the closest, in points, by `FRESH_SEEDS`; the interval is Student's."""
        closest = _closest(shares)
        if closest is None or self._setup.is_quick:
            return "-"
        ours, theirs = (
            np.array([row["attainment"] for row in self._run((scheduler,), FRESH_SEEDS)])
            for scheduler in (shares[OURS][0], shares[closest][0])
        )
        leads = 100 * (ours - theirs)
        most = stats.t.ppf(0.975, len(leads) - 1) * stats.sem(leads)
        mean = leads.mean()
        return f"{mean:+.1f} ({mean - most:+.1f} to {mean + most:+.1f})"

    def references(self) -> list[str]:
        """Hindsight and bound, where they are asked for."""
        cells = []
        for name, shares in _ASKED.items():
            is_asked = self._place.share in shares and self._place.machine == EVEN
            seeds = self._setup.seeds[:1] if name == HINDSIGHT else self._setup.seeds
            cells.append(f"{100 * _mean(self._run((name,), seeds)):.1f}" if is_asked else "-")
        return cells

    def _run(self, schedulers: Iterable[str], seeds: Iterable[int]) -> list[Row]:
        setup, place = self._setup, self._place
        count = setup.num_requests
        cases = [
            Case(place.load, self.rate_per_s, name, count, seed, place.machine, place.profile)
            for name in schedulers
            for seed in seeds
        ]
        found = _rows(setup, cases, place.name) if cases else []
        self.rows += found
        return found


def stock_rate(setup: Setup, load: str) -> float:
    """The rate at which stock vLLM at its best setting attains 90 % with the first seed."""
    order = list(STOCK)

    def is_attained(rate_per_s: float) -> bool:
        for name in tuple(order):
            case = Case(load, rate_per_s, name, setup.num_requests, setup.seeds[0])
            if _rows(setup, [case], f"{load} at {rate_per_s:g}/s")[0]["attainment"] >= LEVEL:
                order.sort(key=lambda each: each != name)
                return True
        return False

    return bracketed_rate(is_attained, _FIRST_RATE_PER_S, load)


def _settings(setup: Setup, name: str, place: Place) -> list[str]:
    """With the step times of the profile; on uneven machines also with learned ones."""
    rival = RIVALS[name]
    specs = rival.specs(profile=place.profile)
    if place.machine != EVEN and place.machine not in WRONG and not rival.specs_of:
        specs += rival.specs()
    return specs[:1] if setup.is_quick else specs


def _rows(setup: Setup, cases: Sequence[Case], title: str) -> list[Row]:
    return setup.rows_of(cases, key_of, partial(run_case, data=setup.data), title)


def _line(shares: dict[str, tuple[str, float]]) -> list[str]:
    """What each attains, who is closest of those that serve everybody, and the leads."""
    ours, reject = shares[OURS][1], shares["reject"][1]
    share = {name: value for name, (_, value) in shares.items() if name in RIVALS}
    refusing = [value for name, value in share.items() if not RIVALS[name].serves_all]
    closest = _closest(shares)
    lead = "-" if closest is None else f"{100 * (ours - share[closest]):+.1f}"
    over = f"{100 * (reject - max(refusing)):+.1f}" if refusing else "-"
    return [*(f"{100 * value:.1f}" for _, value in shares.values()), closest or "-", lead, over]


def _closest(shares: Mapping[str, tuple[str, float]]) -> str | None:
    """Of those that serve everybody, the one that attains most; None if there is none."""
    serving = [name for name in shares if name in RIVALS and RIVALS[name].serves_all]
    return max(serving, key=lambda name: shares[name][1], default=None)


def _mean(rows: Sequence[Row]) -> float:
    return float(np.mean([row["attainment"] for row in rows]))
