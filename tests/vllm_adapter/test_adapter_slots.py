"""Requests whose LoRA adapter waits for a slot, around a real vLLM scheduler in virtual time."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import sola_sched
from sola_sched.simulator import StepTimeModel, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)
POLICIES = [
    "attain",
    "paper",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("alise", "doubling")),
]


class Run:
    """Requests of a busy adapter `a` and two of another one, `b`; there is one adapter slot.

    Args:
        sola: Options; None for stock vLLM.
        b_first: Whether `b` is of a higher priority class.
        slots: Requests that run at once.
    """

    def __init__(
        self,
        sola: dict[str, Any] | None,
        *,
        b_first: bool = False,
        slots: int = 4,
    ) -> None:
        options: dict[str, Any] = {"scheduling_policy": "priority"} if b_first else {}
        if sola is not None:
            options["additional_config"] = {"sola_sched": {"ttft_s": 2.0, "tpot_s": 0.05} | sola}
        engine = VirtualEngine(
            AsyncScheduler if sola is None else sola_sched.Scheduler,
            model=TINY_MODEL,
            num_blocks=4000,
            max_model_len=4096,
            max_num_seqs=slots,
            max_num_batched_tokens=2048,
            step_time=STEP_TIME,
            **options,
        )
        engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
        rng = np.random.default_rng(0)
        requests = [
            VirtualRequest(
                f"a{i}",
                float(at_s),
                int(rng.integers(100, 400)),
                prompt_len=200,
                max_tokens=1000,
                priority=5 if b_first else 0,
            )
            for i, at_s in enumerate(np.cumsum(rng.exponential(0.4, 50)))
        ]
        requests += [
            VirtualRequest(f"b{i}", 5.0 + 5.0 * i, 20, prompt_len=200, max_tokens=1000)
            for i in range(2)
        ]
        for request in requests:
            engine.add(request)
            adapter = request.req_id[0]
            engine._requests[request.req_id].lora_request = LoRARequest(adapter, ord(adapter), "/")
        self.most_adapters = 0

        def note(trace: Any) -> None:
            adapters = {req_id[0] for req_id in trace.output.num_scheduled_tokens}
            self.most_adapters = max(self.most_adapters, len(adapters))

        engine.run([], on_step=note)
        self.scheduler = engine.scheduler
        self.records = {request.req_id: engine.record(request.req_id) for request in requests}

    def waits_s(self, adapter: str) -> list[float]:
        """Of its requests that got a first token."""
        return [
            record.first_token_s - record.arrival_s
            for req_id, record in self.records.items()
            if req_id[0] == adapter and record.first_token_s is not None
        ]

    @property
    def num_preemptions(self) -> int:
        return sum(record.num_preemptions for record in self.records.values())


@cache
def stock_wait_s(b_first: bool) -> float:
    """The longest wait of `b` under stock vLLM."""
    return max(Run(None, b_first=b_first).waits_s("b"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("b_first", [False, True])
def test_an_adapter_waits_for_a_slot_hardly_longer_than_under_stock_vllm(
    policy: str, b_first: bool
) -> None:
    stock_s, ours = stock_wait_s(b_first), Run({"policy": policy}, b_first=b_first)
    assert all(record.is_finished for record in ours.records.values())
    assert ours.most_adapters == 1
    assert max(ours.waits_s("b")) < 1.15 * stock_s


@pytest.mark.parametrize("policy", ["attain", "paper"])
def test_a_higher_class_that_waits_for_an_adapter_slot_displaces_nobody_for_nothing(
    policy: str,
) -> None:
    run = Run({"policy": policy}, b_first=True)
    assert run.num_preemptions < 10
    assert run.scheduler.sola_stats()["num_stalled"] == 0


def test_one_that_waits_for_an_adapter_slot_is_refused_when_it_is_late() -> None:
    run = Run({"overload": "reject"}, slots=64)
    assert not run.waits_s("b")
    assert len(run.waits_s("a")) == 50
    assert run.scheduler.sola_stats()["num_rejected"] == 2
