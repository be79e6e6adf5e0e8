"""When prefills may start where vLLM puts them off, under every plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from loaded_engine import MODES, changed, make_engine, make_workload, with_policy
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import sola_sched
from sola_sched.simulator import StepTrace, VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.versions import Seams

pytestmark = pytest.mark.vllm

POLICIES = pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
INTERVAL = 4


def prompt_tokens(requests: list[VirtualRequest]) -> Callable[[Any], int]:
    """Counts the prompt tokens of one step after the other."""
    left = Counter({r.req_id: r.num_prompt_tokens for r in requests})

    def count(output: Any) -> int:
        total = 0
        for name, tokens in output.num_scheduled_tokens.items():
            total += min(left[name], tokens)
            left[name] -= min(left[name], tokens)
        return total

    return count


class Rank:
    """One of the engines that have agreed at which steps prefills start.

    Attributes:
        off, on: Steps with prompt tokens, between the agreed ones beside decodes, and at them.
        num_short: Steps after which vLLM held the engine to be short of room.
        broken: Steps between the agreed ones that computed prompts beside decodes although the
            engine was not short.
    """

    def __init__(self, engine: VirtualEngine, requests: list[VirtualRequest]) -> None:
        self.engine = engine
        self.off = self.on = self.num_short = 0
        self.broken: list[int] = []
        self.counter = 0
        self._schedule, self._count = engine.scheduler.schedule, prompt_tokens(requests)
        if isinstance(engine.scheduler, sola_sched.Scheduler):  # by its options one engine alone
            engine.scheduler._steering.has_cadence = True
        engine.scheduler.schedule = self._throttled
        for request in requests:
            engine.add(request)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or self.engine.has_arrivals

    def _throttled(self) -> Any:
        scheduler, is_between = self.engine.scheduler, self.counter % INTERVAL != 0
        has_decodes = any(not r.is_prefill_chunk for r in scheduler.running)
        was_short = scheduler.prefill_capacity_bound
        output = self._schedule(is_between)
        if self._count(output):
            self.on += not is_between
            self.off += is_between and has_decodes
            if is_between and has_decodes and not was_short:
                self.broken.append(self.counter)
        self.num_short += scheduler.prefill_capacity_bound
        return output

    def step(self, counter: int) -> None:
        """The engine core counts steps together with the other ranks."""
        self.counter = counter
        if not self.engine.has_work and self.engine.has_arrivals:
            self.engine.clock.now = max(self.engine.clock.now, self.engine._arrivals[0][0])
        if self.has_work:
            self.engine.step()


def run_ranks(
    scheduler_cls: type[Any], rate_per_s: float, *, adapters: str = "", **options: Any
) -> list[Rank]:
    """Ranks that have ended their load; with `adapters`, in turn, there is a slot for one."""
    ranks = []
    for rank in range(2):
        requests = make_workload(48, rate_per_s)[rank::2]
        engine = make_engine(scheduler_cls, max_num_batched_tokens=2048, **options)
        ranks.append(Rank(engine, requests))
        if adapters:
            engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
        for number, request in enumerate(requests if adapters else ()):
            name = adapters[number % len(adapters)]
            lora = LoRARequest(name, ord(name), "/")
            engine._requests[request.req_id].lora_request = lora
    counter = 0
    while any(rank.has_work for rank in ranks):
        for rank in ranks:
            rank.step(counter)
        counter += 1
    return ranks


@MODES
@POLICIES
def test_prefills_of_several_ranks_start_at_the_agreed_steps(policy: str, is_async: bool) -> None:
    """At a load at which stock vLLM is never short of room, though plans keep prompts waiting."""
    stock = run_ranks(AsyncScheduler if is_async else Scheduler, 8.0, async_scheduling=is_async)
    ours = run_ranks(sola_sched.Scheduler, 8.0, async_scheduling=is_async, sola=with_policy(policy))

    for rank in stock + ours:
        assert rank.off == 0
        assert rank.on > 10
    assert [len(r.engine.records) for r in ours] == [24, 24]


@MODES
@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling", None])
def test_who_waits_for_the_slot_of_its_adapter_is_not_short_of_room(
    policy: str | None, is_async: bool
) -> None:
    """Stock vLLM skips it without counting it; else prefills of others would start at any step."""
    without_targets = {"sola_sched": {"ttft_s": None, "tpot_s": None}}
    sola = without_targets if policy is None else with_policy(policy)
    stock_cls = AsyncScheduler if is_async else Scheduler
    stock = run_ranks(stock_cls, 8.0, adapters="ab", async_scheduling=is_async)
    ours = run_ranks(sola_sched.Scheduler, 8.0, adapters="ab", async_scheduling=is_async, sola=sola)

    for rank in stock + ours:
        assert (rank.off, rank.num_short) == (0, 0)
        assert rank.on > 4
    assert [len(r.engine.records) for r in ours] == [24, 24]


@MODES
def test_ranks_that_are_short_of_room_start_prefills_at_any_step(is_async: bool) -> None:
    """As stock vLLM: a cadence would only make the queues longer."""
    options = {"async_scheduling": is_async, "max_num_seqs": 8}
    for cls in (AsyncScheduler if is_async else Scheduler, sola_sched.Scheduler):
        for rank in run_ranks(cls, 100.0, **options):
            assert rank.broken == []
            assert rank.num_short > 3
            assert rank.off > 2


@pytest.mark.parametrize(
    ("facts", "is_throttled", "defers"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"prefill_capacity_bound": True}, True, False),
        ({"running": [SimpleNamespace(is_prefill_chunk=True)]}, True, False),
        ({"running": []}, True, False),
        ({"local_prefill_interval": 4, "num_executed_steps": 9}, False, True),
        ({"local_prefill_interval": 4, "num_executed_steps": 11}, False, False),
        ({"local_prefill_interval": 1, "num_executed_steps": 9}, False, False),
    ],
)
def test_when_vllm_puts_prefills_off(
    facts: dict[str, Any], is_throttled: bool, defers: bool
) -> None:
    """Asked of data parallel ranks by the engine core; of one engine from 0.33 on by a count."""
    seams = Seams.__new__(Seams)
    decode = SimpleNamespace(is_prefill_chunk=False)
    base: dict[str, Any] = {"prefill_capacity_bound": False, "running": [decode]}
    seams._scheduler = SimpleNamespace(**{**base, "last_prefill_step": 8, **facts})

    assert seams.defers_prefills(is_throttled) is defers


@pytest.mark.parametrize(("interval", "has_cadence"), [(1, False), (INTERVAL, True)])
def test_the_operators_interval_makes_a_cadence(interval: int, has_cadence: bool) -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments["vllm_config"].scheduler_config.prefill_schedule_interval = interval

    engine = make_engine(changed(sola_sched.Scheduler, change))

    assert engine.scheduler._steering.has_cadence is has_cadence


def test_one_engine_keeps_its_own_cadence() -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments["vllm_config"].scheduler_config.prefill_schedule_interval = INTERVAL

    requests = make_workload(40, 8.0)
    engine = make_engine(changed(sola_sched.Scheduler, change), max_num_batched_tokens=2048)
    if not hasattr(engine.scheduler, "local_prefill_interval"):
        pytest.skip("vLLM before 0.33 has no cadence for one engine")
    count, with_prompts, num_decodes = prompt_tokens(requests), [], []

    def note(trace: StepTrace) -> None:
        tokens = count(trace.output)
        with_prompts.append(tokens > 0)
        num_decodes.append(len(trace.output.num_scheduled_tokens))

    engine.run(requests, on_step=note)

    last, near = -INTERVAL, 0
    for step, has in enumerate(with_prompts):
        near += has and step - last < INTERVAL and num_decodes[step - 1] > 0
        last = step if has else last
    assert sum(with_prompts) > 20
    assert near <= 1, "only the first ones, which find nobody who decodes"
