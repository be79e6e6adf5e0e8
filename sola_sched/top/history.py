"""What a server did between looks at its metrics, in numbers for people."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from sola_sched.reports.slack import KINDS
from sola_sched.top.metrics import Metrics

#: Looks that are remembered, and columns of a trend.
_NUM_LOOKS, NUM_COLUMNS = 61, 20
_BARS = "▁▂▃▄▅▆▇█"
_NO_REQUEST = "·"
_ENDS = ("attained", "missed", "rejected")

Counts = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class ServerRow:
    """One server.

    Attributes:
        model: Served.
        in_time: Share of the requests that ended in the window and met their targets; NaN of none.
        per_s: Requests that ended, a second.
        running, waiting, held, lost: Requests now, with and without a slot, that sat the latest
            step out, and that cannot meet their targets any more.
        slack: Requests by the time until their next deadline: late, within a second, later;
            those without a deadline are in none. None where the server does not tell.
        kv: Share of the KV memory in use, of the engine that has most.
        unplanned: Share of the steps in vLLM's own order; NaN without steps.
        reason: Why most of them were.
    """

    model: str
    in_time: float
    per_s: float
    running: int
    waiting: int
    held: int
    lost: int
    slack: tuple[int, int, int] | None
    kv: float
    unplanned: float
    reason: str


@dataclass(frozen=True)
class ClassRow:
    """One SLO class of one server.

    Attributes:
        name: Of the class.
        in_time, per_s: As in `ServerRow`.
        ttft_s, tpot_s: Means over the window, seconds; NaN of none.
        trend: A bar for each part of the window, the higher the more were in time.
    """

    name: str
    in_time: float
    per_s: float
    ttft_s: float
    tpot_s: float
    trend: str


class History:
    """The last looks at one server."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Metrics]] = deque(maxlen=_NUM_LOOKS)

    def add(self, now_s: float, metrics: Metrics) -> None:
        """Another look; a server that has been started anew begins a new history."""
        if self._looks:
            before = self._looks[-1][1]
            if _num_steps(metrics) < _num_steps(before):
                self._looks.clear()
        self._looks.append((now_s, metrics))

    @property
    def window_s(self) -> float:
        """Time between the first look and the last, seconds."""
        return self._looks[-1][0] - self._looks[0][0] if self._looks else 0.0

    def server(self) -> ServerRow:
        """How it stands. There must have been a look."""
        first, last = self._looks[0][1], self._looks[-1][1]
        ends = _new(_ends(first), _ends(last))
        total = {end: sum(each[end] for each in ends.values()) for end in _ENDS}
        name = "sola_steps_unplanned_total"
        reasons = _less(last.by(name, "reason"), first.by(name, "reason"))
        unplanned = sum(reasons.values())
        planned = last.total("sola_steps_planned_total") - first.total("sola_steps_planned_total")
        models = last.by("sola_steps_planned_total", "model_name")
        return ServerRow(
            model=", ".join(models),
            in_time=_share(total),
            per_s=_per_s(sum(total.values()), self.window_s),
            running=int(last.total("vllm:num_requests_running")),
            waiting=int(last.total("vllm:num_requests_waiting")),
            held=int(last.total("sola_requests_held")),
            lost=int(last.total("sola_requests_lost")),
            slack=_slack(last),
            kv=last.most("vllm:kv_cache_usage_perc"),
            unplanned=unplanned / (unplanned + planned) if unplanned + planned else math.nan,
            reason=max(reasons, key=reasons.__getitem__) if unplanned else "",
        )

    def classes(self) -> list[ClassRow]:
        """How its classes stand, by their names."""
        first, last = self._looks[0][1], self._looks[-1][1]
        ends = _new(_ends(first), _ends(last))
        parts = self._parts()
        return [
            ClassRow(
                name=name,
                in_time=_share(ends[name]),
                per_s=_per_s(sum(ends[name].values()), self.window_s),
                ttft_s=_mean(first, last, "sola_ttft_seconds", name),
                tpot_s=_mean(first, last, "sola_tpot_seconds", name),
                trend="".join(_bar(_share(part.get(name, {}))) for part in parts),
            )
            for name in sorted(ends)
        ]

    def _parts(self) -> list[Counts]:
        """Ends of requests in each part of the window, the oldest first."""
        looks = [metrics for _, metrics in self._looks]
        step = max(1, math.ceil((len(looks) - 1) / NUM_COLUMNS))
        marks = looks[::-1][::step][::-1]
        return [_new(_ends(a), _ends(b)) for a, b in pairwise(marks)]


def _slack(metrics: Metrics) -> tuple[int, int, int] | None:
    counts = metrics.by("sola_requests_by_slack", "slack")
    if not counts:
        return None
    late, soon, later = ((KINDS[0],), KINDS[1:3], KINDS[3:-1])
    total = [int(sum(counts.get(kind, 0) for kind in kinds)) for kinds in (late, soon, later)]
    return total[0], total[1], total[2]


def _num_steps(metrics: Metrics) -> float:
    return metrics.total("sola_steps_planned_total") + metrics.total("sola_steps_unplanned_total")


def _ends(metrics: Metrics) -> Counts:
    """Requests that have ended, by class and outcome."""
    names = metrics.by("sola_requests_total", "slo_class")
    return {
        name: {
            end: metrics.total("sola_requests_total", slo_class=name, outcome=end) for end in _ENDS
        }
        for name in names
    }


def _new(before: Counts, now: Counts) -> Counts:
    return {name: _less(counts, before.get(name, {})) for name, counts in now.items()}


def _less(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def _share(ends: Mapping[str, float]) -> float:
    count = sum(ends.values())
    return ends["attained"] / count if count else math.nan


def _per_s(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _mean(first: Metrics, last: Metrics, name: str, slo_class: str) -> float:
    total, count = (
        last.total(f"{name}_{part}", slo_class=slo_class)
        - first.total(f"{name}_{part}", slo_class=slo_class)
        for part in ("sum", "count")
    )
    return total / count if count else math.nan


def _bar(share: float) -> str:
    return _NO_REQUEST if math.isnan(share) else _BARS[min(7, int(8 * share))]
