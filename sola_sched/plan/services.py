"""Several services: the cheapest GPUs for all of them, and who shares which.

    python -m sola_sched.plan --gpu a100=1.5 h100=3.0 \\
        --service name=chat,model=llama-3-8b,rate=5,ttft=800,tpot=60 \\
        --service name=code,model=llama-2-13b,rate=1,ttft=1500,tpot=80,prompt=1000,output=150

The search is SeaLLM's (`sola_sched.cluster.sharing`) on the fast model, for each kind of GPU and
number of them; what it finds is checked with the real schedulers. Turns between services go to who
must start soonest, as engines that share a GPU take them. Step times are computed, not measured.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sola_sched.bench.args import Parser
from sola_sched.bench.backends import environment
from sola_sched.bench.report.page import require_report
from sola_sched.cluster.sharing.placement import Cluster, Placement
from sola_sched.cluster.sharing.search import Problem, search
from sola_sched.cluster.sharing.services import Service, by_name
from sola_sched.cluster.sharing.turns import LeastSlack
from sola_sched.cluster.sharing.unserved import ServiceOutcome, score
from sola_sched.config.flags import natural_int, positive_int
from sola_sched.config.output_file import require_writable
from sola_sched.errors import ConfigError, InfeasibleError
from sola_sched.plan.inputs.args import add_gpus, parse_prices
from sola_sched.plan.inputs.descriptions import (
    KEYS,
    make_arrivals,
    make_service,
    most_tokens,
    parse_service,
)
from sola_sched.plan.outputs import html
from sola_sched.plan.outputs.deploy import serve_config_of
from sola_sched.plan.search.fast_error import OF_SERVICES, unchecked
from sola_sched.plan.search.impossible import require_possible_services
from sola_sched.simulator.sharing.cluster import Arrival, Evaluator, Setting, SharedCluster
from sola_sched.simulator.sharing.hardware import GPUS, Hardware

#: What needs vLLM, and what to do without.
CHECK = "the check with the real schedulers"
NO_CHECK = "give '--no-check' for an answer by the fast model alone"


def wants_services(argv: Sequence[str]) -> bool:
    """Whether the command line names services."""
    return any(arg.partition("=")[0] in ("--service", "--services") for arg in argv)


def plan_services(argv: Sequence[str]) -> int:
    """Plan from the command line; return the exit code.

    Raises:
        ConfigError: An argument cannot be used.
        InfeasibleError: A model fits nowhere, or no number of GPUs is enough.
    """
    args = _parser().parse_args(list(argv))
    if not 0.0 < args.attainment <= 1.0:
        raise ConfigError(f"'--attainment' must be in (0, 1] (got {args.attainment:g}).")
    for path, flag in ((args.output, "--output"), (args.serve_config, "--serve-config")):
        if path is not None:
            require_writable(path, flag)
    require_report(args.html)
    if args.check:
        environment.require_vllm(CHECK, NO_CHECK)
    services = _services(args)
    prices = parse_prices(args.gpu, GPUS)
    node = min(args.gpus_per_node, args.max_gpus)
    require_possible_services(services, prices, node, args.attainment)
    for service in services:
        if service.refused:
            most = most_tokens(service.model, service.engine)
            print(
                f"Engines refuse {service.refused:.1%} of the prompts of {service.name}, which "
                f"reach {most:,} tokens: they count as missed."
            )
    arrivals = make_arrivals(services, args.seed)
    tried: list[dict[str, Any]] = []
    best: _Plan | None = None
    problems = []
    for gpu, price in sorted(prices.items(), key=lambda item: item[1]):
        for num_gpus in _numbers(args.max_gpus, args.gpus_per_node):
            cost = price * num_gpus
            if best is not None and cost >= best.cost:
                break
            cluster = Cluster.of(num_gpus, args.gpus_per_node)
            try:
                setting = Setting.of(services, Hardware(gpu), cluster, LeastSlack)
                evaluate = Evaluator(setting, arrivals)
                fits = setting.hardware.fits
                found = search(Problem(services, cluster, fits, evaluate, args.most_sharing))
            except InfeasibleError as error:
                problems.append(f"{num_gpus} {gpu}: {error}")
                continue
            attained = found.score.attainment
            line = {"gpu": gpu, "num_gpus": num_gpus, "cost": cost, "attainment": attained}
            said = f"{cost:8.2f} per hour  {num_gpus:3d} {gpu}  {attained:7.1%} expected"
            served = _Served.fast(setting, found.placement, arrivals)
            if attained >= args.attainment and args.check:
                served = _Served.real(setting, served.placement, arrivals)
                attained = line["real_attainment"] = served.attainment
                said += f"  {attained:7.1%} with the real schedulers"
            worst = min(served.attained, key=served.attained.__getitem__)
            line |= {"worst_service": worst, "worst_attained": served.attained[worst]}
            tried.append(line)
            print(said, flush=True)
            if attained >= args.attainment:
                best = _Plan(cost, gpu, cluster, setting, served)
                break
    if best is None:
        raise InfeasibleError(_none(args, tried, problems))
    _report(args, best, tried)
    return 0


@dataclass(frozen=True)
class _Served:
    """A placement, without empty groups, and what became of each service's requests there."""

    placement: Placement
    outcomes: Mapping[str, ServiceOutcome]
    by: str

    @classmethod
    def fast(cls, setting: Setting, found: Placement, arrivals: Sequence[Arrival]) -> _Served:
        placement = Placement(tuple(group for group in found.groups if group.services))
        requests = SharedCluster(setting, placement).run(setting.requests(arrivals))
        return cls(placement, setting.outcomes(requests), "fast")

    @classmethod
    def real(cls, setting: Setting, placement: Placement, arrivals: Sequence[Arrival]) -> _Served:
        environment.prepare(None, is_random=True)  # else the answer is lost in vLLM's log
        from sola_sched.simulator.sharing.real import real_engine

        make = functools.partial(real_engine, setting, placement)
        requests = SharedCluster(setting, placement, make=make).run(setting.requests(arrivals))
        return cls(placement, setting.outcomes(requests), "real")

    @property
    def attainment(self) -> float:
        return score(self.outcomes).attainment

    @property
    def attained(self) -> dict[str, float]:
        """Share of each service's requests that met their targets."""
        return {n: 1 - o.num_missed / max(1, o.num_requests) for n, o in self.outcomes.items()}


