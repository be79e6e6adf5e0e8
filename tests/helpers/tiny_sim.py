"""A tiny engine in virtual time behind `SimBackend`, and workloads for it."""

from __future__ import annotations

from typing import Any

from sola_sched.bench.backends.simulation import SimBackend, SimOptions
from sola_sched.config.slo import SloTarget
from sola_sched.simulator.steps.profile import StepProfile
from sola_sched.simulator.steps.time import StepTimeModel
from sola_sched.workloads.workload import RequestSpec, Workload

SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "vocab_size": 512,
}  # fmt: skip
TINY = StepProfile(
    name="tiny",
    step_time=StepTimeModel(base_s=1.0, per_decode_s=0.125, per_prefill_token_s=1 / 128),
    shape=SHAPE,
    max_model_len=512,
    num_blocks=200,
)
SLO = SloTarget(ttft_s=20.0, tpot_s=2.0)
#: Few slots, a small budget, and the wide shares of a step that a tiny engine has.
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 128}


def make_backend(profile: StepProfile = TINY, **engine_args: Any) -> SimBackend:
    return SimBackend(SimOptions(profile, SMALL | engine_args, num_warmups=2))


def make_workload(*rows: tuple[float, int, int]) -> Workload:
    """Requests of (arrival, prompt tokens, output tokens); prompts share nothing."""
    return Workload(
        tuple(
            RequestSpec(str(i), tuple(range(3 + i, 3 + i + prompt)), output, arrival_s)
            for i, (arrival_s, prompt, output) in enumerate(rows)
        )
    )


def busy_workload(num_requests: int = 60) -> Workload:
    rows = [(0.0, 20 + 7 * i % 150, 2 + 5 * i % 40) for i in range(num_requests)]
    return make_workload(*rows).at_rate(0.4, seed=1)
