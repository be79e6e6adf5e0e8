"""What `benchmarks/run.py` does: lists the experiments, runs one, keeps its table."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ages, options, provenance, release
from harness.options import Refused
from harness.setup import Outcome, Setup
from sola_sched.errors import ConfigError, DatasetError, ProfileError, SloError
from sola_sched.length_predictor.corpus import DATA_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
#: Tables that were made with the options by default: those of a release, and those of experiments
#: that were made once, to decide something or to repeat a paper's figure.
TABLES = ROOT / "docs" / "results"
EXPERIMENT_TABLES = ROOT / "docs" / "experiments"
EXIT_USAGE = 2
_COMMAND = "python benchmarks/run.py"
_QUICK_REQUESTS = 60
_MAX_COMMITS = 6
#: Fields of `Setup` that go by the option's own name.
_SHARED = ("num_requests", "seeds", "only", "scheduling_time", "rerun")
_HANDLED = ("data", "results", "workers", "quick", "stored", "plots", *_SHARED)


@dataclass(frozen=True)
class Experiment:
    """One name of the command line.

    Attributes:
        name: As on the command line; its table is ``NAME.md`` in `tables`.
        summary: One line.
        duration: How long it takes without rows, on two cores of a common machine.
        function: ``module:function``, called with a `Setup`, gives an `Outcome`.
        options: Those that it takes, keys of `options.OPTIONS`.
        rows: File in the results; empty if it keeps none.
        defaults: Of its options, with which its table was made.
        figure: ``module:function`` that draws into a folder, called with name, setup and outcome.
        untold: What is known of rows that tell no commit.
        in_release: Whether a release makes its table anew.
    """

    name: str
    summary: str
    duration: str
    function: str
    options: Sequence[str] = ()
    rows: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    figure: str = ""
    untold: str = ""
    in_release: bool = False

    @property
    def tables(self) -> Path:
        """Folder of its table."""
        return TABLES if self.in_release else EXPERIMENT_TABLES

    def arguments(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parsed.

        Raises:
            Refused: They cannot be used.
        """
        defaults = {"results": RESULTS} | dict(self.defaults)
        if "workers" in self.options:
            defaults.setdefault("workers", 1)
        taken = self.taken
        return options.parse(
            f"{self.name}: {self.summary}",
            taken,
            {name: value for name, value in defaults.items() if name in taken},
            argv,
        )

    @property
    def taken(self) -> tuple[str, ...]:
        """Its options, with those that follow from what it keeps and draws."""
        more = ["results"] + (["stored"] if self.rows else []) + (["plots"] if self.figure else [])
        return (*self.options, *more)

    def is_published(self, args: argparse.Namespace) -> bool:
        """Whether the options are those with which its table is made."""
        free = {"data", "results", "workers", "stored", "plots", "rerun", "save_profile"}
        by_default = vars(self.arguments([]))
        has_data = "data" not in self.options or _data(args.data) is not None
        return (
            has_data
            and args.results == RESULTS
            and all(getattr(args, n) == by_default[n] for n in self.taken if n not in free)
        )

    def setup(self, args: argparse.Namespace) -> Setup:
        """The arguments as its function takes them."""
        is_quick = getattr(args, "quick", False)
        path = args.results / (self.rows or "none")
        if is_quick:
            path = path.with_stem(f"{path.stem}-quick")
        given = {n: getattr(args, n) for n in _SHARED if getattr(args, n, None) is not None}
        if is_quick and given.get("num_requests") == self.defaults.get("num_requests"):
            given["num_requests"] = _QUICK_REQUESTS
        return Setup(
            data=_data(getattr(args, "data", None)),
            path=path,
            num_workers=getattr(args, "workers", 1),
            is_quick=is_quick,
            is_stored=getattr(args, "stored", False),
            options={n: getattr(args, n) for n in self.options if n not in _HANDLED},
            **given,
        )


