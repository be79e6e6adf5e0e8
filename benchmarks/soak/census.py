"""What a process holds: objects, tasks, threads, and the lengths of all tables of this package.

No table is listed here: every object whose class is of `sola_sched` counts, and every attribute of
one that has a length. So a table that is new, and grows, is found as well.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.files import replace_text

#: In the folder of `start`: the number of the census that is asked for.
ASKED = "census"
_PACKAGE = "sola_sched"
_LOOK_EVERY_S = 0.2


def census() -> dict[str, Any]:
    """Counts of this process, by what is counted."""
    gc.collect()
    objects = gc.get_objects()
    counts: Counter[str] = Counter()
    num_tasks = 0
    for each in objects:
        kind = type(each)
        if isinstance(each, asyncio.Task):
            num_tasks += not each.done()
        elif str(getattr(kind, "__module__", "")).partition(".")[0] == _PACKAGE:
            counts[f"{kind.__name__} objects"] += 1
            for name, value in _attributes(each):
                counts[f"{kind.__name__}.{name}"] += _length(value)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, dict | list | set) and not attribute.startswith("__"):
                    counts[f"{name}:{attribute}"] = len(value)
    tables = {name: count for name, count in sorted(counts.items()) if count}
    return {
        "objects": len(objects), "tasks": num_tasks, "threads": threading.active_count(),
        "tables": tables,
    }  # fmt: skip


def _attributes(each: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(each, "__dict__", {}).items())
    for kind in type(each).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(each, name):
                yield name, getattr(each, name)


def _length(value: Any) -> int:
    """Of a container; texts and all else count nothing."""
    if isinstance(value, str | bytes | type) or not hasattr(type(value), "__len__"):
        return 0
    try:
        return len(value)
    except Exception:  # an array without dimensions, a table that is half made
        return 0


def start(folder: Path, role: str) -> None:
    """From now on, write a census into ``folder/ROLE.jsonl`` whenever `ask` is called there."""
    threading.Thread(target=_watch, args=(folder, role), name="census", daemon=True).start()


def _watch(folder: Path, role: str) -> None:
    done = ""
    while True:
        time.sleep(_LOOK_EVERY_S)
        try:
            asked = (folder / ASKED).read_text(encoding="utf-8")
        except OSError:
            continue
        if asked != done:
            done = asked
            line = json.dumps({"number": asked, **census()})
            with (folder / f"{role}.jsonl").open("a", encoding="utf-8") as out:
                out.write(line + "\n")


def ask(folder: Path, number: int) -> None:
    """Have every process that shares the folder take a census."""
    replace_text(folder / ASKED, str(number))


def taken(folder: Path, role: str, number: int) -> dict[str, Any] | None:
    """The census of this number; None if it is not there yet."""
    try:
        lines = (folder / f"{role}.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return last if last.get("number") == str(number) else None
