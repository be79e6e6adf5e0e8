"""Files of a benchmark's results: found to be writable before, kept and printed if they are not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from sola_sched.bench.report import results
from sola_sched.bench.report.results import Result
from sola_sched.config.output_file import require_writable, require_writable_folder


class ResultFiles:
    """Saves results as ``--save-result``, ``--result-dir`` and their neighbours say.

    Args:
        args: The command line's.
        say: Prints a line.

    Raises:
        ConfigError: The folder or the file cannot be written.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args, self._say = args, say
        self._unsaved: list[Result] = []
        self._num_saved = 0
        self._taken: set[Path] = set()  # of this run
        self.folder: Path = args.result_dir
        #: Whether anything is to be saved.
        self.is_on = args.save_result is not False or bool(args.append_result)
        if not self.is_on:
            return
        require_writable_folder(self.folder, "--result-dir")
        if args.result_filename:
            require_writable(self.folder / args.result_filename, "--result-filename")

    def add(self, result: Result) -> None:
        """Save a result; one that cannot be saved is kept for `finish`."""
        if not self.is_on:
            return
        self._unsaved.append(result)
        try:
            self._save_all()
        except OSError as error:
            self._say(f"  Not saved yet ({error}); the result is kept and tried again.")

    def finish(self) -> bool:
        """Try again what could not be saved, and print what still cannot be; whether all is."""
        if not self.is_on:
            return True
        try:
            self._save_all()
        except OSError as error:
            self._say(f"{len(self._unsaved)} results could not be saved ({error}); here they are:")
            for result in self._unsaved:
                self._say(results.to_json(results.without_details(result)))
            return False
        name = self._args.result_filename
        self._say(
            f"Saved {self._num_saved} results in {self.folder / name if name else self.folder}."
        )
        return True

    def _save_all(self) -> None:
        args = self._args
        while self._unsaved:
            result = self._unsaved[0]
            path = self._path_of(result)
            kept = result if args.save_detailed else results.without_details(result)
            append = args.append_result or bool(args.result_filename and self._num_saved)
            results.save(path, [kept], append=append)
            self._num_saved += 1
            self._taken.add(path)
            self._unsaved.pop(0)

    def _path_of(self, result: Result) -> Path:
        """Its file: none that holds another result of this run, unless one is to hold all."""
        if self._args.result_filename:
            return self.folder / str(self._args.result_filename)
        path = first = self.folder / results.result_filename(result)
        number = 1
        while path in self._taken:
            number += 1
            path = first.with_name(f"{first.stem}-{number}{first.suffix}")
        return path