def main(experiments: Sequence[Experiment], argv: Sequence[str]) -> int:
    """Run what the arguments say; return the exit status."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    by_name = {experiment.name: experiment for experiment in experiments}
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(listing(experiments))
        elif argv[0] == "tables":
            options.parse("tables: every table whose rows are stored", (), {}, argv[1:])
            return _tables(experiments)
        elif argv[0] == "ages":
            options.parse("ages: which tables are of the policy as it is", (), {}, argv[1:])
            takes = {each.name: each.duration for each in experiments if each.in_release}
            print(ages.ages(TABLES, ROOT, takes))
        elif argv[0] == "release":
            return release.make(experiments, argv[1:], TABLES, ROOT)
        elif argv[0] not in by_name:
            raise Refused(f"there is no experiment {argv[0]!r}; `{_COMMAND}` lists them.")
        else:
            run(by_name[argv[0]], argv[1:])
    except (Refused, ConfigError, DatasetError, ProfileError, SloError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _tables(experiments: Sequence[Experiment]) -> int:
    """Every table whose rows are stored; 1 where one cannot be made of them."""
    failed = 0
    for experiment in experiments:
        if experiment.rows and (RESULTS / experiment.rows).exists():
            try:
                run(experiment, ["--stored"])
            except SystemExit as error:
                print(f"{experiment.name}: {error}", file=sys.stderr)
                failed = 1
    return failed


def listing(experiments: Sequence[Experiment]) -> str:
    """The experiments, a line each."""
    width = max(len(experiment.name) for experiment in experiments)
    lines = [f"{_COMMAND} NAME [options]; NAME --help lists the options of each. Times without "
             "stored rows, one worker.\n"]  # fmt: skip
    for each in experiments:
        lines.append(f"{each.name:{width}}  {each.duration:>8}  {each.summary}")
    lines.append(f"{'tables':{width}}  {'minutes':>8}  every table, of the rows that are stored")
    lines.append(f"{'ages':{width}}  {'1 s':>8}  which tables are of the policy as it is")
    lines.append(
        f"{'release':{width}}  {'a night':>8}  makes those that are not, one after another"
    )
    return "\n".join(lines)


def run(experiment: Experiment, argv: Sequence[str]) -> Outcome:
    """Run an experiment, print its table and keep it.

    Raises:
        Refused: The arguments cannot be used.
    """
    args = experiment.arguments(argv)
    setup = experiment.setup(args)
    outcome: Outcome = _function(experiment.function)(setup)
    print(outcome.table)
    if getattr(args, "plots", None) is not None:
        figure = _function(experiment.figure)(experiment.name, setup, outcome, args.plots)
        print(f"Figure {figure}.")
    path = args.results / f"{experiment.name}{'-quick' if setup.is_quick else ''}.md"
    if experiment.is_published(args):
        path = experiment.tables / path.name
    elif args.results == RESULTS and not setup.is_quick:
        print(f"Not kept: options or data are not those of {experiment.tables / path.name}.")
        return outcome
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{heading(experiment, outcome)}\n\n{outcome.table.rstrip()}\n", "utf-8")
    print(f"Table in {path}.")
    return outcome


def heading(experiment: Experiment, outcome: Outcome) -> str:
    """The command, and the commits whose source made the rows."""
    if not experiment.rows:
        return f"`{_COMMAND} {experiment.name}`, commit {provenance.checkout()[0]}."
    said = commits(outcome.rows)
    num_untold = sum(not row.get("commit") for row in outcome.rows)
    if num_untold:
        said = f"{said}; {num_untold:,} rows tell none" if said else "not told"
        said += f" ({experiment.untold})" if experiment.untold else ""
    return (
        f"`{_COMMAND} {experiment.name}`, the table again from its {len(outcome.rows):,} rows with "
        f"`--stored`. Commit of the rows: {said}."
    )


def commits(rows: Sequence[Mapping[str, Any]]) -> str:
    """The commits that rows tell; whose rows, where ours and the others were made apart."""
    said: dict[str, str] = {}
    for whose in ("sola", "others"):
        told = [row for row in rows if row.get("commit") and _is_ours(row) == (whose == "sola")]
        known = sorted({str(row["commit"])[:7] for row in told})
        said[whose] = ", ".join(known) if len(known) <= _MAX_COMMITS else f"{len(known)} commits"
    if not all(said.values()) or said["sola"] == said["others"]:
        return said["others"] or said["sola"]
    return f"{said['sola']} (sola), {said['others']} (others)"


def _is_ours(row: Mapping[str, Any]) -> bool:
    name = str(row.get("scheduler", ""))
    return name.partition(":")[0] == "sola" and "policy=" not in name


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _data(given: Path | None) -> Path | None:
    """The folder of the data sets: given, of the environment, beside the repository, or none."""
    if given is not None and not given.is_dir():
        raise Refused(f"--data must be a folder (got {str(given)!r}).")
    named = given or os.environ.get(DATA_VARIABLE)
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None
