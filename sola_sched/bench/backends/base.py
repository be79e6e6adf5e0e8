"""What a benchmark runs against: one small interface for engine, server and simulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sola_sched.config.slo import (
    CLASS_KEY,
    E2E_KEY,
    NO_TARGET,
    TARGETS,
    TPOT_KEY,
    TTFT_KEY,
    SloTarget,
)
from sola_sched.core.metrics import RequestRecord
from sola_sched.errors import ConfigError
from sola_sched.workloads.workload import RequestSpec, Workload

SOLA_SCHEDULER = "sola_sched.Scheduler"
_ENGINE_PREFIX = "engine."
#: Options of our scheduler that are objects: ``swap.mode=raw``.
_OBJECTS = ("swap", "policy_options")
_PREDICTOR = "sim.predictor"
#: Other policies to compare with, in virtual time only: ``sola_sched.simulator.baselines.rules``.
BASELINES = ("prefill-first", "decode-first", "sjf", "sjf-oracle", "spf", "hrrn", "reject")


@dataclass(frozen=True)
class SchedulerSpec:
    """One scheduler under test, as named on the command line.

    Attributes:
        label: Shown in tables and file names, e.g. ``stock:512``.
        kind: ``stock`` (vLLM's own), ``sola`` (ours), one of ``BASELINES``, or ``server``
            (whatever a URL runs).
        engine_args: Overrides of vLLM engine arguments.
        options: Options of ``sola_sched.Scheduler``.
        predictor: Of output lengths, in virtual time only; see ``sim_predictors``.
    """

    label: str
    kind: str
    engine_args: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    predictor: str = "none"

    @property
    def max_num_batched_tokens(self) -> int | None:
        """The token budget named by the spec, or None for the engine's default."""
        return self.engine_args.get("max_num_batched_tokens")


def parse_scheduler(text: str) -> SchedulerSpec:
    """Parse ``stock``, ``stock:512``, ``sola`` or ``sola:policy=paper,engine.max_num_seqs=64``.

    A bare number sets ``max_num_batched_tokens``; ``engine.<name>=<value>`` any engine argument;
    other ``<name>=<value>`` pairs are options of our scheduler, but for ``sim.predictor=<name>``,
    which in virtual time predicts output lengths for it. ``swap.<name>=<value>`` sets its KV
    swapping (in virtual time it swaps only with a ``swap.mode``), ``policy_options.<name>=<value>``
    what a policy of others reads. A baseline's name stands where ``stock`` does.

    Raises:
        ConfigError: The text is none of these.
    """
    kind, _, rest = text.partition(":")
    engine_args: dict[str, Any] = {}
    options: dict[str, Any] = {}
    predictor = "none"
    valid = kind in ("stock", "sola", *BASELINES)
    for item in filter(None, rest.split(",")):
        name, equals, value = item.partition("=")
        if not equals and item.isdecimal() and int(item) > 0:
            engine_args["max_num_batched_tokens"] = int(item)
        elif equals and name.startswith(_ENGINE_PREFIX):
            engine_args[name.removeprefix(_ENGINE_PREFIX)] = _scalar(value)
        elif equals and kind == "sola" and name == _PREDICTOR:
            predictor = value
        elif equals and kind == "sola" and name.partition(".")[0] in _OBJECTS and "." in name:
            outer, _, inner = name.partition(".")
            options.setdefault(outer, {})[inner] = _scalar(value)
        elif equals and kind == "sola":
            options[name] = _scalar(value)
        else:
            valid = False
    if not valid:
        raise ConfigError(
            "'--schedulers' takes stock, stock:<max_num_batched_tokens>, sola, "
            "sola:<option>=<value>,... and engine.<argument>=<value>, with --backend sim also "
            f"{', '.join(BASELINES)} (got {text!r})."
        )
    return SchedulerSpec(text, kind, engine_args, options, predictor)


def _scalar(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


@dataclass
class SchedulerStats:
    """Cost and activity of the scheduler during a run.

    Attributes:
        num_steps: Engine steps that ran the model.
        cpu_s: CPU time spent in ``schedule`` and ``update_from_output`` in total, seconds.
        step_cpu_s: The same for each step.
        num_preemptions: Running requests sent back to wait, memory being short or by choice.
        max_num_running: Most requests in one step.
        mean_num_running: Mean number of requests in a step.
        cost_model_error: Mean of abs(predicted / measured - 1) of step times, of a scheduler that
            predicts them; NaN for others.
    """

    num_steps: int = 0
    cpu_s: float = 0.0
    step_cpu_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    max_num_running: int = 0
    mean_num_running: float = math.nan
    cost_model_error: float = math.nan


@dataclass
class RunOutcome:
    """Result of one run.

    Attributes:
        records: One per request of the workload, in its order.
        duration_s: From the start to the last token (or to the end of an interrupted run).
        scheduler: None where the backend cannot see it (a remote server).
        notes: Anything a reader of the numbers must know, e.g. an early end.
        interrupted: The user stopped the run.
        ends_all: The user stopped what comes after the run, which itself is whole.
        clock: What the times were taken by: ``wall``, ``cpu`` (see ``clock.CpuClock``) or that
            of a simulation.
        cpu_share: Of a run on CPUs: CPU time over wall time while the engine worked, 1.0 for an
            undisturbed single-threaded engine; None where it says nothing.
        reference_s: What an equal small batch took right before and right after, without the
            scheduler's own time; empty where it was not asked for.
    """

    records: list[RequestRecord]
    duration_s: float
    scheduler: SchedulerStats | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    ends_all: bool = False
    clock: str = "wall"
    cpu_share: float | None = None
    reference_s: tuple[float, ...] = ()


#: Called when a request ends, with its record.
OnDone = Callable[[RequestRecord], None]


class Backend(Protocol):
    """Runs a workload under a scheduler; each call starts from a fresh, warm state."""

    name: str
    model_id: str
    tokenizer_id: str

    def run(
        self,
        workload: Workload,
        scheduler: SchedulerSpec,
        slo: SloTarget,
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        """Replay ``workload`` and return what happened to each of its requests.

        Args:
            workload: Requests with arrival times.
            scheduler: Scheduler to use, with its options.
            slo: Targets of requests that have none of their own.
            max_concurrency: Most requests in flight; further ones wait at the client, and
                their TTFT still runs from arrival. None is no limit.
            on_done: Called once per request, in order of completion.
        """
        ...


def record_of(request: RequestSpec) -> RequestRecord:
    """The record of a request that has not been sent."""
    return RequestRecord(
        req_id=request.req_id,
        arrival_s=request.arrival_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        slo=request.slo,
        slo_class=request.slo_class,
    )


def extra_args(slo: SloTarget | None, slo_class: str | None = None) -> dict[str, Any] | None:
    """A request's own targets as the flat per-request keys our scheduler reads; None if none.

    Args:
        slo: The targets.
        slo_class: Name of its class, where the scheduler has been given it; see `slo_options`.
    """
    if slo is None:
        return None
    targets = {TTFT_KEY: slo.ttft_s, TPOT_KEY: slo.tpot_s, E2E_KEY: slo.e2e_s}
    keys: dict[str, Any] = {} if slo_class is None else {CLASS_KEY: slo_class}
    return keys | {k: 1e3 * v if math.isfinite(v) else NO_TARGET for k, v in targets.items()}


def slo_options(slo: SloTarget, workload: Workload) -> dict[str, Any]:
    """Options of our scheduler: the targets by default, and the classes of a workload.

    Args:
        slo: Of requests that have none of their own.
        workload: A class with targets gets those of its first request; each other has its own.
    """
    first = {r.slo_class: r.slo for r in reversed(workload.requests) if r.slo and r.slo_class}
    classes = {name: _plain(target) | {"weight": target.weight} for name, target in first.items()}
    return _plain(slo) | ({"classes": classes} if classes else {})


def _plain(slo: SloTarget) -> dict[str, float | None]:
    """The targets as options: null for none."""
    targets = {name: getattr(slo, name) for name in TARGETS}
    return {name: value if math.isfinite(value) else None for name, value in targets.items()}
