"""Runs workloads on the real engine and records every step: its batch, its time, and where it went.

A *cycle* is what a step takes: from the return of the engine's step before, or from the arrival
that ended a pause, to the return of this one. Tokens are stamped at these moments, so cycles add
up to every latency. A cycle has five parts: taking in requests that arrived (``admit_s``, with the
stamping of the tokens before), ``schedule()``, the model, ``update_from_output()``, and making
outputs for the client (``output_s``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sola_sched.bench.backends.base import SchedulerSpec, parse_scheduler
from sola_sched.bench.backends.engine import EngineBackend, EngineOptions
from sola_sched.cost.fit import kind_of
from sola_sched.errors import ConfigError
from sola_sched.simulator.steps.curves import Batch, batch_of
from sola_sched.workloads.workload import RequestSpec, Workload

#: Parts of a cycle, in order.
PARTS = ("admit_s", "schedule_s", "model_s", "update_s", "output_s")


@dataclass(frozen=True, slots=True)
class Cycle:
    """One measured step, seconds.

    Attributes:
        batch: What it computed.
        total_s: The whole cycle; the sum of the five parts.
    """

    batch: Batch
    admit_s: float
    schedule_s: float
    model_s: float
    update_s: float
    output_s: float

    @property
    def total_s(self) -> float:
        return self.admit_s + self.schedule_s + self.model_s + self.update_s + self.output_s

    @property
    def span_s(self) -> float:
        """From ``schedule()`` to the end of ``update_from_output()``: what a profile measures."""
        return self.schedule_s + self.model_s + self.update_s


class CycleRecorder:
    """Stands between a replay and an engine, and wraps the engine's scheduler.

    Only for synchronous scheduling, where a step is scheduled and updated in one call.

    Args:
        engine: vLLM's `LLMEngine` or what has its three methods.
        scheduler: Its live scheduler.
        clock: Seconds.

    Attributes:
        cycles: Steps that computed something, in order.
        num_empty: Steps that did not.
    """

    def __init__(self, engine: Any, scheduler: Any, clock: Callable[[], float]) -> None:
        self.cycles: list[Cycle] = []
        self.num_empty = 0
        self._step: tuple[float, float, Batch] | None = None
        self._update: tuple[float, float] | None = None
        self._has_requests = False
        self._engine = engine
        self._clock = clock
        self._last_end_s: float | None = None
        self._begin_s: float | None = None
        self.abort_request = engine.abort_request
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            start_s = clock()
            output = schedule(*args, **kwargs)
            end_s = clock()
            self._step = (start_s, end_s, batch_of(output, scheduler.requests))
            return output

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            start_s = clock()
            result = update(*args, **kwargs)
            self._update = (start_s, clock())
            self._has_requests = scheduler.has_unfinished_requests()
            return result

        scheduler.schedule = timed_schedule
        scheduler.update_from_output = timed_update

    def reset(self) -> None:
        """Forget all steps so far."""
        self.cycles = []
        self.num_empty = 0
        self._step = self._update = None
        self._has_requests = False

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """A pause ends when the first request is handed over."""
        self._begin()
        return self._engine.add_request(*args, **kwargs)

    def step(self) -> Any:
        """One step of the engine, recorded."""
        begin_s = self._begin()
        self._step = self._update = None
        outputs = self._engine.step()
        end_s = self._clock()
        step, update = self._timed()
        if step is not None and update is not None:
            self._record(begin_s, step, update, end_s)
        # While requests are left, the next cycle begins where this one ends.
        self._begin_s = end_s if self._has_requests else None
        return outputs

    def _timed(self) -> tuple[tuple[float, float, Batch] | None, tuple[float, float] | None]:
        """What the wrapped calls of this step left."""
        return self._step, self._update

    def _begin(self) -> float:
        if self._begin_s is None:
            self._begin_s = self._clock()
        return self._begin_s

    def _record(
        self,
        begin_s: float,
        step: tuple[float, float, Batch],
        update: tuple[float, float],
        end_s: float,
    ) -> None:
        scheduled_s, planned_s, batch = step
        if kind_of(batch.shape) is None:
            self.num_empty += 1
            return
        self.cycles.append(
            Cycle(
                batch,
                admit_s=scheduled_s - begin_s,
                schedule_s=planned_s - scheduled_s,
                model_s=update[0] - planned_s,
                update_s=update[1] - update[0],
                output_s=end_s - update[1],
            )
        )


@dataclass(frozen=True)
class EngineFacts:
    """What the simulator must know of an engine beside its step time."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    async_scheduling: bool


class RecordingBackend(EngineBackend):
    """In-process vLLM that keeps the cycles of its last run.

    Attributes:
        cycles: Steps after the warm-up.
        warmup: Requests that were served before.
        facts: About the engine of the last run.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.cycles: list[Cycle] = []
        self.warmup: list[RequestSpec] = []
        self.facts: EngineFacts | None = None

    def _watched(self, engine: Any, scheduler: Any, clock: Callable[[], float]) -> Any:
        self.facts = engine_facts(engine.vllm_config, scheduler)
        self._recorder = CycleRecorder(engine, scheduler, clock)
        return self._recorder

    def _warmup(self, workload: Workload) -> list[RequestSpec]:
        self.warmup = super()._warmup(workload)
        return self.warmup

    def _warmed_up(self) -> None:
        self._recorder.reset()
        self.cycles = self._recorder.cycles
        del self._recorder  # it would keep the engine


def scheduler_of(text: str) -> SchedulerSpec:
    """A scheduler of the command line that can be compared with virtual time.

    Raises:
        ConfigError: It is none of vLLM's or ours.
    """
    spec = parse_scheduler(text)
    if spec.kind not in ("stock", "sola"):
        raise ConfigError(f"'--schedulers' must be stock or sola here (got {spec.label!r}).")
    return spec


def engine_facts(config: Any, scheduler: Any) -> EngineFacts:
    """What a simulation must know, from vLLM's configuration and its live scheduler."""
    return EngineFacts(
        num_blocks=int(config.cache_config.num_gpu_blocks),
        block_size=int(scheduler.block_size),
        max_model_len=int(config.model_config.max_model_len),
        max_num_seqs=int(scheduler.max_num_running_reqs),
        max_num_batched_tokens=int(scheduler.max_num_scheduled_tokens),
        enable_prefix_caching=bool(config.cache_config.enable_prefix_caching),
        async_scheduling=bool(config.scheduler_config.async_scheduling),
    )
