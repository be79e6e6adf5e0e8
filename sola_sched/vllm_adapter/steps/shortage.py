"""After a step in which something was short: what vLLM is told of it, and a deadlock is broken."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from sola_sched.vllm_adapter.steps.steering import place_of
from sola_sched.vllm_adapter.versions import WAITS_FOR_INPUT, Seams

if TYPE_CHECKING:
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin


class Shortage:
    """Knows what the engine of a scheduler is short of.

    Args:
        scheduler: vLLM's.
        seams: Of the same scheduler.
        min_budget: The fewest tokens with which vLLM starts a prefill that is computed in parts.

    Attributes:
        num_given_back: Requests whose KV was given back, since start.
    """

    def __init__(self, scheduler: SolaSchedulerMixin, seams: Seams, min_budget: int) -> None:
        self._scheduler, self._seams = scheduler, seams
        self._guard = scheduler.sola_guard
        self._min_budget = min_budget
        self._has_kept_some = False  # of those who wait, some for whom the engine had room
        self.num_given_back = 0

    def note_capacity(self, output: Any) -> None:
        """Tell vLLM after a planned step whether the engine is short of room for prefills.

        Of use with a cadence only. While room is short, vLLM lets prefills start at any step, also
        between those at which data parallel ranks have agreed to. It goes by whether anybody is
        left waiting; here by whether those who are find no slot, memory or tokens. Tokens that are
        short because a plan kept requests waiting do not count.
        """
        self._guard.book("telling what the engine is short of", self._note_capacity, output)

    def _note_capacity(self, output: Any) -> None:
        scheduler = self._scheduler
        first: Request | None = next(iter(scheduler.waiting), None)
        if first is None or not self._seams.num_ready():
            scheduler.prefill_capacity_bound = self._has_kept_some = False
            return
        is_chunked = scheduler.scheduler_config.enable_chunked_prefill
        left = scheduler.max_num_scheduled_tokens - output.total_num_scheduled_tokens
        lacks_tokens = left < (self._min_budget if is_chunked else first.num_tokens)
        self._has_kept_some |= not lacks_tokens
        blocks = -(-first.num_tokens // scheduler.block_size)
        scheduler.prefill_capacity_bound = (
            (lacks_tokens and not self._has_kept_some)
            or len(scheduler.running) >= self._seams.num_slots
            or blocks > scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        )

    def make_room(self) -> None:
        """Break a deadlock of vLLM's: all who could run wait, for KV that others of them hold.

        Streaming sessions hold KV while they wait. If they go on together and memory has no room
        for any, vLLM waits for ever; here the last of them gives its KV back, to be loaded or
        computed anew. Those that wait for their client's next input keep theirs: vLLM knows their
        answers by it.
        """
        self._guard.book("making room among those that wait", self._make_one_give_back)

    def _make_one_give_back(self) -> None:
        is_blocked, seams = self._scheduler._is_blocked_waiting_status, self._seams
        waiting = [r for r in seams.not_running() if r.status.name != WAITS_FOR_INPUT]
        # vLLM promotes those that its scan comes to, and it ends at the first without room.
        are_ready = [not is_blocked(r.status) or seams.promote(r) for r in waiting]
        if not all(are_ready):
            return  # a load or a grammar ends by itself
        holding = [r for r in waiting if r.num_computed_tokens]
        if not holding or len(waiting) == 1:
            return  # nobody's KV would help another
        last = max(holding, key=place_of)
        if seams.can_preempt(last):
            seams.give_back(last, time.monotonic())
            self.num_given_back += 1
