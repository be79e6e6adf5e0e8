"""What swapping takes of a step in which nothing is swapped, and telemetry of any step.

Beside stock vLLM it cannot be told: runs differ by more. Here the engine runs in this process, and
a clock adds up what vLLM and the scheduler spend in methods of the connector and of the
scheduler's part for swapping, another one what it spends in those of telemetry. Half a microsecond
of each call is the clock's own.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from serving.engine_alone import ENVIRONMENT
from serving.process import prompt_of

CLIENTS = (1, 8)
_NUM_FIRST = 50  # steps that are left out


class Clock:
    """Adds up the time in the outermost of the methods that it watches.

    Attributes:
        spent_s, num_calls: Since they were set.
    """

    def __init__(self) -> None:
        self.spent_s, self.num_calls = 0.0, 0
        self._is_inside = False

    @contextmanager
    def watching(self, *classes: type[Any]) -> Iterator[None]:
        """All methods that these classes define themselves."""
        with ExitStack() as stack:
            for cls in classes:
                for name, method in list(vars(cls).items()):
                    if callable(method) and not name.startswith("__"):
                        stack.enter_context(mock.patch.object(cls, name, self._timed(method)))
            yield

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return method(*args, **kwargs)
            self._is_inside = True
            start_s = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent_s += time.perf_counter() - start_s
                self.num_calls += 1
                self._is_inside = False

        return timed


class Clocks(NamedTuple):
    """Of the parts of a step."""

    swapping: Clock
    telemetry: Clock


def measure(engine: Any, clocks: Clocks, num_clients: int, num_tokens: int, seed: int) -> Row:
    """Medians over the steps of requests that decode: of the step, and of the parts of it."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    for number in range(num_clients):
        name = f"{num_clients}-{seed}-{number}"
        engine.add_request(name, {"prompt_token_ids": prompt_of(rng)}, params)
    steps: list[tuple[float, ...]] = []
    while engine.has_unfinished_requests():
        for clock in clocks:
            clock.spent_s, clock.num_calls = 0.0, 0
        start_s = time.perf_counter()
        engine.step()
        step_s = time.perf_counter() - start_s
        parts = ((clock.spent_s, clock.num_calls) for clock in clocks)
        steps.append((step_s, *itertools.chain.from_iterable(parts)))
    step_s, swapping_s, num_calls, telemetry_s, num_telemetry_calls = (
        statistics.median(values) for values in zip(*steps[_NUM_FIRST:], strict=True)
    )
    return {
        "clients": num_clients, "step_ms": round(1e3 * step_s, 4),
        "swapping_us": round(1e6 * swapping_s, 2), "num_calls": num_calls,
        "telemetry_us": round(1e6 * telemetry_s, 2), "num_telemetry_calls": num_telemetry_calls,
    }  # fmt: skip


@contextmanager
def watched_engine(arguments: Mapping[str, Any]) -> Iterator[tuple[Any, Clocks]]:
    """vLLM's engine in this process with default options, and the clocks."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from sola_sched.kv_swap.connector import SolaKVSwapConnector
    from sola_sched.reports.telemetry import Telemetry
    from sola_sched.vllm_adapter.reports.reporting import Reporting
    from sola_sched.vllm_adapter.reports.telemetry_sender import TelemetrySender
    from sola_sched.vllm_adapter.swap.swapping import Swapping

    clocks = Clocks(Clock(), Clock())
    with (
        clocks.swapping.watching(SolaKVSwapConnector, Swapping),
        clocks.telemetry.watching(Reporting, Telemetry, TelemetrySender),
    ):
        engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments, scheduler_cls="sola_sched.Scheduler")
        )
        try:
            yield engine, clocks
        finally:
            engine.engine_core.shutdown()


def unused_swapping(setup: Setup) -> Outcome:
    """Measure, or take the rows that are stored; the table is of the last run."""
    rows = setup.last_run(_measured(setup))
    return Outcome(rows, table(rows))


def _measured(setup: Setup) -> Iterator[Row]:
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    for name, value in (ENVIRONMENT | quiet).items():
        os.environ.setdefault(name, value)
    from sola_sched.bench.backends.model import TINY_SHAPE, cached_model

    run = int(time.time())
    arguments = {"model": str(cached_model(TINY_SHAPE)), "load_format": "dummy"}
    with watched_engine(arguments) as (engine, clocks):
        for seed in setup.seeds:
            for num_clients in CLIENTS:
                num_tokens = setup.options["output_len"]
                row = measure(engine, clocks, num_clients, num_tokens, seed)
                yield {"run": run, "seed": seed, **row}


def table(rows: list[Row]) -> str:
    """A line for each number of clients; means over seeds of the medians over steps."""
    lines = []
    for num_clients in CLIENTS:
        own = [row for row in rows if row["clients"] == num_clients]
        step_ms = statistics.mean(row["step_ms"] for row in own)
        cells = [str(num_clients), f"{step_ms:.2f}"]
        for part, calls in (("swapping_us", "num_calls"), ("telemetry_us", "num_telemetry_calls")):
            part_us, num_calls = (statistics.mean(row[key] for row in own) for key in (part, calls))
            cells += [f"{part_us:.0f}", f"{1e-3 * part_us / step_ms:.1%}", f"{num_calls:.0f}"]
        lines.append(cells)
    first = rows[0]
    return (
        f"vLLM {first['vllm']}, {first['cpu']}, {first['num_cores']} cores. Medians over steps, "
        "means over seeds.\n\n"
        + markdown(
            (
                "clients",
                "step, ms",
                "swapping, us",
                "share",
                "calls",
                "telemetry, us",
                "share",
                "calls",
            ),
            lines,
            num_left=0,
        )
    )
