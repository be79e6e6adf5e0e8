"""Three services on one engine in virtual time: vLLM, `doubling`, and `attain` with shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from services.traffic import (
    Answer,
    Call,
    Service,
    classes_of,
    head_of,
    lines_of,
    make_calls,
    text_of,
)
from sola_sched.config.slo import SloTarget

SERVICES = (
    Service("chat", 300, 60, 8.0, 3.0, SloTarget(0.5, 0.05), 0.3),
    Service("code", 1200, 30, 2.0, 3.0, SloTarget(2.0, 0.1), 0.3),
    Service("batch", 200, 300, 1.0, 3.0, SloTarget(20.0, 0.2), 0.1),
)
BASE_S, DECODE_S, TOKEN_S = 0.010, 2e-4, 1e-4
PERIOD_S, SLOTS = 5.0, 64
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}  # fmt: skip


def services(setup: Setup) -> Outcome:
    """The table over all seeds."""
    duration_s = 20.0 if setup.is_quick else 30.0
    shared = {"classes": classes_of(SERVICES, shared=True)}
    plain = {"classes": classes_of(SERVICES, shared=False)}
    variants: dict[str, tuple[int, Mapping[str, Any] | None]] = {
        "vLLM, 512": (512, None),
        "vLLM, 2048": (2048, None),
        "doubling": (2048, {"policy": "doubling", **plain}),
        "doubling, shares": (2048, {"policy": "doubling", **shared}),
        "attain": (2048, plain),
        "attain, shares": (2048, shared),
    }
    runs: dict[str, list[list[Answer]]] = {}
    for name, (chunk, options) in variants.items():
        for seed in setup.seeds:
            calls = make_calls(SERVICES, duration_s, PERIOD_S, seed)
            runs.setdefault(name, []).append(_run(calls, chunk, options))
    alone_s = {s.name: s.prompt * TOKEN_S + s.output * (BASE_S + DECODE_S) for s in SERVICES}
    return Outcome(
        [],
        f"Virtual time, {duration_s:g} s of arrivals, {SLOTS} slots, steps of {1e3 * BASE_S:g} ms "
        f"+ {1e3 * DECODE_S:g} ms a decode + {1e3 * TOKEN_S:g} ms a prompt token; bursts of "
        f"{PERIOD_S:g} s, one service after another. {text_of(SERVICES)}. Normalized latency: mean "
        "of the services' latency over that of a mean request alone. Seeds "
        f"{', '.join(map(str, setup.seeds))}.\n\n"
        + markdown(head_of(SERVICES), lines_of(SERVICES, runs, alone_s)),
    )


def _run(calls: list[Call], chunk: int, options: Mapping[str, Any] | None) -> list[Answer]:
    """One run; without options, of vLLM's own scheduler."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from sola_sched.simulator.engine import VirtualEngine
    from sola_sched.simulator.request import VirtualRequest
    from sola_sched.simulator.steps.time import StepTimeModel
    from sola_sched.vllm_adapter.scheduler import Scheduler

    engine = VirtualEngine(
        AsyncScheduler if options is None else Scheduler,
        model=_MODEL,
        num_blocks=4000,
        max_model_len=4096,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=chunk,
        step_time=StepTimeModel(base_s=BASE_S, per_decode_s=DECODE_S, per_prefill_token_s=TOKEN_S),
        additional_config=None if options is None else {"sola_sched": dict(options)},
    )
    records = engine.run(
        [
            VirtualRequest(
                f"{number}", call.arrival_s, call.output, prompt_len=call.prompt, max_tokens=1000,
                extra_args=None if options is None else {"slo_class": call.service.name},
            )
            for number, call in enumerate(calls)
        ]
    )  # fmt: skip
    by_id = {record.req_id: record for record in records}
    answers = []
    for number, call in enumerate(calls):
        record = by_id[f"{number}"]
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        answers.append(Answer(call, record.first_token_s, record.last_token_s))
    return answers
