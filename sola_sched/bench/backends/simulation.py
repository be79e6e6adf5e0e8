"""Runs a workload in virtual time: the real scheduler, step times from a profile, no model."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sola_sched.bench.backends.base import (
    BASELINES,
    OnDone,
    RunOutcome,
    SchedulerSpec,
    slo_options,
)
from sola_sched.bench.backends.predictors import Predict, make_predictor
from sola_sched.bench.backends.probe import SchedulerProbe
from sola_sched.bench.backends.virtual_replay import VirtualReplay
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import CONFIG_KEY
from sola_sched.errors import ConfigError
from sola_sched.simulator.steps.profile import StepProfile
from sola_sched.workloads.datasets import Encode, ModelLimits
from sola_sched.workloads.workload import RequestSpec, Workload, random_token_ids

if TYPE_CHECKING:
    from sola_sched.simulator.engine import VirtualEngine

_WARMUP_OUTPUT_TOKENS = 16
_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "async_scheduling": True,
    "enable_prefix_caching": False,
    "scheduling_policy": "fcfs",
}
_COUNTS = ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
           "num_gpu_blocks_override")  # fmt: skip
_FLAGS = ("async_scheduling", "enable_prefix_caching")
#: What the scheduler's own calls take: nothing, what was measured beforehand, or what they take.
SCHEDULING_TIMES = ("none", "model", "measured")
#: vLLM engine arguments that mean something without a device.
ENGINE_ARGS = (*_COUNTS, *_FLAGS, "additional_config", "scheduler_cls", "scheduling_policy")


@dataclass(frozen=True)
class SimOptions:
    """What is simulated.

    Attributes:
        profile: Step times and memory.
        engine_args: Those of ``ENGINE_ARGS`` that differ from the defaults, for every scheduler.
        encode: Text to token ids, for data sets without token counts.
        num_warmups: Requests served before the clock of a run starts.
        stall_timeout_s: A run ends when no token has come for this much virtual time while
            requests wait.
        seed: Of the warm-up prompts.
        scheduling_time: One of ``SCHEDULING_TIMES``, for every scheduler; ``model`` charges what
            `benchmarks/scheduler` has measured of vLLM's own and of ours.
    """

    profile: StepProfile
    engine_args: dict[str, Any] = field(default_factory=dict)
    encode: Encode | None = None
    num_warmups: int = 8
    stall_timeout_s: float = 120.0
    seed: int = 0
    scheduling_time: str = "none"


class SimBackend:
    """Virtual time. Equal arguments give equal results, the scheduler's CPU time excepted.

    vLLM's scheduler, KV cache manager and requests are the real ones; a step takes what the
    profile says, and scheduling what the options say (its CPU time is measured beside it).
    The scheduler never sees how long an output will be: every request has the largest output of
    the run as its limit, as far as the context allows, and ends with an end-of-text token.
    """

    name = "sim"

    def __init__(self, options: SimOptions) -> None:
        self.options = options
        self.model_id = options.profile.name
        self.tokenizer_id = options.profile.name
        self._checked(options.engine_args)
        if options.scheduling_time not in SCHEDULING_TIMES:
            raise ConfigError(
                f"'scheduling_time' must be one of {', '.join(SCHEDULING_TIMES)} "
                f"(got {options.scheduling_time!r})."
            )

    @property
    def limits(self) -> ModelLimits:
        """Context length and vocabulary; token counts of a data set are preferred to its text."""
        return ModelLimits(
            max_model_len=self._checked(self.options.engine_args)["max_model_len"],
            vocab_size=self.options.profile.vocab_size,
            encode=self.options.encode,
            prefer_text=False,
        )

    @property
    def max_num_seqs(self) -> int:
        """Most requests in one step."""
        return int(self._checked(self.options.engine_args)["max_num_seqs"])

    def check(self, scheduler: SchedulerSpec) -> None:
        """Find now what would end a run with this scheduler at its start.

        Raises:
            ConfigError: An engine argument is wrong, or the engine cannot be built.
        """
        make_predictor(scheduler.predictor)
        if scheduler.options.get("predictor", "histogram") != "histogram":
            raise ConfigError(
                "'predictor' must be 'histogram' in virtual time, where requests have no text "
                f"(got {scheduler.options['predictor']!r}); use sim.predictor=recorded:FILE."
            )
        self._engine(scheduler, SloTarget(), Workload(()))

    def run(
        self,
        workload: Workload,
        scheduler: SchedulerSpec,
        slo: SloTarget,
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        """See ``Backend.run``; all times are virtual."""
        from sola_sched.simulator.engine import SchedulerStallError

        engine = self._engine(scheduler, slo, workload)
        predict = make_predictor(scheduler.predictor, self.options.seed)
        if predict is not None:
            _deliver(predict, workload, engine.scheduler)
        probe = SchedulerProbe(engine.scheduler)
        # The oracle is told each length; that is the point of it.
        replay = VirtualReplay(engine, max_concurrency, on_done, scheduler.kind == "sjf-oracle")
        warmup = replay.start(self._warmup(workload), on_done=None)
        try:
            engine.run(on_finish=replay.ended)
        except SchedulerStallError as error:
            raise ConfigError(
                f"'{scheduler.label}' must serve the {len(warmup)} requests of the warm-up "
                f"({error}); correct it, or measure without ('--num-warmups 0')."
            ) from error
        probe.reset()
        records = replay.start(workload.requests, on_done=on_done)
        outcome = RunOutcome(records=records, duration_s=0.0, clock="virtual")
        try:
            engine.run(on_finish=replay.ended)
        except KeyboardInterrupt:
            outcome.interrupted = True
            replay.give_up("interrupted by the user", outcome)
        except SchedulerStallError as error:
            replay.give_up(str(error), outcome)
        outcome.duration_s = replay.now_s
        if probe.problem:
            raise RuntimeError(f"{scheduler.label}: {probe.problem}.")
        outcome.scheduler = probe.stats()
        return outcome

    def warm_engine(
        self, scheduler: SchedulerSpec, slo: SloTarget, workload: Workload
    ) -> VirtualEngine:
        """An engine that has served its warm-up requests; its clock is past them."""
        engine = self._engine(scheduler, slo, workload)
        replay = VirtualReplay(engine, None, None, tells_lengths=False)
        replay.start(self._warmup(workload), on_done=None)
        engine.run(on_finish=replay.ended)
        return engine

    def _engine(
        self, scheduler: SchedulerSpec, slo: SloTarget, workload: Workload
    ) -> VirtualEngine:
        from sola_sched.simulator.engine import VirtualEngine

        profile = self.options.profile
        swap_link = _swap_link(profile, scheduler)
        args = self._checked({**self.options.engine_args, **scheduler.engine_args})
        additional = dict(args.get("additional_config") or {})
        if scheduler.kind != "stock":
            additional[CONFIG_KEY] = slo_options(slo, workload) | scheduler.options
        try:
            return VirtualEngine(
                _scheduler_cls(scheduler, args),
                model=profile.model_config(),
                num_blocks=args["num_gpu_blocks_override"],
                additional_config=additional,
                step_time=profile.step_time,
                stall_limit_s=self.options.stall_timeout_s,
                scheduling_time=_scheduling_time(self.options.scheduling_time, scheduler),
                swap_link=swap_link,
                **{name: args[name] for name in ("block_size", "max_model_len", *_DEFAULTS)},
            )
        except ValueError as error:
            raise ConfigError(
                f"'{scheduler.label}' cannot run on profile {profile.name} "
                f"({' '.join(str(error).split())[:400]}); correct the engine arguments."
            ) from error

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Engine arguments with the profile's values and the defaults filled in.

        Raises:
            ConfigError: One is unknown, of a wrong type, or missing in a measured profile.
        """
        profile = self.options.profile
        for name, value in given.items():
            _check(name, value)
        measured = {
            "async_scheduling": profile.async_scheduling,
            "max_num_batched_tokens": profile.max_num_batched_tokens,
            "max_model_len": profile.max_model_len,
            "num_gpu_blocks_override": profile.num_blocks,
            "block_size": profile.block_size,
        }
        args = _DEFAULTS | {k: v for k, v in measured.items() if v is not None} | dict(given)
        for name, flag in (
            ("max_model_len", "--max-model-len N"),
            ("num_gpu_blocks_override", "--engine-args '{\"num_gpu_blocks_override\": N}'"),
        ):
            if name not in args:
                raise ConfigError(
                    f"'{name}' must be given for profile {profile.name}, which was measured and "
                    f"does not hold it (got none); pass {flag}."
                )
        if profile.max_model_len is not None and args["max_model_len"] > profile.max_model_len:
            raise ConfigError(
                f"'--max-model-len' must be <= {profile.max_model_len} for profile "
                f"{profile.name} (got {args['max_model_len']}); lower it."
            )
        if args["block_size"] != profile.block_size and "num_gpu_blocks_override" not in given:
            # The same memory in blocks of another size.
            args["num_gpu_blocks_override"] = max(
                1, args["num_gpu_blocks_override"] * profile.block_size // args["block_size"]
            )
        return args

    def _warmup(self, workload: Workload) -> list[RequestSpec]:
        """Requests of the workload's shape with other tokens, so that no prefix is cached."""
        count = min(self.options.num_warmups, len(workload.requests))
        rng = np.random.default_rng([self.options.seed, 3])
        picks = np.linspace(0, len(workload.requests) - 1, count).astype(int)
        vocab_size = self.options.profile.vocab_size
        return [
            RequestSpec(
                req_id=f"warmup-{index}",
                prompt_token_ids=random_token_ids(
                    rng, len(workload.requests[pick].prompt_token_ids), vocab_size
                ),
                output_tokens=min(_WARMUP_OUTPUT_TOKENS, workload.requests[pick].output_tokens),
            )
            for index, pick in enumerate(picks)
        ]


