"""Runs one experiment in virtual time: `python benchmarks/simulation/run.py NAME`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from experiments import EXPERIMENTS, Outcome, plane_points
from setups import Setup

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS = _ROOT / "benchmarks" / "results"
_DATA_VARIABLE = "SOLA_SCHED_DATA"
_NUM_REQUESTS = 1000
_QUICK_REQUESTS = 60


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("name", choices=sorted(EXPERIMENTS))
    add(
        "--data",
        type=Path,
        help=f"folder of the data sets (default: ${_DATA_VARIABLE}, else ../shared/data; "
        "without one, synthetic lengths)",
    )
    add("--results", type=Path, default=_RESULTS, metavar="DIR", help="rows and tables")
    add("--quick", action="store_true", help="few, small runs: does it work?")
    add("--workers", type=int, default=1, help="processes (default: 1)")
    add("--seeds", type=int, nargs="+", default=[0], help="(default: 0)")
    add(
        "--num-requests",
        type=int,
        help=f"requests a run (default: {_NUM_REQUESTS}; quick: {_QUICK_REQUESTS})",
    )
    add(
        "--models",
        nargs="+",
        default=[],
        help="rows of fig7, fig8, table4, as Llama3-8B or Llama3-8B/tight, or of levels, as "
        "sharegpt/10/90 (default: all)",
    )
    add("--plots", type=Path, metavar="DIR", help="draw the experiment's figure into this folder")
    add(
        "--scheduling-time",
        choices=("none", "model"),
        default="none",
        help="what the scheduler's own calls take of the time: nothing, as in the rows that "
        "are stored (default), or what was measured of vLLM's and of ours",
    )
    add("--stored", action="store_true", help="table and plot of the rows there are; run nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; return the exit status."""
    args = build_parser().parse_args(argv)
    name, rows = args.name, "runs.jsonl"
    if args.quick:
        name, rows = f"{name}-quick", "runs-quick.jsonl"
    setup = Setup(
        data=_data(args.data),
        path=args.results / rows,
        num_requests=args.num_requests or (_QUICK_REQUESTS if args.quick else _NUM_REQUESTS),
        seeds=args.seeds,
        num_workers=args.workers,
        is_quick=args.quick,
        is_stored=args.stored,
        models=args.models,
        scheduling_time=args.scheduling_time,
    )
    outcome = EXPERIMENTS[args.name](setup)
    table = args.results / f"{name}.md"
    table.write_text(outcome.table + "\n", encoding="utf-8")
    print(outcome.table)
    if args.plots is not None:
        print(f"Figure {_plot(args.name, setup, outcome, args.plots)}.")
    print(f"Rows in {setup.path}, table in {table}.")
    return 0


def _plot(name: str, setup: Setup, outcome: Outcome, folder: Path) -> Path:
    import figures

    path = folder / f"simulation-{name}.png"
    if name == "fig9":
        return figures.plot_plane(plane_points(setup), setup.data, path)
    return figures.plot_lines(outcome.rows, path)


def _data(given: Path | None) -> Path | None:
    if given is not None:
        return given
    named = os.environ.get(_DATA_VARIABLE)
    folder = Path(named) if named else _ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


if __name__ == "__main__":
    raise SystemExit(main())
