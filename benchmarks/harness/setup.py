"""How an experiment is to be run, and what it gives back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from harness import provenance, resumable
from harness.points import Point
from harness.resumable import Row
from sola_sched.errors import ConfigError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Setup:
    """What the command line says.

    Attributes:
        data: Folder of the data sets; None leaves made-up lengths.
        path: Rows, JSON lines.
        is_quick: Few, small runs.
        is_stored: Use the rows there are and run nothing.
        is_hidden: No progress bars.
        only: Parts of the experiment to run, where it lets choose; empty for all.
        scheduling_time: As in `Point`, of every run.
        rerun: Schedulers whose rows must be of this source, see `sweep.run`.
        options: What this experiment alone takes, by name.
    """

    data: Path | None
    path: Path
    num_requests: int = 1000
    seeds: Sequence[int] = (0,)
    num_workers: int = 1
    is_quick: bool = False
    is_stored: bool = False
    is_hidden: bool = False
    only: Sequence[str] = ()
    scheduling_time: str = "none"
    rerun: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, points: Iterable[Point], title: str) -> list[Row]:
        """A row per point of a scheduler, with bounds, see `sweep.run`."""
        from harness import sweep

        points = [replace(point, scheduling_time=self.scheduling_time) for point in points]
        if self.is_stored:
            return self._some(sweep.stored(points, self.path), title)
        return sweep.run(
            points, self.path, data=self.data, num_workers=self.num_workers, title=title,
            is_hidden=self.is_hidden, rerun=self.rerun,
        )  # fmt: skip

    def rows_of(
        self,
        items: Iterable[Item],
        key_of: Callable[[Item], str],
        make: Callable[[Item], Row],
        title: str,
    ) -> list[Row]:
        """A row per dataclass, see `resumable.run`; with ``--stored`` of those that have one."""
        if self.is_stored:
            return self._some(resumable.stored(items, self.path), title)
        return resumable.run(
            items, self.path, key_of, make, num_workers=self.num_workers, title=title,
            is_hidden=self.is_hidden,
        )  # fmt: skip

    def check_only(self, known: Sequence[str]) -> None:
        """Refuse parts that are not known.

        Raises:
            ConfigError: There is one.
        """
        for name in self.only:
            if name not in known:
                raise ConfigError(f"'--only' must name some of {', '.join(known)} (got {name!r}).")

    def keep(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows of measurements that are made again each time; each is stored as it comes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as out:
            for row in rows:
                kept = row | provenance.columns(1)
                out.write(json.dumps(kept) + "\n")
                out.flush()
                yield kept

    def last_run(self, measured: Iterable[Row]) -> list[Row]:
        """The rows of measurements that are made now; with ``--stored`` those of the last `run`."""
        rows = self.all_rows() if self.is_stored else list(self.keep(measured))
        return [row for row in rows if row["run"] == rows[-1]["run"]]

    def all_rows(self) -> list[Row]:
        """Every row that is stored."""
        return self._some(resumable.load(self.path), "this experiment")

    def _some(self, rows: list[Row], title: str) -> list[Row]:
        if not rows:
            raise SystemExit(
                f"error: {self.path} must hold rows for {title} (got none); run without --stored."
            )
        return rows


@dataclass(frozen=True)
class Outcome:
    """What an experiment found.

    Attributes:
        rows: Of which the table is made; empty where it was made without.
        table: Markdown.
    """

    rows: list[Row]
    table: str
