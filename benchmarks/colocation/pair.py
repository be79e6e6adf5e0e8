"""Two engines on one core, each in its own process, serve their own requests at the same time.

A core stands for a GPU: it computes one thing at a time, and whoever shares it is slowed down.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from sola_sched.bench.backends import environment, model
from sola_sched.bench.backends.base import SchedulerSpec, parse_scheduler
from sola_sched.bench.backends.engine import EngineBackend, EngineOptions
from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import RequestRecord
from sola_sched.workloads.workload import (
    RequestSpec,
    Workload,
    arrival_times,
    random_token_ids,
)

_START_S = 300.0


@dataclass(frozen=True)
class Service:
    """One engine and its traffic.

    Attributes:
        name: For tables.
        prompt_tokens, output_tokens: Means; single lengths are within half as much around them.
        rate_per_s: Mean arrivals.
        burstiness: Of the gaps, as in `Workload`; below 1 they come in bursts.
        slo: Its targets.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    rate_per_s: float
    burstiness: float
    slo: SloTarget

    def scaled(self, factor: float) -> Service:
        """The same where everything takes `factor` times as long."""
        slo = replace(
            self.slo,
            ttft_s=self.slo.ttft_s * factor,
            tpot_s=self.slo.tpot_s * factor,
            e2e_s=self.slo.e2e_s * factor,
        )
        return replace(self, rate_per_s=self.rate_per_s / factor, slo=slo)

    def workload(self, seconds: float, seed: int, vocab_size: int) -> Workload:
        """Its requests of about so many seconds."""
        rng = np.random.default_rng([seed, len(self.name), self.prompt_tokens])
        count = max(1, round(self.rate_per_s * seconds))
        arrivals = arrival_times(count, self.rate_per_s, self.burstiness, seed)
        arrivals = arrivals * (seconds / max(float(arrivals[-1]), 1e-9))
        return Workload(
            tuple(
                RequestSpec(
                    f"{self.name}-{number}",
                    random_token_ids(rng, _about(rng, self.prompt_tokens), vocab_size),
                    _about(rng, self.output_tokens),
                    float(arrival_s),
                )
                for number, arrival_s in enumerate(arrivals)
            ),
            self.rate_per_s,
            self.burstiness,
        )


def _about(rng: np.random.Generator, mean: int) -> int:
    return int(rng.integers(max(1, mean // 2), mean + mean // 2 + 1))


@dataclass(frozen=True)
class Order:
    """What an engine is told to serve: `scheduler` as in `python -m sola_sched.bench`."""

    service: Service
    scheduler: str
    turns: dict[str, Any] | None
    seconds: float
    seed: int

    @property
    def spec(self) -> SchedulerSpec:
        spec = parse_scheduler(self.scheduler)
        if self.turns is not None:
            spec.options["turns"] = self.turns
        return spec


class _PairedBackend(EngineBackend):
    """Starts its requests when the other engine is ready too, on the core that they share."""

    def __init__(self, options: EngineOptions, line: Connection, core: int) -> None:
        super().__init__(options)
        self._line, self._core = line, core

    def _watched(self, engine: Any, scheduler: Any, clock: Any) -> Any:
        self.scheduler = scheduler
        return engine

    def _warmed_up(self) -> None:
        os.sched_setaffinity(0, {self._core})  # the thread that computes
        self._line.send("ready")
        self._line.recv()


def _serve(shape: model.ModelShape, core: int, line: Connection) -> None:
    """One engine's process: runs orders until it is sent None."""
    cores = os.sched_getaffinity(0)
    environment.prepare(None, is_random=True)
    options = EngineOptions(
        str(model.cached_model(shape)),
        is_random_model=True,
        engine_args={"max_num_seqs": 64, "max_model_len": shape.max_model_len,
                     "max_num_batched_tokens": 2048, "enable_prefix_caching": False,
                     "kv_cache_memory_bytes": 256 << 20},
        times_reference=False,
    )  # fmt: skip
    backend = _PairedBackend(options, line, core)
    line.send("up")
    while (order := line.recv()) is not None:
        workload = order.service.workload(order.seconds, order.seed, shape.vocab_size)
        outcome = backend.run(workload, order.spec, order.service.slo)
        lease = getattr(backend.scheduler, "sola_lease", None)
        os.sched_setaffinity(0, cores)
        line.send((outcome.records, None if lease is None else lease.stats))


class Pair:
    """The processes of two services.

    Attributes:
        processes: In the order of the services.
        services: Their traffic; may be replaced between runs.
    """

    def __init__(self, services: Sequence[Service], shape: model.ModelShape, core: int) -> None:
        self.services = services
        context = multiprocessing.get_context("spawn")
        self._lines, self.processes = [], []
        for service in services:
            line, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(shape, core, theirs), name=service.name, daemon=True
            )
            process.start()
            theirs.close()
            self._lines.append(line)
            self.processes.append(process)
        self._all("up", range(len(self._lines)))

    def begin(self, scheduler: str, turns: Sequence[dict[str, Any] | None], seconds: float,
              seed: int, only: int | None = None) -> None:  # fmt: skip
        """Start engines and requests.

        Args:
            turns: The services' options of turns, one by one.
            only: The one service whose engine runs; all run without.
        """
        numbers = range(len(self._lines)) if only is None else [only]
        orders = [
            Order(service, scheduler, own, seconds, seed)
            for service, own in zip(self.services, turns, strict=True)
        ]
        for number in numbers:
            self._lines[number].send(orders[number])
        self._all("ready", numbers)
        self.started_s = time.monotonic()
        for number in numbers:
            self._lines[number].send("go")

    def result(self, number: int) -> tuple[list[RequestRecord], Any]:
        """Wait for the requests of one service, and what its lease counted."""
        records, stats = self._receive(number)
        return records, stats

    def close(self) -> None:
        """End the processes."""
        for line, process in zip(self._lines, self.processes, strict=True):
            if process.is_alive():
                line.send(None)
            process.join(60)
            if process.is_alive():
                process.kill()

    def _all(self, word: str, numbers: Iterable[int]) -> None:
        for number in numbers:
            got = self._receive(number)
            assert got == word, f"expected {word!r}, got {got!r}"

    def _receive(self, number: int) -> Any:
        if not self._lines[number].poll(_START_S):
            raise TimeoutError(f"{self.services[number].name} said nothing for {_START_S:g} s")
        return self._lines[number].recv()


@contextmanager
def pair(services: Sequence[Service], shape: model.ModelShape, core: int) -> Iterator[Pair]:
    """Two engines on the core."""
    engines = Pair(services, shape, core)
    try:
        yield engines
    finally:
        engines.close()


@contextmanager
def group() -> Iterator[str]:
    """A folder for turns."""
    folder = Path(tempfile.mkdtemp(prefix="sola-turns-"))
    try:
        yield str(folder / "group")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
