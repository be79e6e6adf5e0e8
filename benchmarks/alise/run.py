"""Latency under `policy=alise` in virtual time: `python benchmarks/alise/run.py NAME`.

Rows are appended to `benchmarks/results/alise/runs.jsonl`; what is there is not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments import EXPERIMENTS
from measure import Row, run_one
from setups import RESULTS, Run, data_files, folder, scheduler_of

_SCRIPT = Path(__file__).with_name("measure.py")


def key_of(run: Run) -> str:
    """Changes with all that decides the row."""
    from sola_sched.bench.research import sweep

    return sweep.make_key(
        asdict(run), scheduler_of(run), run.profile, scripts=[_SCRIPT], files=data_files(run)
    )


def rows_of(runs: Iterable[Run], path: Path, data: Path | None, workers: int) -> list[Row]:
    """A row per run, run where it is missing."""
    from sola_sched.bench.research import resumable

    make = functools.partial(run_one, data=data)
    return resumable.run(runs, path, key_of, make, num_workers=workers, title=path.stem)


def stored(runs: Iterable[Run], path: Path) -> list[Row]:
    """The rows that there are, the last of each, by whatever source they were made."""
    names = list(asdict(next(iter(runs := list(runs)))))
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    found = {tuple(row[name] for name in names): row for row in rows}
    keys = [tuple(asdict(run).values()) for run in dict.fromkeys(runs)]
    return [found[key] for key in keys if key in found]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(EXPERIMENTS))
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="of the experiment's setups")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="few, short runs: does it work?")
    parser.add_argument("--stored", action="store_true", help="tables of the rows there are")
    parser.add_argument("--plots", type=Path, help="draw the figure into this folder")
    args = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    experiment = EXPERIMENTS[args.name]
    path = args.results / ("runs-quick.jsonl" if args.quick else "runs.jsonl")
    runs = experiment.runs(args.only, args.quick)
    if args.stored:
        rows = stored(runs, path)
    else:
        rows = rows_of(runs, path, folder(args.data), args.workers)
    table = experiment.table(rows)
    print(table)
    if not args.only and not args.quick:
        (args.results / f"{args.name}.md").write_text(table + "\n", encoding="utf-8")
    if args.plots is not None:
        from figure import plot

        print(plot(rows, args.plots / "alise-rates.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