def _scheduling_time(name: str, scheduler: SchedulerSpec) -> Any:
    """What the engine charges for a scheduler's own calls."""
    from sola_sched.simulator import scheduling_time

    if name == "model":
        is_ours = scheduler.kind == "sola"
        return scheduling_time.SOLA if is_ours else scheduling_time.STOCK
    return scheduling_time.MEASURED if name == "measured" else None


def _swap_link(profile: StepProfile, scheduler: SchedulerSpec) -> Any:
    """The link of a scheduler that was told to swap; others compute preempted requests again."""
    swap = scheduler.options.get("swap") or {}
    if swap.get("mode", "off") == "off":
        return None
    if profile.kv_bytes_per_token is None or profile.pcie_bytes_per_s is None:
        raise ConfigError(
            f"'swap.mode' must be off with profile {profile.name}, which does not tell the size "
            f"of the KV cache or the speed of the link (got {swap['mode']!r})."
        )
    from sola_sched.simulator.swap_link import LinkSpeed

    return LinkSpeed(profile.kv_bytes_per_token, profile.pcie_bytes_per_s)


def _deliver(predict: Predict, workload: Workload, scheduler: Any) -> None:
    """Have each request's prediction arrive with the request, warm-up requests left out."""
    requests = {request.req_id: request for request in workload.requests}
    add_request, monitor = scheduler.add_request, scheduler.sola_monitor

    def add(request: Any) -> None:
        add_request(request)
        spec = requests.get(request.request_id)
        prediction = None if spec is None else predict(spec)
        if prediction is not None:
            monitor.predicted(request.request_id, prediction)

    scheduler.add_request = add


