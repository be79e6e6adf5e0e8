"""Entry point: searches with the fast model, checks with the real schedulers, reports."""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sola_sched.bench.backends import environment
from sola_sched.bench.report.page import require_report
from sola_sched.bench.report.plots import NoPlotError
from sola_sched.bench.report.progress import interval_s
from sola_sched.bench.report.results import to_json
from sola_sched.bench.values import parse_slo_classes
from sola_sched.config.output_file import require_writable
from sola_sched.config.progress_bar import tqdm_class
from sola_sched.errors import (
    ConfigError,
    DatasetError,
    InfeasibleError,
    ProfileError,
    SloError,
)
from sola_sched.plan.inputs.args import build_parser, check_args, parse_prices
from sola_sched.plan.inputs.load import Load, make_load
from sola_sched.plan.inputs.models import COMPUTED, origin, planned_for, profile
from sola_sched.plan.outputs import html
from sola_sched.plan.outputs.commands import commands, served_name
from sola_sched.plan.outputs.report import LEGEND, plot, table
from sola_sched.plan.search.cheapest import rate_margin, search
from sola_sched.plan.search.configurations import (
    Configuration,
    configurations,
    steps_said,
)
from sola_sched.plan.search.evaluate import TARGETS, Outcome, prefill_share, run_fast, run_real
from sola_sched.plan.search.fast_error import OF_ONE_MODEL, unchecked
from sola_sched.plan.search.impossible import (
    ImpossibleError,
    explain,
    require_gpus,
    require_possible,
)
from sola_sched.plan.services import CHECK, NO_CHECK, plan_services, wants_services
from sola_sched.simulator.cluster.records import ClusterRecord
from sola_sched.simulator.steps.roofline import MODELS

EXIT_USAGE = 2
#: Configurations that are checked at most until one stands.
_MOST_CHECKS = 4
_INTERRUPTED = "Interrupted: these configurations had been evaluated, and none is chosen."
_UNCHECKED = "Interrupted: not all checks with the real schedulers have ended."
_NO_MARGIN = "Interrupted: the margin of the best configuration was not computed."


