"""Decides everything that is needed before the first measured run."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sola_sched.bench import args as cli_args
from sola_sched.bench import calibrate, values
from sola_sched.bench.backends.base import BASELINES, Backend, SchedulerSpec, parse_scheduler
from sola_sched.bench.backends.environment import has_accelerator
from sola_sched.bench.backends.model import BENCH_SHAPE, cached_model, random_engine_args
from sola_sched.bench.report import results
from sola_sched.bench.report.progress import Progress
from sola_sched.bench.report.table import in_ms
from sola_sched.config.flags import url_of
from sola_sched.config.sola_config import SolaConfig
from sola_sched.errors import ConfigError
from sola_sched.workloads.datasets import DatasetOptions, Encode, ModelLimits, build
from sola_sched.workloads.workload import Workload, assign_classes

#: Requests drawn when their number follows from the measured rate.
_POOL_SIZE = 1000
_DEFAULT_MODEL_LEN = 8192
#: Flags without a meaning in virtual time.
_NOT_FOR_SIM = (
    "model", "dtype", "load_format", "gpu_memory_utilization", "tensor_parallel_size",
    "enforce_eager", "clock", "base_url", "served_model_name", "header", "extra_body", "send_slo",
)  # fmt: skip
#: Requests of the saturation probe in virtual time per slot; half the slots are kept busy, as
#: the few of the default would leave a GPU idle.
_SIM_PROBE_REQUESTS_PER_SLOT = 1.5


@dataclass(frozen=True)
class Plan:
    """Everything decided before the first measured run."""

    backend: Backend
    schedulers: list[SchedulerSpec]
    workload: Workload
    slo: results.SloSource
    rates: list[float]
    info: results.RunInfo


def make_plan(args: argparse.Namespace, say: Callable[[str], None]) -> Plan:
    """Load model and data set, and measure targets and rates that were not given.

    Raises:
        ConfigError: An argument cannot be right.
        DatasetError: The data set is missing or unusable.
    """
    _check_backend_flags(args)
    schedulers = _schedulers(args)
    slo_classes = values.parse_slo_classes(args.slo_class)
    given_slo = values.parse_slo(args.slo) if args.slo else None
    percentiles = values.parse_percentiles(args.metric_percentiles)
    names = values.parse_metric_names(args.percentile_metrics)
    metadata = values.parse_pairs(args.metadata, "--metadata")
    results.refuse_own_keys(metadata, names, percentiles)
    if args.append_result and not args.result_filename:
        raise ConfigError("'--append-result' needs --result-filename, the file to append to.")
    if args.self_timed and args.num_prompts is None:
        raise ConfigError("'--self-timed' needs --num-prompts: how much of the trace to replay.")
    backend, limits = _backend(args, say)
    workload = build(dataset_options(args), limits)
    if args.self_timed and any(map(math.isfinite, args.request_rate or (1.0,))):
        workload.stretched_to(1.0)  # raises where that cannot be done
    workload = assign_classes(workload, slo_classes, args.seed)
    say(f"Model {backend.model_id}, backend {backend.name}, data set {args.dataset_name}.")
    for note in workload.notes:
        say(f"  {note}")
    reference = _reference(schedulers)
    if given_slo is not None:
        slo = results.SloSource(given_slo, "given with --slo")
    else:
        with Progress("single-request latency", is_hidden=args.disable_tqdm) as bar:
            slo = calibrate.measure_slo(backend, workload, reference, bar.done)
    say(f"SLO: {slo_text(slo)}.")
    budget_s = _traffic_s(args)
    rates = args.request_rate
    if args.self_timed and rates is None:
        rates = [len(workload.requests) / max(workload.requests[-1].arrival_s, 1e-9)]
    if rates is None:
        with Progress("saturation rate", is_hidden=args.disable_tqdm) as bar:
            saturation = calibrate.measure_saturation(
                backend, workload, reference, bar.done, **_probe_size(backend)
            )
        rates = calibrate.choose_rates(saturation, len(schedulers), budget_s)
        found = calibrate.saturation_text(
            saturation, len(workload.requests), **_probe_size(backend)
        )
        say(f"{found}; rates {', '.join(map(per_s, rates))}.")
    if args.num_prompts is None:
        count = cli_args.SIM_NUM_PROMPTS
        if math.isfinite(budget_s):
            count = calibrate.choose_num_prompts(
                rates, len(schedulers), budget_s, len(workload.requests)
            )
        workload = replace(workload, requests=workload.requests[:count])
    say(f"{len(rates) * len(schedulers)} runs of {len(workload.requests)} requests.")
    info = results.RunInfo(
        backend=backend.name,
        model_id=backend.model_id,
        tokenizer_id=backend.tokenizer_id,
        dataset_name=args.dataset_name,
        seed=args.seed,
        slo=slo,
        label=args.label,
        metadata=metadata,
        max_concurrency=args.max_concurrency,
        percentile_metrics=names,
        percentiles=percentiles,
    )
    return Plan(backend, schedulers, workload, slo, rates, info)


def _schedulers(args: argparse.Namespace) -> list[SchedulerSpec]:
    if args.backend == "openai":
        if args.schedulers:
            raise ConfigError(
                "'--schedulers' is for --backend engine or sim: a server's scheduler is chosen "
                "when it is started; use --label to name the run."
            )
        return [SchedulerSpec("server", "server")]
    is_sim = args.backend == "sim"
    default = cli_args.SIM_SCHEDULERS if is_sim else cli_args.DEFAULT_SCHEDULERS
    specs = [parse_scheduler(text) for text in args.schedulers or default]
    labels = [spec.label for spec in specs]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"'--schedulers' must not repeat one (got {' '.join(labels)}).")
    budgets = [spec.max_num_batched_tokens for spec in specs if spec.max_num_batched_tokens]
    if args.max_num_batched_tokens:
        budgets.append(args.max_num_batched_tokens)
    for spec in specs:
        if spec.kind in BASELINES and not is_sim:
            raise ConfigError(
                f"'--schedulers {spec.label}' is for --backend sim (got {args.backend}); "
                "leave it out, or compare in virtual time."
            )
        if spec.kind != "stock" and budgets:
            spec.engine_args.setdefault("max_num_batched_tokens", max(budgets))
        if spec.kind != "sola":
            continue
        SolaConfig.from_mapping(spec.options)
        if importlib.util.find_spec("sola_sched.vllm_adapter.scheduler") is None:
            raise ConfigError(
                "'sola' needs the module sola_sched.vllm_adapter.scheduler, which this "
                "installation lacks; reinstall sola-sched, or leave sola out of --schedulers."
            )
    return specs


def _reference(schedulers: list[SchedulerSpec]) -> SchedulerSpec:
    """Stock vLLM at the largest token budget of the comparison, for the two short runs."""
    if schedulers[0].kind == "server":
        return schedulers[0]
    budgets = [s.max_num_batched_tokens for s in schedulers if s.max_num_batched_tokens]
    engine_args = {"max_num_batched_tokens": max(budgets)} if budgets else {}
    return SchedulerSpec("stock", "stock", engine_args)


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """What the flags of `args.dataset_group` say."""
    return DatasetOptions(
        name=args.dataset_name,
        path=args.dataset_path,
        num_prompts=args.num_prompts or _POOL_SIZE,
        seed=args.seed,
        length_scale=args.length_scale,
        output_len=args.output_len,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
        random_range_ratio=args.random_range_ratio,
        random_prefix_len=args.random_prefix_len,
        self_timed=args.self_timed,
        shuffle=not args.disable_shuffle,
    )


def _backend(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[Backend, ModelLimits]:
    if args.backend == "openai":
        return _server(args)
    if args.backend == "sim":
        return _simulator(args)
    from sola_sched.bench.backends.engine import EngineBackend, EngineOptions

    is_random = args.model is None
    model = str(cached_model()) if is_random else args.model
    engine_args: dict[str, Any] = {}
    if is_random:
        engine_args |= random_engine_args(args.dtype)
    if not has_accelerator():
        engine_args["enforce_eager"] = True
    names = (
        "dtype", "load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
        "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager",
    )  # fmt: skip
    engine_args |= {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if args.tokenizer:
        engine_args["tokenizer"] = args.tokenizer
    say("Loading vLLM ...")
    backend = EngineBackend(
        EngineOptions(
            model=model,
            model_id=BENCH_SHAPE.name if is_random else None,
            tokenizer=args.tokenizer,
            is_random_model=is_random,
            engine_args=engine_args | args.engine_args,
            num_warmups=args.num_warmups,
            stall_timeout_s=args.stall_timeout_sec,
            seed=args.seed,
            clock=args.clock,
        )
    )
    return backend, backend.limits


def _server(args: argparse.Namespace) -> tuple[Backend, ModelLimits]:
    from sola_sched.bench.backends.openai import OpenAIBackend, ServerOptions

    backend = OpenAIBackend(
        ServerOptions(
            base_url=args.base_url or url_of(args.host, args.port),
            endpoint=args.endpoint,
            model=args.served_model_name or args.model,
            tokenizer=args.tokenizer,
            headers=values.parse_pairs(args.header, "--header"),
            extra_body=args.extra_body,
            send_slo=args.send_slo,
            ready_timeout_s=args.ready_check_timeout_sec,
            stall_timeout_s=args.stall_timeout_sec,
            num_warmups=args.num_warmups,
        )
    )
    encode, vocab_size = None, args.vocab_size
    if args.tokenizer:
        tokenizer = load_tokenizer(args.tokenizer)
        encode, vocab_size = encode_by(tokenizer), len(tokenizer)
    limits = ModelLimits(
        max_model_len=args.max_model_len or backend.max_model_len or _DEFAULT_MODEL_LEN,
        vocab_size=vocab_size,
        encode=encode,
    )
    return backend, limits


def _simulator(args: argparse.Namespace) -> tuple[Backend, ModelLimits]:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "'--backend sim' runs vLLM's own scheduler, so it needs vLLM (got none); no GPU and no "
            "model are needed: pip install 'sola-sched[cpu]'."
        )
    from sola_sched.bench.backends.simulation import SimBackend, SimOptions
    from sola_sched.simulator.steps.profile import DEFAULT_PROFILE, load_step_profile

    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    engine_args = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    encode = None
    if args.tokenizer:
        encode = load_encode(args.tokenizer)
    backend = SimBackend(
        SimOptions(
            profile=load_step_profile(args.profile or DEFAULT_PROFILE),
            engine_args=engine_args | args.engine_args,
            encode=encode,
            num_warmups=args.num_warmups,
            stall_timeout_s=args.stall_timeout_sec,
            seed=args.seed,
            scheduling_time=args.scheduling_time,
        )
    )
    for spec in _schedulers(args):
        backend.check(spec)
    return backend, backend.limits


def load_tokenizer(name: str) -> Any:
    """A tokenizer of transformers.

    Raises:
        ConfigError: There is none of this name.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise ConfigError(
            "'--tokenizer' needs transformers, which is not installed; pip install transformers."
        ) from None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"'--tokenizer' must name a tokenizer's folder or model (got {name!r}: {reason})."
        ) from error


