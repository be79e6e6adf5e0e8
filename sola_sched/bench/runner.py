"""The benchmark from parsed arguments to saved files."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

from sola_sched.bench import report, results
from sola_sched.bench.backend import SchedulerSpec
from sola_sched.bench.plan import Plan, make_plan, per_s, slo_text
from sola_sched.bench.progress import Progress
from sola_sched.bench.results import Result
from sola_sched.bench.workload import Workload
from sola_sched.metrics import RequestRecord

EXIT_INTERRUPTED = 130

Say = Callable[[str], None]


def run(args: argparse.Namespace, say: Say = print) -> int:
    """Run the benchmark; return the exit code.

    Each run is saved when it ends; a failure or an interrupt later on loses nothing.

    Raises:
        ConfigError: An argument cannot be right; nothing has been measured.
        DatasetError: The data set is missing or unusable.
    """
    started_s = time.monotonic()
    plan = make_plan(args, say)
    finished: list[Result] = []
    try:
        _sweep(args, plan, started_s, finished, say)
    except Exception as error:
        say(
            f"Run {len(finished) + 1} of {_num_runs(plan)} failed "
            f"({type(error).__name__}: {error}); what follows are the runs before it."
        )
        if finished:
            _conclude(args, plan, finished, say)
        raise
    _conclude(args, plan, finished, say)
    say(f"Took {time.monotonic() - started_s:.0f} s.")
    return EXIT_INTERRUPTED if finished[-1]["interrupted"] else 0


def _sweep(
    args: argparse.Namespace, plan: Plan, started_s: float, finished: list[Result], say: Say
) -> None:
    """Run every scheduler at every rate; append each result to ``finished``."""
    last_rate, last_s = plan.rates[0], 0.0
    for index, rate in enumerate(plan.rates):
        begun_s = time.monotonic()
        slower = last_rate / rate if math.isfinite(last_rate) else 1.0
        end_s = begun_s - started_s + last_s * slower
        late = args.num_prompts is None and end_s > args.time_limit
        if late and finished:
            left = ", ".join(map(per_s, plan.rates[index:]))
            say(
                f"Left out: {left}; they would end after --time-limit ({args.time_limit:g} s). "
                "Raise it, or lower --duration-budget or --num-prompts."
            )
            return
        workload = _timed(args, plan.workload, rate)
        bound = _bound(plan, workload)
        for scheduler in plan.schedulers:
            result = _run_one(args, plan, workload, scheduler, len(finished), say) | bound
            finished.append(result)
            if args.save_result is not False or args.append_result:
                _save(args, result, is_first=len(finished) == 1)
            if result["interrupted"]:
                say(
                    f"Interrupted: {len(finished)} of {_num_runs(plan)} runs started, "
                    "the last is partial."
                )
                return
        last_rate, last_s = rate, time.monotonic() - begun_s


def _run_one(
    args: argparse.Namespace,
    plan: Plan,
    workload: Workload,
    scheduler: SchedulerSpec,
    num_finished: int,
    say: Say,
) -> Result:
    title = f"{scheduler.label} @ {per_s(workload.request_rate)}"
    with Progress(
        f"[{num_finished + 1}/{_num_runs(plan)}] {title}",
        len(workload.requests),
        plan.slo.target,
        is_hidden=args.disable_tqdm,
    ) as bar:
        outcome = plan.backend.run(
            workload,
            scheduler,
            plan.slo.target,
            max_concurrency=args.max_concurrency,
            on_done=bar.done,
        )
    for note in outcome.notes:
        say(f"  {title}: {note}")
    _say_errors(outcome.records, say)
    return results.make_result(plan.info, workload, scheduler, outcome)


def _bound(plan: Plan, workload: Workload) -> Result:
    """What no scheduler exceeds, where the backend is one whose step times are known."""
    from sola_sched.bench.sim_backend import SimBackend

    if not isinstance(plan.backend, SimBackend):
        return {}
    from sola_sched.bench.sim_bound import workload_bound

    bound = workload_bound(plan.backend, workload, plan.slo.target, plan.schedulers)
    return {results.BOUND_KEY: bound.attainable_ratio}


def _conclude(args: argparse.Namespace, plan: Plan, finished: list[Result], say: Say) -> None:
    say("\n" + report.table(finished) + "\n")
    for line in [*report.conclusions(finished), f"SLO: {slo_text(plan.slo)}."]:
        say(line)
    if args.save_result is False and not args.append_result:
        return
    from sola_sched.bench import plots

    directory: Path = args.result_dir
    stem = str(finished[0]["date"]) if args.label is None else f"{args.label}-{finished[0]['date']}"
    figures = [
        plots.plot_plane(finished, plan.slo.target, directory / f"{stem}-ttft-tpot.png"),
        plots.plot_attainment(finished, directory / f"{stem}-attainment.png"),
    ]
    where = directory / args.result_filename if args.result_filename else directory
    say(f"Saved {len(finished)} results in {where}; plots {', '.join(map(str, figures))}.")


def _save(args: argparse.Namespace, result: Result, *, is_first: bool) -> None:
    path = args.result_dir / (args.result_filename or results.result_filename(result))
    append = args.append_result or bool(args.result_filename and not is_first)
    kept = result if args.save_detailed else results.without_details(result)
    results.save(path, [kept], append=append)


def _timed(args: argparse.Namespace, workload: Workload, rate: float) -> Workload:
    if args.self_timed:
        return workload.stretched_to(rate)
    return workload.at_rate(rate, burstiness=args.burstiness, seed=args.seed)


def _num_runs(plan: Plan) -> int:
    return len(plan.rates) * len(plan.schedulers)


def _say_errors(records: list[RequestRecord], say: Say) -> None:
    errors = [record.error for record in records if record.error]
    for error in sorted(set(errors))[:3]:
        say(f"  {errors.count(error)} of {len(records)} requests failed: {error}")
