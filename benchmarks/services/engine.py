"""The same on vLLM's real engine on a CPU: three random LoRA adapters of one small base model."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness import provenance
from harness.markdown import markdown
from harness.setup import Outcome, Setup
from services.traffic import (
    TIME_TEXT,
    Answer,
    Call,
    Run,
    Service,
    classes_of,
    head_of,
    lines_of,
    make_calls,
    served_s,
    text_of,
)
from sola_sched.bench.backends.environment import prepare
from sola_sched.bench.backends.model import ModelShape, write_model
from sola_sched.config.slo import SloTarget

SERVICES = (
    Service("chat", 60, 24, 12.0, 3.0, SloTarget(0.5, 0.05), 0.3),
    Service("code", 300, 12, 3.0, 3.0, SloTarget(1.0, 0.1), 0.3),
    Service("batch", 40, 100, 2.0, 3.0, SloTarget(10.0, 0.2), 0.1),
)
PERIOD_S, SLOTS = 3.0, 32
_SHAPE = ModelShape(
    hidden_size=256, intermediate_size=704, vocab_size=8192, max_model_len=1024, dtype="float32"
)
_RANK = 8
_WARM_UP = 48


def services_engine(setup: Setup) -> Outcome:
    """The table over all seeds, and how many answers are those of stock vLLM."""
    prepare(None, is_random=True)
    duration_s = 6.0 if setup.is_quick else 24.0
    shared = {"classes": classes_of(SERVICES, shared=True)}
    plain = {"classes": classes_of(SERVICES, shared=False)}
    variants: dict[str, tuple[int, Mapping[str, Any] | None]] = {
        "vLLM, 128": (128, None),
        "vLLM, 512": (512, None),
        "doubling": (512, {"policy": "doubling", **plain}),
        "attain": (512, plain),
        "attain, shares": (512, shared),
    }
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    num_same = dict.fromkeys(variants, 0)
    num_calls = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "base", _SHAPE)
        for seed, service in enumerate(SERVICES):
            _write_adapter(folder / service.name, seed)
        for number, seed in enumerate(setup.seeds):
            calls = make_calls(SERVICES, duration_s, PERIOD_S, seed)
            num_calls += len(calls)
            names = list(variants)
            tokens = {}
            for variant in names[number:] + names[:number]:  # none is always the first
                run, tokens[variant] = _run(folder, calls, *variants[variant])
                runs[variant].append(run)
            for variant, mine in tokens.items():
                stock = tokens["vLLM, 512"]
                num_same[variant] += sum(a == b for a, b in zip(mine, stock, strict=True))
    alone_s = {
        service.name: min(
            answer.last_s - answer.call.arrival_s
            for seeds in runs.values()
            for run in seeds
            for answer in run.answers
            if answer.call.service is service
        )
        for service in SERVICES
    }
    lines = lines_of(SERVICES, runs, alone_s)
    for line in lines:
        line.append(f"{num_same[line[0]]}")
    return Outcome(
        [],
        f"vLLM's engine on one core ({provenance.cpu_model()}), by the clock, one run after "
        f"another; {duration_s:g} s of arrivals, {SLOTS} slots, chunks of up to 512 tokens or as "
        f"named, a random Llama of {_SHAPE.num_parameters / 1e6:.0f} M parameters in fp32 and "
        f"three random adapters of rank {_RANK}; bursts of {PERIOD_S:g} s, one service after "
        f"another. {text_of(SERVICES)}. Normalized latency: mean of the services' latency over the "
        f"shortest that was seen. {TIME_TEXT} Same tokens: of {num_calls} greedy answers, those "
        f"that are the ones of vLLM at 512. Seeds {', '.join(map(str, setup.seeds))}.\n\n"
        + markdown([*head_of(SERVICES), "same tokens"], lines),
    )


def _run(
    folder: Path, calls: list[Call], chunk: int, options: Mapping[str, Any] | None
) -> tuple[Run, list[list[int]]]:
    """A run by the clock, and the output tokens of each call; vLLM's own without options."""
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    ours = {} if options is None else {
        "scheduler_cls": "sola_sched.Scheduler",
        "additional_config": {"sola_sched": dict(options)},
    }  # fmt: skip
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder / "base"), skip_tokenizer_init=True, dtype=_SHAPE.dtype,
            load_format="dummy", enforce_eager=True, max_model_len=_SHAPE.max_model_len,
            max_num_seqs=SLOTS, max_num_batched_tokens=chunk, kv_cache_memory_bytes=256 << 20,
            enable_lora=True, max_loras=len(SERVICES), max_lora_rank=_RANK,
            enable_prefix_caching=False, seed=0, **ours,
        )
    )  # fmt: skip
    adapters = {
        service.name: LoRARequest(service.name, number, str(folder / service.name))
        for number, service in enumerate(SERVICES, 1)
    }

    def send(name: str, call: Call, seed: int) -> None:
        ids = np.random.default_rng(seed).integers(300, _SHAPE.vocab_size, call.prompt)
        engine.add_request(
            name,
            {"prompt_token_ids": ids.tolist()},
            SamplingParams(
                temperature=0.0, max_tokens=call.output, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
            lora_request=adapters[call.service.name],
        )  # fmt: skip

    for number in range(_WARM_UP):  # adapters are loaded, step times and lengths learned
        send(f"warm-{number}", calls[number % len(calls)], number)
    while engine.has_unfinished_requests():
        engine.step()
    tokens: list[list[int]] = [[] for _ in calls]
    times: list[list[float]] = [[] for _ in calls]
    scheduler = engine.engine_core.engine_core.scheduler  # in this process, see `prepare`
    before_s = served_s(scheduler)
    after_s: dict[str, float] = {}
    start_s, sent = time.monotonic(), 0
    while sent < len(calls) or engine.has_unfinished_requests():
        now_s = time.monotonic() - start_s
        while sent < len(calls) and calls[sent].arrival_s <= now_s:
            send(f"{sent}", calls[sent], _WARM_UP + sent)
            sent += 1
        if sent == len(calls) and not after_s:
            after_s = served_s(scheduler)
        if not engine.has_unfinished_requests():
            time.sleep(calls[sent].arrival_s - now_s)
            continue
        for output in engine.step():
            number, new = int(output.request_id), list(output.outputs[0].token_ids)
            tokens[number] += new
            times[number] += [time.monotonic() - start_s] * len(new)
    engine.engine_core.shutdown()
    lost = [
        n
        for n, (call, mine) in enumerate(zip(calls, tokens, strict=True))
        if len(mine) != call.output
    ]
    if lost:
        raise RuntimeError(f"every request must be answered whole (got {lost} cut off).")
    answers = [Answer(c, t[0], t[-1]) for c, t in zip(calls, times, strict=True)]
    return Run(answers, {name: s - before_s.get(name, 0.0) for name, s in after_s.items()}), tokens


def _write_adapter(folder: Path, seed: int) -> None:
    """Random weights on the query projections."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    hidden, weights = _SHAPE.hidden_size, {}
    for layer in range(_SHAPE.num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(hidden, _RANK, generator=generator)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(
        json.dumps({
            "peft_type": "LORA", "r": _RANK, "lora_alpha": 16, "target_modules": ["q_proj"],
            "bias": "none", "task_type": "CAUSAL_LM",
        })
    )  # fmt: skip
