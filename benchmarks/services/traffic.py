"""Three services on one engine: what each is asked, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import meets_slo, ttft_s


@dataclass(frozen=True)
class Service:
    """One service, and its traffic.

    Attributes:
        name: Of its class, and of its adapter.
        prompt, output: Mean tokens; both are uniform between half and one and a half of that.
        rate_per_s: Mean rate of arrivals, Poisson in bursts.
        burst: In each fourth period its rate is so many times the mean, otherwise lower.
        slo: Its targets.
        share: Guaranteed share of the engine time.
    """

    name: str
    prompt: int
    output: int
    rate_per_s: float
    burst: float
    slo: SloTarget
    share: float


@dataclass(frozen=True)
class Call:
    """One request: arrival in seconds, tokens of prompt and output."""

    service: Service
    arrival_s: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Answer:
    """What came of a request: times of its first and last token, seconds on the same clock."""

    call: Call
    first_s: float
    last_s: float

    @property
    def attained(self) -> bool:
        """Whether it met both targets of its service."""
        tpot = (self.last_s - self.first_s) / max(1, self.call.output - 1)
        return meets_slo(
            self.waited_s, tpot, self.last_s - self.call.arrival_s, self.call.service.slo
        )

    @property
    def waited_s(self) -> float:
        """Time to the first token."""
        return ttft_s(self.call.arrival_s, self.first_s)


@dataclass(frozen=True)
class Run:
    """What came of a run.

    Attributes:
        answers: To all requests.
        served_s: Engine time of each service while requests still came, seconds; empty under vLLM's
            own scheduler, which does not count it.
    """

    answers: Sequence[Answer]
    served_s: Mapping[str, float]


def served_s(scheduler: Any) -> dict[str, float]:
    """Engine time that each service has had, seconds; nothing of vLLM's own scheduler."""
    if not hasattr(scheduler, "sola_stats"):
        return {}
    return {
        name: float(each["served_s"]) for name, each in scheduler.sola_stats()["services"].items()
    }


def make_calls(
    services: Sequence[Service], duration_s: float, period_s: float, seed: int
) -> list[Call]:
    """The requests of all services, by arrival; the bursts of one follow those of another."""
    calls = []
    for number, service in enumerate(services):
        rng = np.random.default_rng((seed, number))
        low = service.rate_per_s * (4.0 - service.burst) / 3.0
        now_s = 0.0
        while now_s < duration_s:
            is_burst = int(now_s / period_s) % 4 == number
            rate_per_s = service.rate_per_s * service.burst if is_burst else low
            gap_s = float(rng.exponential(1.0 / max(rate_per_s, 1e-9)))
            end_s = (int(now_s / period_s) + 1) * period_s
            if now_s + gap_s > end_s:  # without memory: drawn again at the rate that begins
                now_s = end_s
                continue
            now_s += gap_s
            if now_s < duration_s:
                prompt, output = (
                    int(rng.integers(max(2, mean // 2), mean * 3 // 2 + 1))
                    for mean in (service.prompt, service.output)
                )
                calls.append(Call(service, now_s, prompt, output))
    return sorted(calls, key=lambda call: call.arrival_s)


def classes_of(services: Sequence[Service], *, shared: bool) -> dict[str, dict[str, float]]:
    """The option `classes`, with shares or without."""
    return {
        service.name: {"ttft_s": service.slo.ttft_s, "tpot_s": service.slo.tpot_s}
        | ({"share": service.share} if shared else {})
        for service in services
    }


def lines_of(
    services: Sequence[Service],
    runs: Mapping[str, Sequence[Run]],
    alone_s: Mapping[str, float],
) -> list[list[str]]:
    """A line for each scheduler.

    Args:
        services: In the order of the columns.
        runs: By scheduler, the run of each seed.
        alone_s: What a mean request of each service takes without others, seconds.

    Returns:
        Attained share of all and of each service, the longest wait of each, the part of the engine
        time that each has had, normalized latency.
    """
    lines = []
    for name, seeds in runs.items():
        answers = [answer for run in seeds for answer in run.answers]
        by_service = {
            service.name: [a for a in answers if a.call.service is service] for service in services
        }
        normalized = [
            np.mean([a.last_s - a.call.arrival_s for a in mine]) / alone_s[service]
            for service, mine in by_service.items()
        ]
        cells = [f"{100 * np.mean([a.attained for a in answers]):.1f} %"]
        cells += [f"{100 * np.mean([a.attained for a in m]):.1f} %" for m in by_service.values()]
        cells += [f"{max(a.waited_s for a in mine):.1f}" for mine in by_service.values()]
        had_s = {s: sum(run.served_s.get(s, 0.0) for run in seeds) for s in by_service}
        total_s = sum(had_s.values())
        cells += [f"{100 * had / total_s:.0f} %" if total_s else "-" for had in had_s.values()]
        lines.append([name, *cells, f"{np.mean(normalized):.2f}"])
    return lines


def head_of(services: Sequence[Service]) -> list[str]:
    """Names of the columns of `lines_of`."""
    names = [service.name for service in services]
    return [
        "", "attained: all", *names, f"longest TTFT, s: {names[0]}", *names[1:],
        f"part of the time: {names[0]}", *names[1:], "normalized latency",
    ]  # fmt: skip


#: Of the column with the parts of the time.
TIME_TEXT = (
    "Part of the time: of the engine time while requests still came, which vLLM's own scheduler "
    "does not count."
)


def text_of(services: Sequence[Service]) -> str:
    """What the services are, in words."""
    return "; ".join(
        f"{s.name}: prompts of {s.prompt} tokens, outputs of {s.output}, {s.rate_per_s:g}/s with "
        f"bursts of {s.burst:g} times that, TTFT {s.slo.ttft_s:g} s, TPOT {s.slo.tpot_s:g} s, "
        f"share {s.share:g}"
        for s in services
    )
