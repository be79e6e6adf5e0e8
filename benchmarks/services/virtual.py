"""Three services on one engine in virtual time: vLLM, `doubling`, and `attain` with shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from services import engine as on_engine
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
from sola_sched.config.slo import SloTarget

SERVICES = (
    Service("chat", 300, 60, 8.0, 3.0, SloTarget(0.5, 0.05), 0.3),
    Service("code", 1200, 30, 2.0, 3.0, SloTarget(2.0, 0.1), 0.3),
    Service("batch", 200, 300, 1.0, 3.0, SloTarget(20.0, 0.2), 0.1),
)
#: About what steps of the engine of `services-engine` take: a step, a decode, a prompt token, in
#: seconds. Chosen so that vLLM's scheduler and `attain` without shares attain as much as there.
_ENGINE_S = (0.012, 6e-4, 2.5e-4)
_SLOWER = 1.15
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What is asked of which engine.

    Attributes:
        services: Who asks.
        duration_s, period_s: Of the arrivals, and of their bursts.
        slots: Requests that may run.
        base_s, decode_s, token_s: Time of a step, of each decode and of each prompt token in it.
    """

    services: Sequence[Service]
    duration_s: float
    period_s: float
    slots: int
    base_s: float
    decode_s: float
    token_s: float

    def slower(self, factor: float) -> Load:
        """With steps so many times as long."""
        times = {name: factor * getattr(self, name) for name in ("base_s", "decode_s", "token_s")}
        return replace(self, **times)

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"{self.duration_s:g} s of arrivals, {self.slots} slots, steps of "
            f"{1e3 * self.base_s:g} ms + {1e3 * self.decode_s:g} ms a decode + "
            f"{1e3 * self.token_s:g} ms a prompt token; bursts of {self.period_s:g} s, one service "
            f"after another. {text_of(self.services)}"
        )


#: Tokens of a step, and options; None for vLLM's own scheduler.
_Variants = Mapping[str, tuple[int, Mapping[str, Any] | None]]


def services(setup: Setup) -> Outcome:
    """The table over all seeds, and that of the traffic of `services-engine`."""
    load = Load(SERVICES, 20.0 if setup.is_quick else 30.0, 5.0, 64, 0.010, 2e-4, 1e-4)
    shared = {"classes": classes_of(SERVICES, shared=True)}
    plain = {"classes": classes_of(SERVICES, shared=False)}
    variants: _Variants = {
        "vLLM, 512": (512, None),
        "vLLM, 2048": (2048, None),
        "doubling": (2048, {"policy": "doubling", **plain}),
        "doubling, shares": (2048, {"policy": "doubling", **shared}),
        "attain": (2048, plain),
        "attain, shares": (2048, shared),
    }
    return Outcome(
        [],
        f"Virtual time, {load.text}. Normalized latency: mean of the services' latency over that "
        f"of a mean request alone. {TIME_TEXT} Seeds {', '.join(map(str, setup.seeds))}.\n\n"
        + markdown(head_of(SERVICES), _lines(setup, load, variants))
        + "\n\n"
        + _like_the_engine(setup),
    )


def _like_the_engine(setup: Setup) -> str:
    """What shares cost the traffic of `services-engine`, and what a slower engine does."""
    asked = on_engine.SERVICES
    plain, shared = (classes_of(asked, shared=is_shared) for is_shared in (False, True))
    load = Load(
        asked, 6.0 if setup.is_quick else 24.0, on_engine.PERIOD_S, on_engine.SLOTS, *_ENGINE_S
    )
    alone = {
        f"attain, share of {name}": (512, {"classes": {**plain, name: shared[name]}})
        for name in plain
    }
    main: _Variants = {
        "vLLM, 512": (512, None),
        "attain": (512, {"classes": plain}),
        "attain, shares": (512, {"classes": shared}),
    }
    lines = _lines(setup, load, {**main, **alone})
    lines += [
        [f"{name}, {_SLOWER:g} x the time", *cells]
        for name, *cells in _lines(setup, load.slower(_SLOWER), main)
    ]
    return (
        "The traffic of `services-engine` in virtual time, with steps about as long as there; "
        f"below also with longer ones: {load.text}.\n\n" + markdown(head_of(asked), lines)
    )


def _lines(setup: Setup, load: Load, variants: _Variants) -> list[list[str]]:
    """A line for each variant, over all seeds."""
    runs: dict[str, list[Run]] = {}
    for name, (chunk, options) in variants.items():
        for seed in setup.seeds:
            calls = make_calls(load.services, load.duration_s, load.period_s, seed)
            runs.setdefault(name, []).append(_run(load, calls, chunk, options))
    alone_s = {
        s.name: s.prompt * load.token_s + s.output * (load.base_s + load.decode_s)
        for s in load.services
    }
    return lines_of(load.services, runs, alone_s)


def _run(load: Load, calls: list[Call], chunk: int, options: Mapping[str, Any] | None) -> Run:
    """One run; without options, of vLLM's own scheduler."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from sola_sched.simulator.engine import StepTrace, VirtualEngine
    from sola_sched.simulator.request import VirtualRequest
    from sola_sched.simulator.steps.time import StepTimeModel
    from sola_sched.vllm_adapter.scheduler import Scheduler

    engine = VirtualEngine(
        AsyncScheduler if options is None else Scheduler,
        model=_MODEL,
        num_blocks=4000,
        max_model_len=4096,
        max_num_seqs=load.slots,
        max_num_batched_tokens=chunk,
        step_time=StepTimeModel(
            base_s=load.base_s, per_decode_s=load.decode_s, per_prefill_token_s=load.token_s
        ),
        additional_config=None if options is None else {"sola_sched": dict(options)},
    )
    had_s: dict[str, float] = {}

    def note(trace: StepTrace) -> None:
        if not had_s and trace.end_s >= calls[-1].arrival_s:
            had_s.update(served_s(engine.scheduler))

    records = engine.run(
        [
            VirtualRequest(
                f"{number}", call.arrival_s, call.output, prompt_len=call.prompt, max_tokens=1000,
                extra_args=None if options is None else {"slo_class": call.service.name},
            )
            for number, call in enumerate(calls)
        ],
        on_step=note,
    )  # fmt: skip
    by_id = {record.req_id: record for record in records}
    answers = []
    for number, call in enumerate(calls):
        record = by_id[f"{number}"]
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        answers.append(Answer(call, record.first_token_s, record.last_token_s))
    return Run(answers, had_s)
