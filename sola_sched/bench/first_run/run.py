"""What ``python -m sola_sched.bench`` does without arguments: a first, convincing comparison."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sola_sched.bench import plan
from sola_sched.bench.args import build_parser
from sola_sched.bench.backends.base import Backend
from sola_sched.bench.backends.environment import has_accelerator, prepare
from sola_sched.bench.first_run import virtual as first_run_virtual
from sola_sched.bench.first_run.engine import FirstRun, Interrupted
from sola_sched.workloads.datasets import DatasetOptions, ModelLimits, build
from sola_sched.workloads.workload import Workload

if TYPE_CHECKING:
    from sola_sched.bench.backends.engine import EngineBackend

EXIT_INTERRUPTED = 130
_POOL_SIZE = 400

Say = Callable[[str], None]


def run(directory: Path = Path("bench-results"), say: Say | None = None) -> int:
    """Compare in virtual time, then on the engine of this machine; return the exit code."""
    say = say or _print
    begun_s = time.monotonic()
    first_run_virtual.run(directory, say)
    say(f"   Took {time.monotonic() - begun_s:.0f} s.\n")
    try:
        backend, pool = _engine(say)
        verdict = FirstRun(backend, pool, directory, say).run()
    except (Interrupted, KeyboardInterrupt):
        say("Interrupted; the runs before are saved.")
        return EXIT_INTERRUPTED
    say("\nVerdict of the runs on this machine (95 % intervals)")
    for sentence in verdict:
        say(f"- {sentence}")
    say(f"Results in {directory}. Took {time.monotonic() - begun_s:.0f} s.")
    return 0


def random_engine(clock: str) -> tuple[EngineBackend, ModelLimits]:
    """vLLM in this process with the random model; times an equal batch beside each run.

    Args:
        clock: ``wall`` or ``cpu``, see `EngineOptions`.
    """
    from sola_sched.bench.backends.engine import EngineBackend

    prepare(None, is_random=True)
    made, limits = plan._backend(build_parser().parse_args(["--clock", clock]), lambda line: None)
    assert isinstance(made, EngineBackend)
    return EngineBackend(dataclasses.replace(made.options, times_reference=True)), limits


def _engine(say: Say) -> tuple[Backend, Workload]:
    """The engine and requests that fit it."""
    clock = "wall" if has_accelerator() else "cpu"
    say(
        "2. vLLM's engine in this process: a random 62 M parameter Llama"
        + (
            "."
            if clock == "wall"
            else ", one core. Times are the core's time on the engine, so that other work "
            "on the machine counts as little as possible (--clock cpu)."
        )
    )
    backend, limits = random_engine(clock)
    return backend, build(DatasetOptions(num_prompts=_POOL_SIZE), limits)


def _print(line: str) -> None:
    print(line, flush=True)
