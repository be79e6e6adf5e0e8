"""`--no-enable-chunked-prefill` around a real vLLM scheduler, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL
from virtual_runs import STEP_TIME, attained, make_workload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import sola_sched
from sola_sched.simulator import VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

POLICIES = ["attain", "paper", "alise", "doubling"]
SLOW_POLICIES = [pytest.param(policy, marks=pytest.mark.slow) for policy in POLICIES[1:]]


def make_engine(scheduler_cls: type[Any], sola: dict[str, Any], **options: Any) -> VirtualEngine:
    defaults: dict[str, Any] = {
        "model": TINY_MODEL,
        "num_blocks": 4000,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "enable_chunked_prefill": False,
        "step_time": STEP_TIME,
        "additional_config": {"sola_sched": sola},
    }
    return VirtualEngine(scheduler_cls, **(defaults | options))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_beside_many_decodes_holds_nobody_up(policy: str) -> None:
    decodes = [VirtualRequest(f"d{i}", 0.01 * i, 600, prompt_len=50) for i in range(40)]
    long = VirtualRequest("long", 3.0, 20, prompt_len=4000)
    behind = [VirtualRequest(f"s{i}", 3.1 + 0.2 * i, 20, prompt_len=50) for i in range(10)]
    sola = {"policy": policy, "ttft_s": 2.0, "tpot_s": 0.05}
    engine = make_engine(sola_sched.Scheduler, sola)
    records = {r.req_id: r for r in engine.run([*decodes, long, *behind])}
    first_end_s = min(records[r.req_id].finished_s for r in decodes)
    assert all(r.is_finished for r in records.values())
    for request in [long, *behind]:
        waited_s = records[request.req_id].first_token_s - request.arrival_s
        assert waited_s < 2.0, (request.req_id, waited_s)
    assert first_end_s > 5.5, "decodes ran all the time"


@pytest.mark.parametrize("policy", ["attain", *SLOW_POLICIES])
def test_a_lost_long_prompt_is_served_beside_lasting_decodes(policy: str) -> None:
    """Its target cannot be met; it gets its first token long before the decodes end."""
    decodes = [VirtualRequest(f"d{i}", 0.01 * i, 2000, prompt_len=50) for i in range(40)]
    long = VirtualRequest("long", 3.0, 20, prompt_len=4000)
    behind = [VirtualRequest(f"s{i}", 3.1 + 0.2 * i, 20, prompt_len=50) for i in range(100)]
    sola = {"policy": policy, "ttft_s": 0.3, "tpot_s": 0.03}
    engine = make_engine(sola_sched.Scheduler, sola)
    records = {r.req_id: r for r in engine.run([*decodes, long, *behind])}
    assert all(r.is_finished for r in records.values())
    assert records["long"].first_token_s < 18.0
    assert min(records[r.req_id].finished_s for r in decodes) > 30.0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_with_whole_prompts_no_fewer_meet_their_slos_than_with_stock(
    async_scheduling: bool,
) -> None:
    workload = make_workload(200, 22.0)
    sola = {"ttft_s": 0.5, "tpot_s": 0.03}
    stock, ours = (
        make_engine(scheduler_cls, sola, async_scheduling=async_scheduling).run(workload)
        for scheduler_cls in (AsyncScheduler, sola_sched.Scheduler)
    )
    assert all(r.is_finished for r in ours)
    stock_share, our_share = attained(stock, 0.5, 0.03), attained(ours, 0.5, 0.03)
    assert our_share >= stock_share, f"ours {our_share:.3f}, stock {stock_share:.3f}"
