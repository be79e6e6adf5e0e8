"""Makes the tables of a release that are of an older policy, one command for a night."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from harness import ages, options


class Made(Protocol):
    """What `make` needs of an experiment; see `command.Experiment`."""

    @property
    def name(self) -> str: ...
    @property
    def duration(self) -> str: ...
    @property
    def options(self) -> Sequence[str]: ...
    @property
    def in_release(self) -> bool: ...


def make(experiments: Sequence[Made], argv: Sequence[str], tables: Path, root: Path) -> int:
    """Run each experiment of a release whose table is not of the policy as it is.

    Each runs in a process of its own; after one that fails the others go on. What has been made is
    not made again, so a run that was broken off goes on where it was. Schedulers of others keep
    their rows where the experiment can tell them from ours.

    Args:
        experiments: All there are.
        argv: Arguments behind ``release``: the data and the workers.
        tables: Folder of the tables of a release.
        root: Of the checkout.

    Returns:
        How many have failed.

    Raises:
        Refused: The arguments cannot be used.
    """
    title = "release: the tables of a release that are of an older policy"
    args = options.parse(title, ("data", "workers", "only"), {"workers": 1, "only": ()}, argv)
    known = [each.name for each in experiments if each.in_release]
    for name in args.only:
        if name not in known:
            raise options.Refused(f"'--only' must name some of {', '.join(known)} (got {name!r}).")
    left = [
        each
        for each in experiments
        if each.in_release
        and (not args.only or each.name in args.only)
        and ages.age_of(ages.told_by(tables / f"{each.name}.md"), root) != "present"
    ]
    failed = []
    for number, each in enumerate(left, 1):
        print(f"{number} of {len(left)}: {each.name}, about {each.duration}", flush=True)
        started_s = time.monotonic()
        given = {"data": args.data, "workers": args.workers, "rerun": "sola"}
        more = [
            word
            for name, value in given.items()
            if name in each.options and value is not None
            for word in (options.flag(name), str(value))
        ]
        done = subprocess.run([sys.executable, sys.argv[0], each.name, *more], check=False)
        if done.returncode:
            failed.append(each.name)
        said = f"failed ({done.returncode})" if done.returncode else "made"
        print(
            f"{each.name}: {said} after {(time.monotonic() - started_s) / 60:.0f} min", flush=True
        )
    print(f"{len(left) - len(failed)} of {len(left)} tables made.")
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return len(failed)