def encode_by(tokenizer: Any) -> Encode:
    """Text to token ids, of any length: a text is only counted, so no limit is warned of."""
    return functools.partial(tokenizer.encode, verbose=False)


def load_encode(name: str) -> Encode:
    """`encode_by` a tokenizer of transformers.

    Raises:
        ConfigError: There is none of this name.
    """
    return encode_by(load_tokenizer(name))


def _traffic_s(args: argparse.Namespace) -> float:
    """Seconds of traffic in all runs together; inf where the number of requests is fixed."""
    if args.num_prompts is not None:
        return math.inf
    default_s = math.inf if args.backend == "sim" else cli_args.DEFAULT_DURATION_BUDGET_S
    return float(args.duration_budget or default_s)


def _check_backend_flags(args: argparse.Namespace) -> None:
    """Refuse flags that the chosen backend would ignore.

    Raises:
        ConfigError: One was given.
    """
    if args.backend != "sim":
        if args.profile is not None:
            raise ConfigError(
                f"'--profile' is for --backend sim (got --backend {args.backend}); for the "
                "scheduler's own cost model use --schedulers sola:profile=FILE."
            )
        if args.scheduling_time != "none":
            raise ConfigError(
                f"'--scheduling-time' is for --backend sim (got --backend {args.backend}): "
                "elsewhere the calls take their time by themselves."
            )
        return
    defaults = cli_args.build_parser().parse_args([])
    for name in _NOT_FOR_SIM:
        if getattr(args, name) != getattr(defaults, name):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"'--{flag}' has no meaning with --backend sim (got {getattr(args, name)!r}): the "
                "profile decides model, hardware and time; choose it with --profile."
            )


def _probe_size(backend: Backend) -> dict[str, int]:
    slots = getattr(backend, "max_num_seqs", None)
    if slots is None:
        return {}
    return {"num_requests": int(_SIM_PROBE_REQUESTS_PER_SLOT * slots), "concurrency": slots // 2}


def slo_text(slo: results.SloSource) -> str:
    """All targets and where they came from."""
    parts = [
        f"{name} " + ("unlimited" if math.isinf(value) else in_ms(value))
        for name, value in (("TTFT", slo.target.ttft_s), ("TPOT", slo.target.tpot_s))
    ]
    if math.isfinite(slo.target.e2e_s):
        parts.append(f"last token {in_ms(slo.target.e2e_s)}")
    return f"{', '.join(parts)} ({slo.source})"


def per_s(rate: float) -> str:
    """A request rate for titles."""
    return "inf" if math.isinf(rate) else f"{rate:.3g}/s"
