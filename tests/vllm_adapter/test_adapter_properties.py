"""Whatever arrives, the steered scheduler loses no request, no token and no block."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from chaos import ChaosScheduler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_checks import assert_table_agrees
from virtual_model import TINY_MODEL

import sola_sched
from sola_sched.config.policies import POLICY_OPTIONS, traits_of
from sola_sched.simulator import RequestRecord, StepTimeModel, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 128
BLOCK_SIZE = 16
MIN_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 1
STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=1e-3, per_ctx_s=1e-6, per_prefill_token_s=1e-4)
#: No workload here keeps a scheduler that gets ahead from delivering a token for so long.
STALL_LIMIT_S = 20.0
#: Impossible, tight, loose and practically absent targets, milliseconds.
TARGETS_MS = (0.001, 1.0, 12.0, 40.0, 300.0, 5e3, 1e9)


class Checks:
    """Checks what must hold after every `schedule()`."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        tokens = sum(scheduled.values())
        assert tokens == output.total_num_scheduled_tokens
        assert tokens <= self.scheduler_config.max_num_batched_tokens
        assert all(n > 0 for n in scheduled.values())
        named = [r.req_id for r in output.scheduled_new_reqs]
        named += output.scheduled_cached_reqs.req_ids
        assert sorted(named) == sorted(scheduled), "each scheduled request is sent exactly once"
        self.check_queues()
        self.check_blocks()
        self.sola_monitor.table.check_integrity()
        assert_table_agrees(self)
        return output

    def check_queues(self) -> None:
        running = [r.request_id for r in self.running]
        queues = [self.waiting]  # and those that not every vLLM has
        queues += [getattr(self, name, ()) for name in ("kv_holding_waiting", "skipped_waiting")]
        waiting = [r.request_id for queue in queues for r in queue]
        assert len(running) <= self.scheduler_config.max_num_seqs
        assert sorted(running + waiting) == sorted(self.requests), "in one queue, and in one only"
        assert sorted(self.sola_monitor.table.row_of) == sorted(self.requests)

    def check_blocks(self) -> None:
        pool = self.kv_cache_manager.block_pool
        held = {
            block
            for request in self.requests
            for group in self.kv_cache_manager.get_block_ids(request)
            for block in group
        }
        assert len(held) + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


class CheckedScheduler(Checks, sola_sched.Scheduler):
    """The scheduler under test."""


class CheckedChaos(Checks, ChaosScheduler):
    """The same with random decisions: it exercises every seam."""


def slo_args() -> st.SearchStrategy[dict[str, float | str]]:
    target = st.sampled_from(TARGETS_MS)
    return st.fixed_dictionaries(
        {},
        optional={
            "ttft_slo_ms": target,
            "tpot_slo_ms": target,
            "slo_class": st.just("batch"),
        },
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[VirtualRequest]:
    requests = []
    for i in range(draw(st.integers(1, 24))):
        num_prompt = draw(st.integers(1, MAX_MODEL_LEN - 1))
        output_len = draw(st.integers(1, min(60, MAX_MODEL_LEN - num_prompt)))
        arrival_s = draw(st.floats(0.0, 1.5))
        is_shared = draw(st.booleans())
        abort_after_s = draw(st.none() | st.floats(-0.1, 3.0))
        requests.append(
            VirtualRequest(
                f"r{i}",
                arrival_s,
                output_len,
                prompt_len=None if is_shared else num_prompt,
                prompt_token_ids=range(1, num_prompt + 1) if is_shared else None,
                max_tokens=draw(st.none() | st.integers(output_len, 200)),
                extra_args=draw(slo_args()),
                priority=draw(st.integers(-2, 2)),
                abort_s=None if abort_after_s is None else arrival_s + abort_after_s,
            )
        )
    return requests


def used_by_its_policy(options: dict[str, Any]) -> dict[str, Any]:
    """Without the options that another policy has; they would be refused."""
    return {
        name: value
        for name, value in options.items()
        if name not in POLICY_OPTIONS or name in traits_of(options["policy"]).options
    }


def options() -> st.SearchStrategy[dict[str, Any]]:
    target_s = st.none() | st.sampled_from(TARGETS_MS).map(lambda ms: ms / 1e3)
    sola = st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["attain", "paper", "alise", "doubling"]),
            "aging_s": st.sampled_from([0.05, 1.0, None]),
            "levels": st.integers(1, 6),
            "overload": st.sampled_from(["defer", "reject"]),
            "ttft_s": target_s,
            "tpot_s": target_s,
            "best_effort_share": st.sampled_from([0.0, 0.05, 0.5]),
            "tile": st.sampled_from([1, 16, 128]),
            "classes": st.just({"batch": {"ttft_s": 5.0, "tpot_s": None}}),
        }
    )
    sola = sola.map(used_by_its_policy)
    return st.fixed_dictionaries(
        {
            "num_blocks": st.integers(MIN_BLOCKS, 3 * MIN_BLOCKS),
            "max_num_seqs": st.integers(1, 8),
            "max_num_batched_tokens": st.integers(8, 160),
            "enable_prefix_caching": st.booleans(),
            "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
            "additional_config": st.fixed_dictionaries(
                {"sola_sched": sola, "chaos": st.integers(0, 2**32)}
            ),
        }
    )


