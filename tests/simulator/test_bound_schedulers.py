"""No real scheduler attains more than the bound."""

from __future__ import annotations

import pytest
from bound_traces import MODELS
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_model import TINY_MODEL

from sola_sched.bench.backends.base import slo_options
from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import meets_slo, tpot_s, ttft_s
from sola_sched.simulator.bound.upper import BoundRequest, upper_bound
from sola_sched.workloads.workload import Workload

NUM_BLOCKS = 34
SCHEDULERS = (
    "stock", "sola", "decode-first", "hrrn", "prefill-first", "reject", "sjf", "sjf-oracle", "spf",
)  # fmt: skip


def num_attained(name, model, trace, slo, limits, *, is_async):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    import sola_sched
    from sola_sched.simulator import VirtualEngine, VirtualRequest
    from sola_sched.simulator.baselines.rules import BASELINES, ORACLE_KEY

    classes = {"stock": AsyncScheduler, "sola": sola_sched.Scheduler, **BASELINES}
    engine = VirtualEngine(
        classes[name],
        model=TINY_MODEL,
        num_blocks=NUM_BLOCKS,
        max_model_len=512,
        step_time=model,
        async_scheduling=is_async,
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["max_num_batched_tokens"],
        additional_config={"sola_sched": slo_options(slo, Workload(()))},
    )
    records = engine.run(
        [
            VirtualRequest(
                f"r{i}",
                r.arrival_s,
                r.num_output_tokens,
                prompt_len=r.num_prompt_tokens,
                extra_args={ORACLE_KEY: r.num_output_tokens},
            )
            for i, r in enumerate(trace)
        ]
    )
    count = 0
    for record in records:
        if record.is_finished:
            ttft = ttft_s(record.arrival_s, record.first_token_s)
            latency = record.last_token_s - record.arrival_s
            count += meets_slo(ttft, tpot_s(latency, ttft, record.num_output_tokens), latency, slo)
    return count


@pytest.mark.vllm
@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.floats(0.0, 100.0), st.integers(1, 40), st.integers(1, 12)),
        min_size=1,
        max_size=25,
    ),
    slo=st.builds(SloTarget, ttft_s=st.floats(3.0, 60.0), tpot_s=st.floats(1.3, 20.0))
    | st.builds(SloTarget, e2e_s=st.floats(4.0, 100.0))
    | st.builds(SloTarget, ttft_s=st.floats(3.0, 20.0), e2e_s=st.floats(20.0, 100.0)),
    max_num_seqs=st.integers(1, 8),
    num_tokens=st.sampled_from([16, 64, 512]),
    is_async=st.booleans(),
    model=st.sampled_from(list(MODELS.values())),
)
def test_no_scheduler_attains_more(name, lengths, slo, max_num_seqs, num_tokens, is_async, model):
    pytest.importorskip("vllm")
    trace = [BoundRequest(a, p, o, slo) for a, p, o in lengths]
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": num_tokens}

    bound = upper_bound(trace, model, num_kv_tokens=(NUM_BLOCKS - 1) * 16, **limits)
    attained = num_attained(name, model, trace, slo, limits, is_async=is_async)

    assert attained <= bound.num_attainable
