"""Runs a workload on a vLLM engine inside this process, request by request in real time."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sola_sched.bench.backends.base import (
    SOLA_SCHEDULER,
    OnDone,
    RunOutcome,
    SchedulerSpec,
    slo_options,
)
from sola_sched.bench.backends.clock import Clock, make_clock
from sola_sched.bench.backends.environment import has_accelerator
from sola_sched.bench.backends.probe import SchedulerProbe
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import CONFIG_KEY
from sola_sched.errors import ConfigError
from sola_sched.workloads.datasets import Encode, ModelLimits
from sola_sched.workloads.workload import RequestSpec, Workload, random_token_ids

#: Below this share of a core the machine was busy with other work and times mean little.
MIN_CPU_SHARE = 0.9
_WARMUP_OUTPUT_TOKENS = 16
#: The reference batch: requests one at a time, so that every scheduler computes the same steps.
_NUM_REFERENCE, _REFERENCE_PROMPT, _REFERENCE_OUTPUT = 2, 192, 40


@dataclass(frozen=True)
class EngineOptions:
    """How to start vLLM.

    Attributes:
        model: Local folder or model name.
        model_id: Name in the results if it is not ``model``.
        tokenizer: Folder or name if it is not the model's own.
        is_random_model: The model came from ``sola_sched.bench.backends.model``: dummy weights.
        engine_args: vLLM ``EngineArgs`` by name, for every scheduler.
        num_warmups: Requests served before the clock starts.
        stall_timeout_s: A run ends when no token has come for this long while requests wait.
        seed: Of the warm-up prompts.
        clock: ``wall``, or ``cpu`` to leave out what other work on the machine takes.
        times_reference: Time an equal batch before and after each run, see ``RunOutcome``.
    """

    model: str
    model_id: str | None = None
    tokenizer: str | None = None
    is_random_model: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)
    num_warmups: int = 8
    stall_timeout_s: float = 120.0
    seed: int = 0
    clock: str = "wall"
    times_reference: bool = False


class EngineBackend:
    """In-process vLLM. ``run`` starts a fresh engine and ends it (about 2 s on a CPU)."""

    name = "engine"

    def __init__(self, options: EngineOptions) -> None:
        if options.clock == "cpu" and has_accelerator():
            raise ConfigError(
                "'--clock cpu' is for engines on CPUs (this machine has an accelerator, whose "
                "work it would not see); use --clock wall."
            )
        self.options = options
        self.model_id = options.model_id or options.model
        self.tokenizer_id = options.tokenizer or self.model_id

    @functools.cached_property
    def limits(self) -> ModelLimits:
        """Context length, vocabulary and tokenizer of the model, as vLLM sees them."""
        try:
            engine_args = self._engine_args(
                SchedulerSpec("stock", "stock"), SloTarget(), Workload(())
            )
            model_config = engine_args.create_engine_config().model_config
        except ConfigError:
            raise
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"vLLM must accept '--model {self.options.model}' and the engine arguments "
                f"({' '.join(str(error).split())[:400]}); correct them, or leave --model out for "
                "the built-in random model."
            ) from error
        return ModelLimits(
            max_model_len=int(model_config.max_model_len),
            vocab_size=int(model_config.get_vocab_size()),
            encode=_lazy_encode(self.options.tokenizer or self.options.model),
            prefer_text=not self.options.is_random_model,
        )

    def run(
        self,
        workload: Workload,
        scheduler: SchedulerSpec,
        slo: SloTarget,
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        """See ``Backend.run``. Scheduler cost is measured on the live scheduler object."""
        outcomes: list[RunOutcome] = []
        try:
            self.run_each(
                [workload], scheduler, slo, outcomes.append, max_concurrency=max_concurrency,
                on_done=on_done,
            )  # fmt: skip
        except KeyboardInterrupt:
            if not outcomes:
                raise
            outcomes[0].ends_all = True
        return outcomes[0]

    def run_each(
        self,
        workloads: Sequence[Workload],
        scheduler: SchedulerSpec,
        slo: SloTarget,
        on_run: Callable[[RunOutcome], None],
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> None:
        """Serve several workloads, one after the other, on one engine, as a server would.

        Only the prefix cache is emptied between them. What the scheduler has learned of step times
        and lengths stays.

        Args:
            workloads: At least one; the first says how the engine is set up and warmed up.
            scheduler: As in ``run``.
            slo: The targets of all.
            on_run: Called with each outcome as soon as it is there.
            max_concurrency: As in ``run``.
            on_done: As in ``run``.

        Raises:
            KeyboardInterrupt: The user has stopped it outside the requests of a run; of the runs
                that have ended ``on_run`` has been told.
        """
        # Not where the engine is a local variable: libraries keep errors of imports that failed,
        # and those the frames above them.
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            engine = LLMEngine.from_engine_args(self._engine_args(scheduler, slo, workloads[0]))
            try:
                self._serve(engine, workloads, scheduler, on_run, max_concurrency, on_done)
            finally:
                gc.unfreeze()
                try:
                    engine.apply_model(_let_go)
                finally:
                    engine.engine_core.shutdown()
                    del engine
        finally:
            # Only now does nothing hold the engine any more, so that its memory can be given back.
            _release_memory()

    def _serve(
        self,
        engine: Any,
        workloads: Sequence[Workload],
        scheduler: SchedulerSpec,
        on_run: Callable[[RunOutcome], None],
        max_concurrency: int | None,
        on_done: OnDone | None,
    ) -> None:
        from sola_sched.bench.backends.engine_replay import Replay

        live_scheduler = engine.engine_core.engine_core.scheduler
        probe = SchedulerProbe(live_scheduler)
        clock = make_clock(self.options.clock)
        driven = self._watched(engine, live_scheduler, clock.now_s)
        replay = Replay(driven, clock, self.options.stall_timeout_s)
        if clock.name != "wall" and scheduler.kind == "sola":
            live_scheduler.sola_clock = clock.now_s
            live_scheduler.sola_wall_clock = replay.wall_s
        warmup = replay.run(self._warmup(workloads[0]), max_concurrency)
        if warmup.interrupted:
            raise KeyboardInterrupt
        lost = [f"The warm-up was cut short: {note}" for note in warmup.notes]
        for workload in workloads:
            engine.reset_prefix_cache()
            gc.collect()
            gc.freeze()
            before_s = self._reference_s(replay, probe, 0)
            probe.reset()
            self._warmed_up()
            outcome = replay.run(workload.requests, max_concurrency, on_done)
            outcome.scheduler = probe.stats()
            outcome.notes += lost
            if probe.problem:
                outcome.notes.append(f"{probe.problem}.")
            self._note_cpu_share(outcome, replay, clock)
            interrupt: KeyboardInterrupt | None = None
            if before_s is not None and not outcome.interrupted:
                try:
                    after_s = self._reference_s(replay, probe, 1)
                except KeyboardInterrupt as error:  # the run itself is whole
                    after_s, interrupt = None, error
                outcome.reference_s = (before_s, before_s if after_s is None else after_s)
            on_run(outcome)
            if interrupt is not None:
                raise interrupt
            if outcome.interrupted:
                return

    @staticmethod
    def _note_cpu_share(outcome: RunOutcome, replay: Any, clock: Clock) -> None:
        """How much of a core an engine on a CPU had."""
        if has_accelerator():
            return
        outcome.cpu_share = replay.cpu_share
        if clock.name == "wall" and outcome.cpu_share < MIN_CPU_SHARE:
            outcome.notes.append(
                f"The machine was busy: the engine got {outcome.cpu_share:.0%} of a core "
                "(--clock cpu leaves other work out)."
            )

    def _watched(self, engine: Any, scheduler: Any, clock: Callable[[], float]) -> Any:
        """What the replay drives; for subclasses that look on."""
        return engine

    def _warmed_up(self) -> None:
        """Called before the requests of each workload, for subclasses that look on."""

    def _reference_s(self, replay: Any, probe: SchedulerProbe, number: int) -> float | None:
        """Seconds of the reference batch; None if it was not asked for.

        Raises:
            KeyboardInterrupt: The user has stopped it.
        """
        if not self.options.times_reference:
            return None
        length = min(_REFERENCE_PROMPT, self.limits.max_model_len - _REFERENCE_OUTPUT)
        rng = np.random.default_rng([self.options.seed, 9, number])
        requests = [
            RequestSpec(
                req_id=f"reference-{number}-{index}",
                prompt_token_ids=random_token_ids(rng, length, self.limits.vocab_size),
                output_tokens=_REFERENCE_OUTPUT,
            )
            for index in range(_NUM_REFERENCE)
        ]
        probe.reset()
        outcome = replay.run(requests, max_concurrency=1)
        if outcome.interrupted:
            raise KeyboardInterrupt
        return float(outcome.duration_s - probe.stats().cpu_s)

    def _engine_args(self, scheduler: SchedulerSpec, slo: SloTarget, workload: Workload) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        values: dict[str, Any] = {
            "model": self.options.model,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "seed": self.options.seed,
            **self.options.engine_args,
            **scheduler.engine_args,
        }
        if self.options.is_random_model:
            values["load_format"] = "dummy"
        if scheduler.kind == "sola":
            values["scheduler_cls"] = SOLA_SCHEDULER
            values["additional_config"] = {
                **values.get("additional_config", {}),
                CONFIG_KEY: slo_options(slo, workload) | scheduler.options,
            }
        try:
            return EngineArgs(**values)
        except TypeError as error:
            raise ConfigError(
                f"Engine arguments must be names vLLM knows ({error}); see `vllm serve --help`."
            ) from error

    def _warmup(self, workload: Workload) -> list[RequestSpec]:
        """Requests of the workload's shape with other tokens, so that no prefix is cached."""
        count = min(self.options.num_warmups, len(workload.requests))
        rng = np.random.default_rng([self.options.seed, 3])
        picks = np.linspace(0, len(workload.requests) - 1, count).astype(int)
        return [
            RequestSpec(
                req_id=f"warmup-{index}",
                prompt_token_ids=random_token_ids(
                    rng, len(workload.requests[pick].prompt_token_ids), self.limits.vocab_size
                ),
                output_tokens=min(_WARMUP_OUTPUT_TOKENS, workload.requests[pick].output_tokens),
            )
            for index, pick in enumerate(picks)
        ]


def _lazy_encode(name: str) -> Encode:
    @functools.cache
    def load() -> Callable[[str], list[int]]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
        return lambda text: tokenizer.encode(text)

    return lambda text: load()(text)


def _let_go(model: Any) -> None:
    """Take back torch.compile's hooks, which hold the weights for good.

    vLLM does so when its engine is collected, but by then `shutdown` has taken the model from it.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    for module in model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()


def _release_memory() -> None:
    gc.collect()
    import torch

    if torch.cuda.is_available():
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