@dataclass(frozen=True)
class _Plan:
    cost: float
    gpu: str
    cluster: Cluster
    setting: Setting
    served: _Served


def _report(args: argparse.Namespace, best: _Plan, tried: Sequence[dict[str, Any]]) -> None:
    cluster, placement, outcomes = best.cluster, best.served.placement, best.served.outcomes
    if best.served.by == "fast":
        print(unchecked(OF_SERVICES))
    print(f"Best: {cluster.num_gpus} {best.gpu}, {best.cost:.2f} per hour.")
    for number, group in enumerate(placement.groups):
        print(f"  group {number}: {group.degree} GPU(s): {', '.join(group.services)}")
    attained = best.served.attained
    for name, share in attained.items():
        print(f"  {name}: {share:.1%} of {outcomes[name].num_requests} requests within targets")
    document = {
        "gpu": best.gpu,
        "num_gpus": cluster.num_gpus,
        "cost_per_hour": best.cost,
        "groups": [{"degree": g.degree, "services": list(g.services)} for g in placement.groups],
        "attained": attained,
        "schedulers": best.served.by,
        "tried": list(tried),
    }
    args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"Wrote {args.output}.")
    if args.html is not None:
        print(f"Report {html.write_services(document, args.attainment, args.html)}.")
    if args.serve_config is not None:
        config = serve_config_of(placement, best.setting)
        args.serve_config.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        print(f"Wrote {args.serve_config}; `serve deploy` reads it.")


def _services(args: argparse.Namespace) -> list[Service]:
    given = [parse_service(text) for text in args.service]
    if args.services is not None:
        try:
            listed = json.loads(args.services.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"'--services' must be a JSON file ({error}).") from error
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise ConfigError(f"'--services' must hold a list of objects (got {args.services}).")
        given += listed
    made = [make_service(one, args.seed) for one in given]
    by_name(made)
    return made


def _numbers(most: int, node: int) -> list[int]:
    """Numbers of GPUs to try: all within a node, then whole nodes."""
    return [*range(1, min(node, most) + 1), *range(2 * node, most + 1, node)]


def _none(
    args: argparse.Namespace, tried: Sequence[dict[str, Any]], problems: Sequence[str]
) -> str:
    if tried:
        shares = [float(one.get("real_attainment", one["attainment"])) for one in tried]
        most = tried[shares.index(max(shares))]
        return (
            f"up to {args.max_gpus} GPUs must attain {args.attainment:.1%} (the best, "
            f"{most['num_gpus']} {most['gpu']}, attain {max(shares):.1%}, service "
            f"{most['worst_service']!r} {most['worst_attained']:.1%}); raise --max-gpus or the "
            "targets, or lower the rates."
        )
    return f"no placement was found. {problems[-1]}"


def _parser() -> Parser:
    parser = Parser(
        prog="python -m sola_sched.plan",
        description=__doc__,
    )
    add = parser.add_argument
    add("--service", action="append", default=[], metavar="KEY=VALUE,...",
        help=f"a service; keys {', '.join(KEYS)}; targets in ms, lengths in tokens")  # fmt: skip
    add("--services", type=Path, metavar="FILE", help="JSON: a list of objects with these keys")
    add_gpus(parser, GPUS)
    add("--gpus-per-node", type=positive_int, default=8)
    add("--max-gpus", type=positive_int, default=64, help="in all (default: 64)")
    add("--most-sharing", type=positive_int, default=2, help="services of a group (default: 2)")
    add("--attainment", type=float, default=0.95, help="share within all targets (default: 0.95)")
    add("--no-check", dest="check", action="store_false",
        help="answer by the fast model, without vLLM's schedulers")  # fmt: skip
    add("--html", type=Path, metavar="FILE",
        help="also write a report that opens in a browser (needs the extra 'html')")  # fmt: skip
    add("--seed", type=natural_int, default=0)
    add("--output", type=Path, default=Path("plan.json"), help="JSON (default: plan.json)")
    add("--serve-config", type=Path, metavar="FILE", help="also a configuration for Ray Serve")
    return parser
