"""The benchmark from parsed arguments to saved files."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

from sola_sched.bench.backends.base import RunOutcome, SchedulerSpec
from sola_sched.bench.plan import Plan, make_plan, per_s, slo_text
from sola_sched.bench.report import html, results
from sola_sched.bench.report import table as report
from sola_sched.bench.report.page import require_report
from sola_sched.bench.report.progress import Progress
from sola_sched.bench.report.result_files import ResultFiles
from sola_sched.bench.report.results import Result
from sola_sched.core.metrics import RequestRecord
from sola_sched.workloads.workload import Workload

EXIT_NOT_SAVED = 1
EXIT_INTERRUPTED = 130

Say = Callable[[str], None]


def run(args: argparse.Namespace, say: Say = print) -> int:
    """Run the benchmark; return the exit code.

    Each run is saved when it ends; a failure or an interrupt later on loses nothing, and a result
    that cannot be saved is printed.

    Raises:
        ConfigError: An argument cannot be right; nothing has been measured.
        DatasetError: The data set is missing or unusable.
    """
    started_s = time.monotonic()
    files = ResultFiles(args, say)
    require_report(args.html)
    plan = make_plan(args, say)
    finished: list[Result] = []
    is_interrupted = False
    try:
        _sweep(args, plan, started_s, finished, files, say)
        is_interrupted = bool(finished[-1]["interrupted"])
    except KeyboardInterrupt:
        if not finished:
            raise
        say(
            f"Interrupted: {len(finished)} of {_num_runs(plan)} runs have ended, all of them whole."
        )
        is_interrupted = True
    except Exception as error:
        say(
            f"Run {len(finished) + 1} of {_num_runs(plan)} failed "
            f"({type(error).__name__}: {error}); what follows are the runs before it."
        )
        if finished:
            _conclude(args, plan, finished, files, say)
        raise
    is_saved = _conclude(args, plan, finished, files, say)
    say(f"Took {time.monotonic() - started_s:.0f} s.")
    if not is_saved:
        return EXIT_NOT_SAVED
    return EXIT_INTERRUPTED if is_interrupted else 0


def _sweep(
    args: argparse.Namespace,
    plan: Plan,
    started_s: float,
    finished: list[Result],
    files: ResultFiles,
    say: Say,
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
            outcome = _run_one(args, plan, workload, scheduler, len(finished), say)
            result = results.make_result(plan.info, workload, scheduler, outcome) | bound
            finished.append(result)
            files.add(result)
            if outcome.ends_all:
                raise KeyboardInterrupt
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
) -> RunOutcome:
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
    return outcome


def _bound(plan: Plan, workload: Workload) -> Result:
    """What no scheduler exceeds, where the backend is one whose step times are known."""
    from sola_sched.bench.backends.simulation import SimBackend

    if not isinstance(plan.backend, SimBackend):
        return {}
    from sola_sched.bench.backends.bound import workload_bound

    bound = workload_bound(plan.backend, workload, plan.slo.target, plan.schedulers)
    return {results.BOUND_KEY: bound.attainable_ratio}


def _conclude(
    args: argparse.Namespace, plan: Plan, finished: list[Result], files: ResultFiles, say: Say
) -> bool:
    """Report and draw the runs; whether all is saved that was to be."""
    say("\n" + report.table(finished) + "\n")
    if classes := report.class_table(finished):
        say(classes + "\n")
    for line in [*report.conclusions(finished), f"SLO: {slo_text(plan.slo)}."]:
        say(line)
    is_saved = files.finish() and _write_html(args, finished, say)
    if not files.is_on:
        return is_saved
    from sola_sched.bench.report import plots

    stem = str(finished[0]["date"]) if args.label is None else f"{args.label}-{finished[0]['date']}"
    try:
        figures = [
            plots.plot_plane(finished, plan.slo.target, files.folder / f"{stem}-ttft-tpot.png"),
            plots.plot_attainment(finished, files.folder / f"{stem}-attainment.png"),
        ]
    except plots.NoPlotError as error:
        say(f"No plots: {error}.")
        return is_saved
    except OSError as error:
        say(f"The plots could not be saved ({error}).")
        return False
    say(f"Plots {', '.join(map(str, figures))}.")
    return is_saved


def _write_html(args: argparse.Namespace, finished: list[Result], say: Say) -> bool:
    """Write the report that `--html` asks for; whether it is there, or none was wanted."""
    if args.html is None:
        return True
    try:
        say(f"Report {html.write(finished, args.html)}.")
    except OSError as error:
        say(f"The report could not be saved ({error}).")
        return False
    return True


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
