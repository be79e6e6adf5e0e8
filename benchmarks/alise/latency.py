"""Latency under `policy=alise`: runs, their rows, and the table of each experiment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from alise import experiments
from alise.figure import plot
from alise.measure import run_one
from alise.setups import Run, data_files, scheduler_of
from harness import sweep
from harness.resumable import Row
from harness.setup import Outcome, Setup

_SCRIPT = Path(__file__).with_name("measure.py")


def rates(setup: Setup) -> Outcome:
    """Latency over request rate."""
    return _outcome(setup, experiments.rates_runs, experiments.rates_table)


def seeds(setup: Setup) -> Outcome:
    """The same on three seeds, fewer schedulers."""
    return _outcome(setup, experiments.seeds_runs, experiments.seeds_table)


def wrong(setup: Setup) -> Outcome:
    """Predictions that are off."""
    return _outcome(setup, experiments.wrong_runs, experiments.wrong_table)


def aging(setup: Setup) -> Outcome:
    """The aging threshold."""
    return _outcome(setup, experiments.aging_runs, experiments.aging_table)


def draw(name: str, setup: Setup, outcome: Outcome, folder: Path) -> Path:
    """The figure of `rates`, into a folder."""
    return plot(outcome.rows, folder / f"{name}.png")


def _outcome(
    setup: Setup,
    runs_of: Callable[[Sequence[str], bool], list[Run]],
    table: Callable[[Sequence[Row]], str],
) -> Outcome:
    setup.check_only([each.name for each in experiments.SETUPS])
    make = functools.partial(run_one, data=setup.data)
    rows = setup.rows_of(runs_of(setup.only, setup.is_quick), key_of, make, "alise")
    return Outcome(rows, table(rows))


def key_of(run: Run) -> str:
    """Changes with all that decides the row."""
    return sweep.make_key(
        asdict(run), scheduler_of(run), run.profile, scripts=[_SCRIPT], files=data_files(run)
    )
