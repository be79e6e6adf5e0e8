"""The real engine core on the CPU, in this process, with a tiny fp32 model and greedy sampling.

Its clock is a virtual one that advances with each step, so that the scheduler's decisions do
not depend on the machine. As a program it runs cases that need a process of their own, such as the
V2 model runner, which has to be chosen before vLLM is imported.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from kv_watch import KVWatch
from swap_faults import install, leftovers
from tiny_llama import MAX_MODEL_LEN, VOCAB_SIZE

STOCK = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
#: Blocks of 32 tokens: the largest tile of the CPU attention kernel.
BLOCK_SIZE = 32
#: Room for all requests of `make_workload`, and room for a few: about 20 preemptions.
AMPLE_BLOCKS, TIGHT_BLOCKS = 200, 20
#: Far above what any workload here needs.
_MAX_STEPS = 5000


@dataclass(frozen=True)
class EngineRequest:
    """One request; it arrives before step `arrival_step` and may be aborted at `abort_step`.

    Attributes:
        adapter: Number, from 1, and folder of a LoRA adapter.
        resumable: The first or a further input of a session; one that is not resumable ends it.
    """

    req_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival_step: int = 0
    abort_step: int | None = None
    extra_args: Mapping[str, Any] | None = None
    priority: int = 0
    adapter: tuple[int, str] | None = None
    resumable: bool = False


@dataclass
class RunResult:
    """Outcome of one run.

    Attributes:
        tokens: Output of each request.
        finish_reasons: Of each request, e.g. ``length``.
        num_preemptions: Over all requests.
        num_steps: Engine steps that executed the model.
        num_leaked_blocks: Blocks not free at the end.
        num_recomputed: Tokens whose KV was computed more than once for one request.
        swap_problems: What was left behind by swapping, e.g. host slots still in use.
        stats: The scheduler's `sola_stats()`, empty without one.
        num_kv_compared, largest_kv_error: See `kv_watch`.
    """

    tokens: dict[str, list[int]]
    finish_reasons: dict[str, str]
    num_preemptions: int = 0
    num_steps: int = 0
    num_leaked_blocks: int = 0
    num_recomputed: int = 0
    swap_problems: list[str] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    num_kv_compared: int = 0
    largest_kv_error: float = 0.0


def num_different(result: RunResult, reference: RunResult) -> int:
    """Tokens that are not those of the reference, of requests as long as there."""
    return sum(
        a != b
        for name, expected in reference.tokens.items()
        for a, b in zip(expected, result.tokens[name], strict=True)
    )


class StepClock:
    """Virtual seconds: a step takes 5 ms and 0.1 ms a token."""

    def __init__(self, core: Any) -> None:
        self.now = 1000.0
        execute_model = core.model_executor.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.now += 5e-3 + 1e-4 * scheduler_output.total_num_scheduled_tokens
            return execute_model(scheduler_output, *args, **kwargs)

        core.model_executor.execute_model = timed

    def __call__(self) -> float:
        return self.now


def count_recomputed(core: Any) -> Callable[[], int]:
    """Count tokens computed at positions that the same request had computed before."""
    schedule, reached, total = core.scheduler.schedule, {}, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal total
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for req_id, start in starts.items():
            end = start + output.num_scheduled_tokens[req_id]
            before = reached.get(req_id, 0)
            total += max(0, min(before, end) - start)
            reached[req_id] = max(before, end)
        return output

    core.scheduler.schedule = counted
    return lambda: total


def make_workload(
    num_requests: int = 24,
    *,
    output_len: int = 100,
    seed: int = 0,
    num_aborts: int = 0,
    extra_args: Sequence[Mapping[str, Any] | None] = (None,),
) -> list[EngineRequest]:
    """Random prompts of 20 to 119 tokens, every third with a shared prefix of 64."""
    # Aborts have a generator of their own: the other requests do not depend on them.
    rng, abort_rng = random.Random(seed), random.Random(seed + 1)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(64)]
    aborted = set(abort_rng.sample(range(num_requests), num_aborts))
    requests = []
    for i in range(num_requests):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(20, 120))]
        prompt = [*prefix, *own[:-64], own[-1]] if i % 3 == 0 else own
        arrival_step = rng.randrange(0, 40)
        requests.append(
            EngineRequest(
                f"r{i}",
                tuple(prompt),
                output_len,
                arrival_step,
                arrival_step + abort_rng.randrange(0, 250) if i in aborted else None,
                extra_args[i % len(extra_args)],
            )
        )
    return requests


def run(
    scheduler_cls: str | type[Any],
    requests: Sequence[EngineRequest],
    model_dir: Path,
    *,
    async_scheduling: bool = False,
    prefix_caching: bool = False,
    num_blocks: int = AMPLE_BLOCKS,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    additional_config: Mapping[str, Any] | None = None,
    zero_kv_at_step: int | None = None,
    swap_faults: Mapping[str, Any] | None = None,
    follow_up: Callable[[RunResult], Sequence[EngineRequest]] | None = None,
    watches_kv: bool = False,
    at_steps: Mapping[int, Callable[[Any], object]] | None = None,
    **engine_options: Any,
) -> RunResult:
    """Serve `requests` on a fresh engine core and shut it down.

    Args:
        scheduler_cls: Class or dotted name, as for ``--scheduler-cls``.
        zero_kv_at_step: Clear the whole KV cache before this step: the negative control.
        swap_faults: Arguments of `swap_faults.install`, which disturbs KV swapping.
        follow_up: Called when all requests have ended; what it returns is served by the same
            engine, with arrivals counted from there, and added to the result.
        watches_kv: Compare KV before a preemption with what comes back from the host.
        at_steps: Called with the engine core before these steps, e.g. to pause it.
        engine_options: More of vLLM's `EngineArgs`.
    """
    with _asynchronous_on_cpu() if async_scheduling else nullcontext():
        core = _make_core(
            scheduler_cls,
            model_dir,
            async_scheduling=async_scheduling,
            enable_prefix_caching=prefix_caching,
            num_gpu_blocks_override=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            additional_config=dict(additional_config or {}),
            **engine_options,
        )
        if swap_faults is not None:
            install(core, **swap_faults)
        watch = KVWatch(core) if watches_kv else None
        try:
            result = _serve(core, requests, zero_kv_at_step, follow_up, at_steps or {})
        finally:
            core.shutdown()
    if watch is not None:
        result.num_kv_compared, result.largest_kv_error = watch.num_compared, watch.largest
    return result


def run_on_v2(cases: Sequence[Mapping[str, Any]], model_dir: Path) -> list[RunResult]:
    """Run `cases`, keyword arguments of `run` each, on the V2 model runner in one subprocess.

    Triton's interpreter executes the runner's kernels, at about 60 ms a step.
    """
    variables = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return run_apart(cases, model_dir, variables)


def run_apart(
    cases: Sequence[Mapping[str, Any]], model_dir: Path, variables: Mapping[str, str] | None = None
) -> list[RunResult]:
    """Run `cases`, keyword arguments of `run` each, in one subprocess.

    Args:
        variables: More of its environment.
    """
    payload = {
        "model_dir": str(model_dir),
        "cases": [
            {**case, "requests": [asdict(request) for request in case["requests"]]}
            for case in cases
        ],
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **(variables or {}),
    }
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(payload),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the runs failed with {done.returncode}:\n{done.stderr[-4000:]}")
    return [RunResult(**result) for result in json.loads(done.stdout.splitlines()[-1])]


def _make_core(scheduler_cls: str | type[Any], model_dir: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    options = {
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": MAX_MODEL_LEN,
        **options,
    }
    config = EngineArgs(
        model=str(model_dir),
        scheduler_cls=scheduler_cls,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **options,
    ).create_engine_config()
    assert config.scheduler_config.async_scheduling == options["async_scheduling"]
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def _serve(
    core: Any,
    requests: Sequence[EngineRequest],
    zero_kv_at_step: int | None,
    follow_up: Callable[[RunResult], Sequence[EngineRequest]] | None,
    at_steps: Mapping[int, Callable[[Any], object]],
) -> RunResult:
    clock = StepClock(core)
    recomputed = count_recomputed(core)
    for name in ("sola_clock", "sola_wall_clock"):
        if hasattr(core.scheduler, name):
            setattr(core.scheduler, name, clock)
    num_free_blocks = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    num_blocks = num_free_blocks()
    result = RunResult({r.req_id: [] for r in requests}, {})
    added: dict[str, Any] = {}
    arrivals = sorted(requests, key=lambda r: r.arrival_step)
    requests = list(requests)
    for step in range(_MAX_STEPS):
        while arrivals and arrivals[0].arrival_step <= step:
            request = _engine_core_request(arrivals.pop(0), clock())
            added[request.request_id], wave = core.preprocess_add_request(request)
            core.add_request(added[request.request_id], wave)
        aborts = [r.req_id for r in requests if r.abort_step == step]
        core.abort_requests(aborts)
        for req_id in aborts:
            result.finish_reasons.setdefault(req_id, "abort")
        if step == zero_kv_at_step:
            _zero_kv(core)
        if step in at_steps:
            at_steps[step](core)
        if core.scheduler.has_requests() or core.batch_queue:
            outputs, executed = core.step_fn()
            core.post_step(executed)
            result.num_steps += bool(executed)
            if not executed:  # as vLLM's own loop: something else must end first
                time.sleep(1e-3)
            _collect(result, outputs)
        elif follow_up is not None:
            arrivals = [replace(r, arrival_step=step + r.arrival_step) for r in follow_up(result)]
            follow_up = None
            requests += arrivals
            result.tokens |= {r.req_id: [] for r in arrivals}
        elif not arrivals and step >= max(at_steps, default=0):
            break
    else:
        raise RuntimeError(
            f"all requests must end within {_MAX_STEPS} steps (running "
            f"{len(core.scheduler.running)}, waiting {len(core.scheduler.waiting)})."
        )
    result.num_preemptions = sum(r.num_preemptions for r in added.values())
    result.num_leaked_blocks = num_blocks - num_free_blocks()
    result.num_recomputed = recomputed()
    result.swap_problems = leftovers(core)
    if hasattr(core.scheduler, "sola_stats"):
        result.stats = core.scheduler.sola_stats()
    return result


def _collect(result: RunResult, outputs: Mapping[int, Any] | None) -> None:
    for batch in (outputs or {}).values():
        for output in batch.outputs:
            result.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                result.finish_reasons.setdefault(output.request_id, str(output.finish_reason))


def _engine_core_request(request: EngineRequest, arrival_time: float) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request.req_id,
        prompt_token_ids=list(request.prompt),
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=dict(request.extra_args) if request.extra_args else None,
        ),
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=adapter_of(request),
        cache_salt=None,
        data_parallel_rank=None,
        priority=request.priority,
        resumable=request.resumable,
    )


def adapter_of(request: EngineRequest) -> Any:
    """Its `LoRARequest`, if it has an adapter."""
    if request.adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    number, folder = request.adapter
    return LoRARequest(f"adapter {number}", number, folder)


def _zero_kv(core: Any) -> None:
    runner = core.model_executor.driver_worker.worker.model_runner
    for cache in runner.kv_caches:
        cache.zero_()


@contextmanager
def _asynchronous_on_cpu() -> Iterator[None]:
    """Let the CPU platform schedule asynchronously, which it switches off, without streams."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep_flag(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    class NoStream:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    with (
        mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(keep_flag)),
        mock.patch.object(torch.cuda, "Stream", NoStream),
        mock.patch.object(torch.cuda, "Event", NoStream),
        mock.patch.object(torch.cuda, "current_stream", NoStream),
        mock.patch.object(torch.cuda, "set_stream", NoStream),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
    ):
        yield


def _enable_triton_interpreter() -> None:
    """Make vLLM accept the Triton wheel without a CPU backend; the interpreter needs none."""
    from triton.backends import backends

    driver = mock.Mock()
    driver.is_active.return_value = True
    backends["cpu"] = mock.Mock(driver=driver)


def _main() -> None:
    if "VLLM_USE_V2_MODEL_RUNNER" in os.environ:
        _enable_triton_interpreter()
    payload = json.load(sys.stdin)
    results = []
    for case in payload["cases"]:
        case["requests"] = [
            EngineRequest(**{**request, "prompt": tuple(request["prompt"])})
            for request in case["requests"]
        ]
        results.append(asdict(run(model_dir=Path(payload["model_dir"]), **case)))
    print(json.dumps(results))


if __name__ == "__main__":
    _main()
