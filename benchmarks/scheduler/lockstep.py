"""Engines that take steps in turn, each in a process of its own, all on one core.

In turn, so that noise of the machine meets all of them. In processes of their own, as engines run:
the interpreter adapts vLLM's code to the class that runs it, and two classes in one process undo
that for each other at every turn: both were slower by it, ours by more. On one core, so that each
finds the processor's caches as another one has left them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from scheduler.closed_loop import ClosedLoop, Load

_GC_STEPS = 200


@dataclass(frozen=True)
class Measured:
    """What a `ClosedLoop` has measured; the attributes are its own."""

    times_ns: list[tuple[int, int]]
    num_running: list[int]
    parts_ns: list[dict[str, int]]


def run(
    scheduler_classes: Sequence[type[Any]],
    load: Load,
    *,
    num_steps: int,
    num_warmups: int,
    seed: int,
) -> list[Measured]:
    """Step an engine of each class in turn; what was measured after `num_warmups` steps of each.

    Which one goes first changes from step to step. Python's garbage is collected between steps.
    """
    with _engines(scheduler_classes, load, seed) as engines:
        for engine in engines:
            _ask(engine, num_warmups)
            _ask(engine, 0)
        for step in range(num_steps):
            for engine in engines if step % 2 else engines[::-1]:
                _ask(engine, 1)
        return [_ask(engine, -1) for engine in engines]


@contextmanager
def _engines(
    scheduler_classes: Sequence[type[Any]], load: Load, seed: int
) -> Iterator[list[Connection]]:
    """Ends of pipes to engines that wait for a number of steps."""
    context = multiprocessing.get_context("fork")
    engines, processes = [], []
    for scheduler_cls in scheduler_classes:
        here, there = context.Pipe()
        process = context.Process(
            target=_serve, args=(there, scheduler_cls, load, seed), daemon=True
        )
        process.start()
        there.close()
        engines.append(here)
        processes.append(process)
    try:
        yield engines
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _ask(engine: Connection, num_steps: int) -> Any:
    engine.send(num_steps)
    return engine.recv()


def _serve(pipe: Connection, scheduler_cls: type[Any], load: Load, seed: int) -> None:
    """Take so many steps whenever a number comes; 0 forgets them, -1 asks for what was measured."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    engine, num_done = ClosedLoop(scheduler_cls, load, seed), 0
    gc.collect()
    gc.disable()
    while True:
        num_steps = pipe.recv()
        for _ in range(num_steps):
            engine.advance()
        if num_steps == 0:
            engine.forget()
        num_done += max(0, num_steps)
        pipe.send(
            Measured(engine.times_ns, engine.num_running, engine.parts_ns)
            if num_steps < 0
            else None
        )
        if num_steps == 1 and num_done % _GC_STEPS == 0:
            gc.collect()
