"""Turn rules where services have TTFT and TPOT targets: two services on one GPU, as `plan` has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.cluster.sharing.placement import Cluster, Group, Placement
from sola_sched.cluster.sharing.services import Service
from sola_sched.cluster.sharing.turns import (
    DoublingBudget,
    FirstCome,
    LeastSlack,
    RoundRobin,
    SkipJoin,
)
from sola_sched.plan.inputs.descriptions import make_arrivals, make_service
from sola_sched.simulator.sharing.cluster import Setting, SharedCluster
from sola_sched.simulator.sharing.hardware import Hardware

_RULES = {
    "first come": FirstCome,
    "round robin": RoundRobin,
    "skip-join MLFQ": SkipJoin,
    "doubling budget": DoublingBudget,
    "least slack": LeastSlack,
}
_KEYS = ("name", "model", "rate", "ttft", "tpot", "prompt", "output")
#: Targets in ms, lengths in tokens (medians).
MIXES = {
    "two chats": (
        ("chat", "llama-2-7b", 2.0, 800, 60, 300, 250),
        ("talk", "opt-6.7b", 2.0, 1000, 80, 200, 150),
    ),
    "chat, long prompts": (
        ("chat", "llama-2-7b", 2.0, 800, 60, 300, 250),
        ("summary", "opt-6.7b", 0.4, 4000, 100, 4000, 60),
    ),
    "tight, loose": (
        ("tight", "llama-2-7b", 1.5, 500, 40, 300, 250),
        ("loose", "llama-2-7b", 1.0, 20_000, 400, 1000, 300),
    ),
}
_FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0)


def targets(setup: Setup) -> Outcome:
    """Share of the requests within both targets, by mix, rate and rule."""
    lines = []
    for mix, made in MIXES.items():
        for factor in _FACTORS[1:2] if setup.is_quick else _FACTORS:
            rate = factor * sum(float(one[2]) for one in made)
            cells = []
            for rule in _RULES.values():
                met: list[bool] = []
                for seed in setup.seeds:
                    met += _met(services_of(mix, factor, seed), rule, seed)
                cells.append(f"{np.mean(met):.1%}")
            lines.append([mix, f"{rate:.1f}", *cells])
    return Outcome(
        [],
        "Two services on one A100, a minute of Poisson arrivals, requests of "
        f"{len(setup.seeds)} seeds; share within TTFT and TPOT.\n\n"
        + markdown(["services", "req/s", *_RULES], lines),
    )


def services_of(mix: str, factor: float, seed: int) -> list[Service]:
    """Those of a mix at so many times their rates."""
    given: list[dict[str, Any]] = [dict(zip(_KEYS, one, strict=True)) for one in MIXES[mix]]
    return [make_service(one | {"rate": factor * one["rate"]}, seed) for one in given]


def _met(services: Sequence[Service], rule: type, seed: int) -> list[bool]:
    setting = Setting.of(services, Hardware("a100"), Cluster.of(1), rule)
    names = tuple(sorted(service.name for service in services))
    cluster = SharedCluster(setting, Placement((Group(1, names),)))
    requests = cluster.run(setting.requests(make_arrivals(services, seed)))
    return [request.is_met for request in requests]