@dataclass(frozen=True)
class Check:
    """One configuration by the fast model and by the real schedulers."""

    fast: Outcome
    real: Outcome

    def error(self) -> dict[str, float]:
        """The fast model's error: points of attainment, and shares of the percentiles.

        NaN where the real schedulers have no such time, or none above 0.
        """
        pairs = {
            "ttft_p50": (self.fast.ttft_ms[0], self.real.ttft_ms[0]),
            "ttft_p99": (self.fast.ttft_ms[1], self.real.ttft_ms[1]),
            "tpot_p50": (self.fast.tpot_ms[0], self.real.tpot_ms[0]),
            "tpot_p99": (self.fast.tpot_ms[1], self.real.tpot_ms[1]),
        }
        points = 100 * (self.fast.attainment - self.real.attainment)
        return {"attainment_points": points} | {
            k: a / b - 1.0 if b > 0.0 else math.nan for k, (a, b) in pairs.items()
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Plan from the command line; return the exit code.

    2 means that the arguments cannot be used, or that no configuration meets the targets.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        if wants_services(given):
            return plan_services(given)
        args = build_parser().parse_args(given)
        check_args(args)
        require_writable(args.output, "--output")
        require_report(args.html)
        tqdm_class()  # found missing before anything is done
        if args.check:
            environment.require_vllm(CHECK, NO_CHECK)
        environment.prepare(None, is_random=args.tokenizer is None)
        return _plan(args)
    except (ConfigError, DatasetError, InfeasibleError, ProfileError, SloError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


class _Evaluation:
    """The fast model with a progress bar that names the cheapest so far."""

    def __init__(self, args: argparse.Namespace, load: Load) -> None:
        self._args, self._load = args, load
        self._cheapest = math.inf
        self.found: list[Outcome] = []
        self.bar = tqdm_class()(
            desc="configurations", unit="run", disable=args.disable_tqdm, mininterval=interval_s()
        )

    def __call__(self, configuration: Configuration) -> Outcome:
        args = self._args
        found = run_fast(args.planned, configuration, self._load, args.seed, args.attainment)
        if found.attainment >= args.attainment:
            self._cheapest = min(self._cheapest, configuration.cost_per_hour)
            self.bar.set_postfix_str(f"cheapest {self._cheapest:.2f} an hour", refresh=False)
        self.bar.update()
        self.found.append(found)
        return found

    def prefill_share(self, configuration: Configuration) -> float:
        """See `search.Evaluate`."""
        args = self._args
        self.bar.update()
        return prefill_share(args.planned, configuration, self._load, args.seed, args.attainment)


def _plan(args: argparse.Namespace) -> int:
    args.planned, notes = planned_for(args.model, args.max_model_len, args.profile)
    choices = configurations(
        args.planned,
        parse_prices(args.gpu),
        args.tensor_parallel_size,
        args.schedulers,
        args.max_num_seqs,
        args.routers,
    )
    require_gpus(choices, args.max_gpus)
    shape = profile(args.planned, choices[0].gpu, choices[0].tensor_parallel)
    load = make_load(args, shape.max_model_len or 0, shape.vocab_size)
    load = replace(load, notes=(*notes, *load.notes))
    for note in (*load.notes, steps_said(args.planned, choices)):
        print(note)
    require_possible(args.planned, choices, load, args.attainment)
    return _found(args, load, choices, _Evaluation(args, load))


def _found(
    args: argparse.Namespace,
    load: Load,
    choices: Sequence[Configuration],
    evaluation: _Evaluation,
) -> int:
    """Search, check and write; return the exit code."""
    goal = args.attainment
    try:
        with evaluation.bar:
            # More instances than requests do nothing.
            largest = max(choice.tensor_parallel for choice in choices)
            most = min(args.max_gpus, largest * len(load.workload.requests))
            outcomes = search(choices, evaluation, goal, most, has_pools=args.pools)
    except KeyboardInterrupt:
        if evaluation.found:
            _write(args, _noted(load, _INTERRUPTED), evaluation.found, None, [])
        raise
    passed = [outcome for outcome in outcomes if outcome.attainment >= goal]
    if not passed:
        _write(args, load, outcomes, None, [])
        raise ImpossibleError(explain(outcomes, goal, args.max_gpus))
    checks: list[Check] = []
    try:
        if args.check:
            _check(args, load, passed, checks)
    except KeyboardInterrupt:
        failed = {check.fast.configuration for check in checks}
        left = (outcome for outcome in passed if outcome.configuration not in failed)
        load = _noted(load, _UNCHECKED)
        _write(args, load, outcomes, next(left, None), checks, is_interrupted=True)
        raise
    best = passed[0]
    if checks:
        best = checks[-1].fast
        if checks[-1].real.attainment < goal:
            _write(args, load, outcomes, None, checks)
            missed = ", ".join(
                f"{c.fast.configuration.name} {c.real.attainment:.1%}" for c in checks
            )
            raise ImpossibleError(
                f"with the real schedulers none of the {len(checks)} cheapest that were checked "
                f"attains {goal:.1%} ({missed}); take more requests ('--num-prompts'), since the "
                "fast model is off by more than the margin, or rent more than the table says"
            )
    _write(args, load, outcomes, best, checks)
    return 0


def _noted(load: Load, note: str) -> Load:
    """The load with one more note, which is printed."""
    print(note)
    return replace(load, notes=(*load.notes, note))


def _check(
    args: argparse.Namespace, load: Load, passed: Sequence[Outcome], checks: list[Check]
) -> None:
    """Real runs, the cheapest first, until one attains; what fails comes again with one more.

    Args:
        checks: Each is added as soon as it has ended.
    """

    order = itertools.count()

    def entry(outcome: Outcome) -> tuple[float, float, int, Outcome]:
        return outcome.configuration.cost_per_hour, -outcome.attainment, next(order), outcome

    left = [entry(outcome) for outcome in passed]
    heapq.heapify(left)
    seen = set()
    while left and len(checks) < _MOST_CHECKS:
        fast = heapq.heappop(left)[-1]
        if fast.configuration in seen:
            continue
        seen.add(fast.configuration)
        real = _real(args, load, fast.configuration)
        checks.append(Check(fast, real))
        if real.attainment >= args.attainment:
            break
        more = _one_more(real)
        if more.num_gpus <= args.max_gpus:
            grown = run_fast(args.planned, more, load, args.seed, args.attainment)
            heapq.heappush(left, entry(grown))


def _one_more(real: Outcome) -> Configuration:
    """One more instance, in the pool whose target fails."""
    tried = real.configuration
    is_prompts = bool(tried.num_prefill) and real.worst == "ttft"
    return tried.times(tried.num_instances + (not is_prompts), tried.num_prefill + is_prompts)


def _real(args: argparse.Namespace, load: Load, configuration: Configuration) -> Outcome:
    total = len(load.workload.requests)
    with tqdm_class()(
        total=total, desc="real schedulers", unit="req", disable=args.disable_tqdm,
        mininterval=interval_s(),
    ) as bar:  # fmt: skip

        def done(record: ClusterRecord) -> None:
            bar.update()

        return run_real(args.planned, configuration, load, args.seed, args.attainment, done)


def _write(
    args: argparse.Namespace,
    load: Load,
    outcomes: Sequence[Outcome],
    best: Outcome | None,
    checks: Sequence[Check],
    *,
    is_interrupted: bool = False,
) -> None:
    """Print the result and write its files; after an interrupt the table and the JSON file alone.

    Raises:
        KeyboardInterrupt: The user has stopped it; the JSON file is written, if it was not before.
    """
    goal = args.attainment
    interrupt: KeyboardInterrupt | None = None
    notes = [*load.notes, *([] if checks else [unchecked(OF_ONE_MODEL)])]
    known = {outcome.configuration: outcome for outcome in outcomes}
    known |= {check.fast.configuration: check.fast for check in checks}
    ordered = sorted(known.values(), key=lambda o: (o.configuration.cost_per_hour, -o.attainment))

    def described(outcome: Outcome) -> dict[str, Any]:
        place = (outcome.configuration.gpu, outcome.configuration.tensor_parallel)
        is_computed = origin(args.planned, *place) == COMPUTED
        return outcome.to_json(goal) | {"step_times": "computed" if is_computed else "measured"}

    document: dict[str, Any] = {
        "model": args.model,
        "request_rate": args.request_rate,
        "num_requests": len(load.workload.requests),
        "dataset": args.dataset_name,
        "slo_ms": {name: 1e3 * getattr(load.slo, field) for name, field, _ in TARGETS},
        "attainment_goal": goal,
        "seed": args.seed,
        "notes": notes,
        "configurations": [described(outcome) for outcome in ordered],
        "best": None if best is None else described(best),
        "checks": [
            {"configuration": check.fast.configuration.name, "real": check.real.to_json(goal),
             "fast_model_error": check.error()}
            for check in checks
        ],
    }  # fmt: skip
    print(f"{table(ordered, goal, best)}\n{LEGEND}")
    said = [_said_of(check) for check in checks] or [unchecked(OF_ONE_MODEL)]
    if best is not None:
        around: dict[str, Any] = {}
        sentences = [f"Best: {best.configuration.name}; its margin is not known."]
        try:
            if not is_interrupted:
                around, sentences = _around(args, load, ordered, best, checks)
        except KeyboardInterrupt as error:
            interrupt, is_interrupted = error, True
            notes.append(_NO_MARGIN)
            print(_NO_MARGIN)
        document |= around
        document["commands"] = _commands(args, load, best)
        said = [*sentences, *said, *document["commands"]]
    print("\n".join(said))
    args.output.write_text(to_json(document, indent=1) + "\n", encoding="utf-8")
    if best is not None and is_interrupted:
        print(f"Wrote {args.output}.")
        if interrupt is not None:
            raise interrupt
        return
    try:
        path = plot(ordered, goal, best, args.output.with_suffix(".png"))
    except NoPlotError as error:
        print(f"Wrote {args.output}; {error}.")
    else:
        print(f"Wrote {args.output} and {path}.")
    if args.html is not None:
        steps = [steps_said(args.planned, [o.configuration for o in ordered])]
        said = [*said, *steps, *load.notes]
        print(f"Report {html.write(document, said, ordered, best, args.html)}.")


def _commands(args: argparse.Namespace, load: Load, best: Outcome) -> list[str]:
    classes = parse_slo_classes(args.slo_class)
    model = served_name(args.model, args.model in MODELS)
    return commands(best.configuration, model, load.slo, classes, args.max_model_len)


def _said_of(check: Check) -> str:
    error = check.error()
    parts = [f"the fast model is off by {error['attainment_points']:+.1f} points"]
    for name in ("ttft", "tpot"):
        middle, last = error[f"{name}_p50"], error[f"{name}_p99"]
        if not (math.isnan(middle) or math.isnan(last)):
            parts.append(f"{name.upper()} p50 {middle:+.0%} p99 {last:+.0%}")
    return (
        f"With the real schedulers {check.fast.configuration.name}: {check.real.attainment:.1%}; "
        f"{', '.join(parts)}."
    )


def _around(
    args: argparse.Namespace,
    load: Load,
    outcomes: Sequence[Outcome],
    best: Outcome,
    checks: Sequence[Check],
) -> tuple[dict[str, Any], list[str]]:
    """The margin of the best by the fast model, and what the next cheaper one would lose.

    What a check has said of the next cheaper one goes before what the fast model says.

    Returns:
        Entries of the JSON file, and sentences.
    """
    goal, chosen = args.attainment, best.configuration
    rates = [(1.0, best.attainment)]

    def at(faster: float) -> Outcome:
        found = run_fast(args.planned, chosen, load, args.seed, goal, faster)
        rates.append((faster, found.attainment))
        return found

    factor = rate_margin(at, goal)
    points = 100 * (best.attainment - goal)
    more = " and perhaps more" if factor >= 2.0 else ""
    said = [
        f"Best: {chosen.name}, {chosen.cost_per_hour:.2f} per hour; margin {points:.1f} points, "
        f"holds up to {factor:.2f} times the rate{more}."
    ]
    cheaper = [o for o in outcomes if o.configuration.cost_per_hour < chosen.cost_per_hour - 1e-9]
    margin = {"attainment_points": points, "rate_factor": factor, "rates": sorted(rates)}
    result: dict[str, Any] = {"margin": margin}
    if cheaper:
        following = max(cheaper, key=lambda o: (o.configuration.cost_per_hour, o.attainment))
        real = {check.fast.configuration: check.real for check in checks}
        places = (following.configuration, chosen)
        is_real = all(place in real for place in places)
        if is_real:
            following, kept = (real[place] for place in places)
        else:
            kept = best
        by = "with the real schedulers" if is_real else "by the fast model"
        lost = 100 * (kept.attainment - following.attainment)
        saved = chosen.cost_per_hour - following.configuration.cost_per_hour
        said.append(
            f"Next cheaper: {following.configuration.name}, saves {saved:.2f} per hour and loses "
            f"{lost:.1f} points ({following.attainment:.1%}) {by}."
        )
        result["next_cheaper"] = following.to_json(goal) | {
            "points_lost": lost,
            "schedulers": "real" if is_real else "fast",
        }
    return result, said
