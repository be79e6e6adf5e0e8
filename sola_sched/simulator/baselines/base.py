"""What all baseline policies share: a rule in front of vLLM's own `schedule()`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.queues import PlannedQueue
from sola_sched.vllm_adapter.steps.adapter_slots import AdapterSlots
from sola_sched.vllm_adapter.versions import Seams, check_version


@dataclass(frozen=True, slots=True)
class Rule:
    """What vLLM may see in one step.

    Attributes:
        admit: Waiting requests that may start, in order; None for all in queue order.
        holds_decodes: Running requests past their prompt sit this step out.
        token_budget: Most tokens of the step; None for vLLM's own.
    """

    admit: list[Request] | None = None
    holds_decodes: bool = False
    token_budget: int | None = None


STOCK = Rule()


class Baseline(AsyncScheduler):
    """vLLM's scheduler with a rule in front of each `schedule()`; this class adds none.

    Options are read where `sola_sched.Scheduler` reads them: default SLO and SLO classes.

    Attributes:
        sola_clock: Monotonic time in seconds; replaceable.
        sola_wall_clock: Time on the scale of `Request.arrival_time`; replaceable likewise.

    Raises:
        ValueError: The engine's scheduling policy is not `fcfs`.
    """

    running: list[Request]
    waiting: PlannedQueue[Request]
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(vllm.__version__)
        super().__init__(*args, **kwargs)
        if self.policy != SchedulingPolicy.FCFS:
            raise ValueError(
                f"'scheduling_policy' must be fcfs for {type(self).__name__}, which has an order "
                f"of its own (got {self.policy.value!r}); use vLLM's scheduler for the others."
            )
        self._seams = Seams(self)
        self._adapters = AdapterSlots(self, self._seams)
        self.sola_config = SolaConfig.from_additional(self.vllm_config.additional_config)
        self.sola_clock: Callable[[], float] = time.monotonic
        self.sola_wall_clock: Callable[[], float] = time.time
        self.waiting = PlannedQueue()
        self._stalled = False

    def plan(self) -> Rule:
        """The rule; called once a step, before vLLM's `schedule()`."""
        return STOCK

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._seams.merge_skipped()
        plan = STOCK if self._stalled else self.plan()
        with self._applied(plan):
            output = super().schedule(*args, **kwargs)
        # Requests that only vLLM knows to be blocked (grammar, KV transfer) must not hold decodes.
        self._stalled = plan.holds_decodes and not output.num_scheduled_tokens
        return output

    @contextmanager
    def _applied(self, plan: Rule) -> Iterator[None]:
        if plan is STOCK:
            yield
            return
        if plan.admit is not None:
            self.waiting.plan(self._adapters.within(plan.admit))
        held = [r for r in self.running if plan.holds_decodes and not r.is_prefill_chunk]
        if held:
            self.running = [r for r in self.running if r.is_prefill_chunk]
        budget, slots = self.max_num_scheduled_tokens, self._seams.slots_attribute
        num_slots = getattr(self, slots)
        setattr(self, slots, num_slots - len(held))
        self.max_num_scheduled_tokens = min(budget, plan.token_budget or budget)
        try:
            yield
        finally:
            self.running = [*held, *self.running]
            self.max_num_scheduled_tokens = budget
            setattr(self, slots, num_slots)
            self.waiting.unplan()

    def _num_free_slots(self) -> int:
        return self._seams.num_slots - len(self.running)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class Ordered(Baseline):
    """A key decides which waiting request starts next; what has started is not displaced.

    Requests that lost their KV come first, as they have started, in vLLM's order.
    """

    def plan(self) -> Rule:
        if len(self.waiting) < 2 or self._num_free_slots() <= 0:
            return STOCK
        keys = self.keys(list(self.waiting))
        if keys is None:
            return STOCK
        # The sort is stable: ties keep the order of the queue.
        order = sorted(
            zip(self.waiting, keys, strict=True),
            key=lambda pair: (-1, 0.0) if pair[0].num_preemptions else (0, pair[1]),
        )
        return Rule(admit=[request for request, _ in order])

    @abstractmethod
    def keys(self, waiting: list[Request]) -> list[float] | None:
        """A number per request, smallest first; None for the order of arrival."""
