"""What the fast model of shared GPUs is worth: the same placements with real schedulers inside."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sharing import systems, workload
from sharing.targets import MIXES, services_of
from sola_sched.cluster.sharing.placement import Cluster, Group, Placement
from sola_sched.cluster.sharing.queue import SharedRequest
from sola_sched.cluster.sharing.turns import DoublingBudget, LeastSlack, RoundRobin, TurnRule
from sola_sched.plan.inputs.descriptions import make_arrivals
from sola_sched.simulator.sharing.cluster import Arrival, Setting, SharedCluster
from sola_sched.simulator.sharing.hardware import Hardware

#: The fast model's turn rule, and the policy of the real engines that it stands for.
_PAIRS: dict[str, tuple[type[TurnRule], str | None]] = {
    "least slack, attain": (LeastSlack, "attain"),
    "round robin, vLLM": (RoundRobin, None),
    "doubling": (DoublingBudget, "doubling"),
}
_FACTORS = (0.5, 1.0, 2.0)
_SYSTEMS = {"MuxServe": None, "SeaLLM": "doubling", "slack": "attain"}
_RATE = 20.0


def real(setup: Setup) -> Outcome:
    """Both tables: two services on one GPU with targets, and the paper's set-up."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    return Outcome(
        [],
        f"{_pairs(setup)}\n\nThe set-up of `sharing`, {_RATE:g} requests a second, placed by the "
        f"search on the fast model, seed {setup.seeds[0]}:\n\n{_clusters(setup)}",
    )


def _pairs(setup: Setup) -> str:
    lines = []
    errors: dict[str, list[float]] = {name: [] for name in _PAIRS}
    for mix in MIXES:
        for factor in _FACTORS[1:2] if setup.is_quick else _FACTORS:
            cells = []
            for name, (rule, policy) in _PAIRS.items():
                met: dict[bool, list[bool]] = {False: [], True: []}
                for seed in setup.seeds:
                    services = services_of(mix, factor, seed)
                    setting = Setting.of(services, Hardware("a100"), Cluster.of(1), rule)
                    names = tuple(sorted(service.name for service in services))
                    placement = Placement((Group(1, names),))
                    arrivals = make_arrivals(services, seed)
                    for is_real in met:
                        run = serve(setting, placement, arrivals, policy, is_real=is_real)
                        met[is_real] += [request.is_met for request in run]
                fast, measured = (float(np.mean(met[is_real])) for is_real in (False, True))
                errors[name].append(100 * (fast - measured))
                cells += [f"{fast:.1%}", f"{measured:.1%}"]
            lines.append([mix, f"{factor:g}", *cells])
    mean = ", ".join(
        f"{name} {np.mean(values):+.1f} points (from {min(values):+.1f} to {max(values):+.1f})"
        for name, values in errors.items()
    )
    head = [f"{name}: {kind}" for name in _PAIRS for kind in ("fast", "real")]
    return (
        f"Two services on one A100, a minute of arrivals, {len(setup.seeds)} seed(s); share within "
        f"TTFT and TPOT by the fast model and with real schedulers.\n\n"
        f"{markdown(['services', 'rate, of theirs', *head], lines)}\n\n"
        f"Fast less real, mean over the rows: {mean}."
    )


def _clusters(setup: Setup) -> str:
    traffic = workload.traffic(setup.data, 16, _RATE, 60.0, setup.seeds[0])
    lines = []
    for system in systems.SYSTEMS:
        if system.name not in _SYSTEMS:
            continue
        setting, placement = systems.place(system, traffic, 32)
        placement = Placement(tuple(group for group in placement.groups if group.services))
        found = [
            systems.measure(
                setting,
                serve(setting, placement, traffic.arrivals, _SYSTEMS[system.name], is_real=is_real),
            )
            for is_real in (False, True)
        ]
        cells = [
            f"{found[0][key]:{shown}} / {found[1][key]:{shown}}"
            for key, shown in (("norm", ".2f"), ("p99", ".1f"), ("attained", ".1%"),
                               ("ttft", ".2f"), ("tpot", ".1f"))
        ]  # fmt: skip
        lines.append([system.name, *cells])
    head = ["normalized latency", "P99, s", "attained", "mean TTFT, s", "mean TPOT, ms"]
    return markdown(["fast / real", *head], lines)


def serve(
    setting: Setting,
    placement: Placement,
    arrivals: Sequence[Arrival],
    policy: str | None,
    *,
    is_real: bool,
) -> list[SharedRequest]:
    """The requests, ended, by the fast model or with real engines of a policy."""
    make: Any = None
    if is_real:
        from sola_sched.simulator.sharing.real import real_engine

        make = functools.partial(real_engine, setting, placement, policy=policy)
    requests = SharedCluster(setting, placement, make=make).run(setting.requests(arrivals))
    assert all(math.isfinite(request.last_s) for request in requests)
    return requests