def check(
    requests: list[VirtualRequest],
    chosen: dict[str, Any],
    async_scheduling: bool,
    scheduler_cls: type[Any] = CheckedScheduler,
) -> list[RequestRecord]:
    engine = VirtualEngine(
        scheduler_cls,
        model=TINY_MODEL,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        async_scheduling=async_scheduling,
        step_time=STEP_TIME,
        stall_limit_s=STALL_LIMIT_S,
        **chosen,
    )
    records = engine.run(requests)
    for request, record in zip(requests, records, strict=True):
        if record.is_finished:
            assert record.num_output_tokens == request.output_len
        elif record.is_aborted:
            assert request.abort_s is not None
        else:
            assert record.finish_reason == "error"
            assert chosen["additional_config"]["sola_sched"].get("overload") == "reject"
            assert record.num_output_tokens == 0
    assert engine.num_free_blocks == chosen["num_blocks"] - 1
    assert not engine.scheduler.requests
    engine.scheduler.check_queues()
    return records


SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


both_modes = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
both_classes = pytest.mark.parametrize("scheduler_cls", [CheckedScheduler, CheckedChaos])


@both_modes
@pytest.mark.parametrize("aging_s", [0.02, 0.05, 0.3])
@pytest.mark.parametrize("policy", ["alise", "doubling"])
def test_requests_that_starve_in_turn_all_get_ahead(policy, aging_s, async_scheduling):
    """One slot, prompts of ten steps each: whoever starves displaces whoever runs."""
    lengths = [(82, 4), (55, 1), (22, 1), (50, 1), (75, 29), (22, 45), (73, 25), (79, 12)]
    arrivals_s = [0.19, 0.0, 0.0, 0.0, 0.45, 0.47, 0.7, 1.02]
    requests = [
        VirtualRequest(f"r{i}", arrivals_s[i], output_len, prompt_len=prompt_len)
        for i, (prompt_len, output_len) in enumerate(lengths)
    ]
    requests += [VirtualRequest(f"short{i}", 0.0, 1, prompt_len=1) for i in range(9)]
    sola = {"policy": policy, "aging_s": aging_s, "ttft_s": None, "tpot_s": None}
    chosen = {
        "num_blocks": MIN_BLOCKS,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 8,
        "additional_config": {"sola_sched": sola},
    }
    records = check(requests, chosen, async_scheduling)

    assert all(record.is_finished for record in records)


@both_modes
@both_classes
@given(requests=workloads(), chosen=options())
@settings(max_examples=25, **SETTINGS)
def test_every_request_ends_and_every_block_returns(
    requests, chosen, async_scheduling, scheduler_cls
):
    check(requests, chosen, async_scheduling, scheduler_cls)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@both_modes
@both_classes
@given(requests=workloads(), chosen=options())
@settings(max_examples=500, **SETTINGS)
def test_every_request_ends_and_every_block_returns_in_many_runs(
    requests, chosen, async_scheduling, scheduler_cls
):
    check(requests, chosen, async_scheduling, scheduler_cls)
