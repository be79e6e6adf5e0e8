"""The recorded requests as a timeline that https://ui.perfetto.dev and Chrome's tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sola_sched.explain.source import Window
from sola_sched.reports.reasons import verdict

Fate = Mapping[str, Any]
_US = 1e6
#: What is told of a request beside its times.
_TOLD = ("num_prompt", "num_output", "num_chunks", "num_held", "num_preemptions")


def write(requests: Sequence[Fate], path: Path) -> Path:
    """Write the timeline: a process for each class, in it as many rows as overlap; returns `path`.

    Args:
        requests: In any order.
    """
    path.write_text(json.dumps({"traceEvents": list(events(requests))}), encoding="utf-8")
    return path


def events(requests: Sequence[Fate]) -> Iterator[dict[str, Any]]:
    """Events of the trace format, times of each engine from its first arrival on."""
    by_engine = Window(requests, None).by_engine
    first = 0
    for rank, own in by_engine.items():
        name = f", engine {rank}" if len(by_engine) > 1 else ""
        yield from _of_engine(own.requests, name, first)
        first += len({fate["slo_class"] for fate in own.requests})


def _of_engine(requests: Sequence[Fate], engine: str, first: int) -> Iterator[dict[str, Any]]:
    """Those of one engine, its processes from `first` on."""
    ordered = sorted(requests, key=lambda fate: float(fate["arrival_s"]))
    begin_s = ordered[0]["arrival_s"]
    classes = list(dict.fromkeys(fate["slo_class"] for fate in ordered))
    for place, name in enumerate(classes, first):
        named = {"name": f"class {name}{engine}"}
        yield {"ph": "M", "name": "process_name", "pid": place, "args": named}
    free_s: dict[int, list[float]] = {first + place: [] for place in range(len(classes))}
    for fate in ordered:
        process = first + classes.index(fate["slo_class"])
        row = _row(free_s[process], fate)
        for name, from_s, to_s, args in _spans(fate):
            yield {
                "ph": "X", "name": name, "pid": process, "tid": row,
                "ts": round(_US * (from_s - begin_s)), "dur": round(_US * (to_s - from_s)),
                "args": args,
            }  # fmt: skip
        if fate["lost_s"] is not None:
            yield {"ph": "i", "s": "t", "name": "given up", "pid": process, "tid": row,
                   "ts": round(_US * (fate["lost_s"] - begin_s))}  # fmt: skip
    yield from _counts(ordered, begin_s, first)


def _row(free_s: list[float], fate: Fate) -> int:
    """The first row that is free when it arrives."""
    for row, until_s in enumerate(free_s):
        if until_s <= fate["arrival_s"]:
            free_s[row] = fate["ended_s"]
            return row
    free_s.append(fate["ended_s"])
    return len(free_s) - 1


def _spans(fate: Fate) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """The request, and inside it its wait, its prompt and its decodes."""
    end_s = float(fate["ended_s"])
    told = {name: fate[name] for name in _TOLD} | {"verdict": verdict(fate)}
    yield fate["request_id"], fate["arrival_s"], end_s, told
    ends = [fate[name] for name in ("started_s", "first_token_s")]
    marks = [fate["arrival_s"], *(end_s if at is None else at for at in ends), end_s]
    for name, from_s, to_s in zip(("waits", "prompt", "decodes"), marks, marks[1:], strict=False):
        if to_s > from_s:
            yield name, from_s, to_s, {}


def _counts(requests: Sequence[Fate], begin_s: float, process: int) -> Iterator[dict[str, Any]]:
    """How many wait and how many have a slot, whenever that changes."""
    changes: list[tuple[float, int, int]] = []
    for fate in requests:
        started_s = fate["started_s"]
        changes.append((fate["arrival_s"], 1, 0))
        if started_s is None:
            changes.append((fate["ended_s"], -1, 0))
        else:
            changes += [(started_s, -1, 1), (fate["ended_s"], 0, -1)]
    waiting = running = 0
    for at_s, more_wait, more_run in sorted(changes):
        waiting, running = waiting + more_wait, running + more_run
        yield {"ph": "C", "name": "requests", "pid": process,
               "ts": round(_US * (at_s - begin_s)),
               "args": {"waiting": waiting, "running": running}}  # fmt: skip
