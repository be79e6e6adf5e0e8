"""Speculative decoding around a real vLLM scheduler, in virtual time: budgets with drafts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from fake_loads import Loading
from virtual_model import TINY_MODEL
from virtual_runs import STEP_TIME, make_workload
from vllm.v1.core.sched.scheduler import Scheduler

import sola_sched
from sola_sched.simulator import StepTrace, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

NUM_DRAFTS = 3


class WithDrafts(Scheduler):
    """vLLM's scheduler, of an engine with speculative decoding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec_tokens = NUM_DRAFTS


class Drafting(sola_sched.SolaSchedulerMixin, WithDrafts):
    """Every decode has drafts, none of which is accepted."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in self.running:
            request.spec_token_ids = [] if request.is_prefill_chunk else [1] * NUM_DRAFTS
        return super().schedule(*args, **kwargs)


class LoadingDrafts(Loading, Drafting):
    """The same beside a connector that loads prompts."""


def make_engine(
    scheduler_cls: type[Any], policy: str, *, tpot_s: float, **options: Any
) -> VirtualEngine:
    defaults: dict[str, Any] = {
        "model": TINY_MODEL,
        "num_blocks": 4000,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 128,
        "step_time": STEP_TIME,
        "additional_config": {"sola_sched": {"policy": policy, "ttft_s": 1.0, "tpot_s": tpot_s}},
    }
    return VirtualEngine(scheduler_cls, **(defaults | options))


@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
def test_requests_whose_prompts_were_loaded_resume_where_drafts_fill_the_steps(policy: str) -> None:
    """vLLM pads their one token, and asserts that no limit of a chunk takes some of that."""
    engine = make_engine(LoadingDrafts, policy, tpot_s=0.2)
    engine.run(make_workload(30, 10.0, prompt=60))  # step times are known
    start_s = engine.clock.now
    decodes = [VirtualRequest(f"d{i}", start_s + 0.05 * i, 200, prompt_len=20) for i in range(32)]
    loads = [VirtualRequest(f"load{i}", start_s + 2.0, 20, prompt_len=100) for i in range(8)]

    records = engine.run([*decodes, *loads])

    assert all(record.is_finished for record in records)
    assert engine.scheduler.sola_stats()["failures"] == {}


@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
def test_a_request_that_is_cached_whole_starts_beside_a_decode_with_drafts(policy: str) -> None:
    """Its one token is padded by vLLM to the length of the others, or it does not start."""
    engine = VirtualEngine(
        Drafting,
        model=TINY_MODEL,
        num_blocks=2000,
        max_model_len=2048,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
        step_time=STEP_TIME,
        additional_config={"sola_sched": {"policy": policy, "ttft_s": 1.0, "tpot_s": 0.05}},
    )
    engine.run(make_workload(30, 10.0))  # step times are known
    start_s, prompt = engine.clock.now, [3 + i % 400 for i in range(161)]
    first = VirtualRequest("first", start_s, 100, prompt_token_ids=prompt)
    second = VirtualRequest("second", start_s + 0.3, 20, prompt_token_ids=prompt)
    tokens: list[int] = []

    def note(trace: StepTrace) -> None:
        if trace.scheduled_s >= second.arrival_s:
            tokens.append(trace.output.num_scheduled_tokens.get("second", 0))

    engine.run([first, second], on_step=note)
    assert tokens[0] == 1 + NUM_DRAFTS, tokens[:12]


def times_of_high(policy: str, num_low: int, prompt_len: int) -> tuple[list[float], float]:
    """TTFT of prompts of the higher class, and how long the whole load takes, seconds."""
    engine = make_engine(Drafting, policy, tpot_s=0.1, scheduling_policy="priority")
    engine.run(make_workload(30, 10.0, prompt=60))  # step times are known
    start_s = engine.clock.now
    low = [
        VirtualRequest(f"low{number}", start_s + 0.05 * number, 400, prompt_len=20, priority=1)
        for number in range(num_low)
    ]
    high = [
        VirtualRequest(f"high{number}", start_s + 6.0 + 0.5 * number, 20, prompt_len=prompt_len)
        for number in range(3)
    ]
    records = engine.run([*low, *high])
    assert all(record.is_finished for record in records)
    ttft_s = [
        record.first_token_s - record.arrival_s
        for record in records
        if record.req_id.startswith("high")
    ]
    return ttft_s, engine.clock.now - start_s


@pytest.mark.parametrize("prompt_len", [100, 1000])
@pytest.mark.parametrize("policy", ["attain", "alise", "doubling"])
def test_decodes_of_a_lower_class_delay_no_prompt_by_their_drafts(
    policy: str, prompt_len: int
) -> None:
    """40 of them want 160 of the 128 tokens of a step: prompts waited until some had ended."""
    alone, _ = times_of_high(policy, 0, prompt_len)
    beside, all_s = times_of_high(policy, 40, prompt_len)
    # The step under way ends first, and those that go on lengthen the last one.
    assert max(beside) < max(alone) + 0.05, (alone, beside)
    assert all_s < 16.0, "the low ones lose no more than the prompts take"
