"""What a first run showed, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sola_sched.bench.first_run.checks import MAX_RANGE, MAX_UNEVEN, MOST, Evenness
from sola_sched.bench.report.intervals import Estimate, paired_difference, share

#: Differences up to this are none.
_A_POINT = 0.01


@dataclass(frozen=True)
class Comparison:
    """Ours beside a stock setting on the same requests.

    Attributes:
        load: Share of the capacity.
        rate_per_s: Requests per second.
        label: Of the stock setting.
        ours, others: For each block, which requests met both targets, in order of arrival.
        backlog_s: How long those who came last waited with this stock setting, at least.
        ttft_s: Target, seconds.
        is_saturated: Whether no stock setting sustained the rate.
    """

    load: float
    rate_per_s: float
    label: str
    ours: Sequence[Sequence[bool]]
    others: Sequence[Sequence[bool]]
    backlog_s: float
    ttft_s: float
    is_saturated: bool

    @property
    def is_past(self) -> bool:
        """Whether the rate was meant to be past the capacity."""
        return self.load > 1.0


def sentences(comparisons: Sequence[Comparison], evenness: Evenness) -> list[str]:
    """The verdict: a sentence for each load, then whether it can be trusted and why."""
    return [
        *(_of_load(comparison) for comparison in comparisons),
        *_of_trust(comparisons, evenness),
    ]


def can_be_trusted(comparisons: Sequence[Comparison], evenness: Evenness) -> bool:
    """Whether the machine was even and the load past the capacity was one."""
    past = [c for c in comparisons if c.is_past]
    return evenness.is_even and bool(past) and all(c.is_saturated for c in past)


def _of_load(comparison: Comparison) -> str:
    c = comparison
    ours, others = (share(*runs) for runs in (c.ours, c.others))
    gain, num_requests = paired_difference(c.ours, c.others), sum(map(len, c.ours))
    return (
        f"At {c.rate_per_s:.3g} requests/s, {c.load:.2g} x what stock vLLM serves, sola_sched kept "
        f"both targets of {ours.percent()} of {num_requests} requests, {c.label}, the best stock "
        f"setting, of {others.percent()}: {_of_gain(gain)}."
    )


def _of_gain(gain: Estimate) -> str:
    low, high, points = 100 * gain.low, 100 * gain.high, abs(100 * gain.value)
    span = f"{low:+.1f} to {high:+.1f}"
    if gain.low > 0:
        return f"{points:.1f} points more ({span})"
    if gain.high < 0:
        return f"{points:.1f} points fewer ({span})"
    if points > 100 * _A_POINT:
        way = "more" if gain.value > 0 else "fewer"
        return f"{points:.1f} points {way}, which may be chance ({span})"
    if gain.low >= -_A_POINT:
        return f"nothing is lost ({span} points)"
    return f"nothing is lost, as far as so few requests can show it ({span} points)"


def _of_trust(comparisons: Sequence[Comparison], evenness: Evenness) -> list[str]:
    doubts = []
    past = [c for c in comparisons if c.is_past]
    if not past:
        doubts.append("no rate past the capacity was run")
    for c in past:
        if not c.is_saturated:
            doubts.append(
                f"the run was too short or its rate too low: a stock setting kept the targets of "
                f"{100 * MOST:.0f} % or more, and with the best one those who came last waited "
                f"{c.backlog_s:.2g} s, which is to exceed the TTFT target of {c.ttft_s:.2g} s"
            )
    if not evenness.is_even:
        doubts.append(
            f"the machine was too uneven: the same batch took {100 * evenness.uneven:.1f} % longer "
            f"beside one scheduler than beside the other (limit {100 * MAX_UNEVEN:.0f} %), and "
            f"{evenness.range:.2f} x its fastest time at worst (limit {MAX_RANGE:g} x)"
        )
    if doubts:
        return [
            f"NOT TO BE TRUSTED on this machine: {'; '.join(doubts)}. Run it again on a quieter "
            "machine; virtual time does not depend on the machine."
        ]
    speed = (
        "the speed of the machine was not measured"
        if evenness.uneven != evenness.uneven
        else f"the same batch took {100 * evenness.uneven:.1f} % longer beside one scheduler than "
        f"beside the other (limit {100 * MAX_UNEVEN:.0f} %)"
    )
    proofs = "; ".join(map(_of_saturation, past))
    return [f"The comparison can be trusted: {speed}, and {proofs}."]


def _of_saturation(comparison: Comparison) -> str:
    c = comparison
    if c.backlog_s > c.ttft_s:
        return (
            "stock vLLM's queue had outgrown its target when the arrivals ended "
            f"({c.backlog_s:.2g} s against a TTFT target of {c.ttft_s:.2g} s)"
        )
    return f"no stock setting kept both targets of {100 * MOST:.0f} % of the requests"