def _scheduler_cls(scheduler: SchedulerSpec, args: Mapping[str, Any]) -> type[Any]:
    if scheduler.kind == "sola":
        from sola_sched.vllm_adapter.scheduler import Scheduler

        return Scheduler
    if scheduler.kind in BASELINES:
        module = importlib.import_module("sola_sched.simulator.baselines.rules")
        chosen: type[Any] = module.BASELINES[scheduler.kind]
        return chosen
    name = args.get("scheduler_cls")
    if name is not None:
        try:
            found: type[Any] = pkgutil.resolve_name(name)
            return found
        except (AttributeError, ImportError, ValueError) as error:
            raise ConfigError(
                f"'scheduler_cls' must be the dotted name of a class (got {name!r}: {error})."
            ) from error
    from sola_sched.simulator.host import stock_scheduler_cls

    return stock_scheduler_cls(async_scheduling=args["async_scheduling"])


def _check(name: str, value: Any) -> None:
    if name not in ENGINE_ARGS:
        raise ConfigError(
            f"'{name}' is no engine argument of --backend sim, which has no device; it takes "
            f"{', '.join(sorted(ENGINE_ARGS))} (the profile decides the rest)."
        )
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if name in _COUNTS and not (is_int and value >= 1):
        raise ConfigError(f"'{name}' must be a whole number >= 1 (got {value!r}).")
    if name in _FLAGS and not isinstance(value, bool):
        raise ConfigError(f"'{name}' must be true or false (got {value!r}).")
    if name == "scheduling_policy" and value not in ("fcfs", "priority"):
        raise ConfigError(f"'scheduling_policy' must be fcfs or priority (got {value!r}).")
    if name == "additional_config" and not isinstance(value, dict):
        raise ConfigError(f"'additional_config' must be an object (got {value!r}).")
    if name == "scheduler_cls" and not isinstance(value, str):
        raise ConfigError(f"'scheduler_cls' must be the dotted name of a class (got {value!r}).")
