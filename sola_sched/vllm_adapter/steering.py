"""Applying a plan: what vLLM's own `schedule()` gets to see for the length of one call.

A mix-in; everything that it changes is put back after the call, whatever happens.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from sola_sched.core.monitor import StateMonitor
from sola_sched.core.running_rows import RunningRows
from sola_sched.core.state import PREFILL, IntArray, StepPlan
from sola_sched.reports.refusals import Refusal
from sola_sched.vllm_adapter.guard import Guard
from sola_sched.vllm_adapter.guarded_queue import GuardedQueue
from sola_sched.vllm_adapter.versions import WAITS_FOR_INPUT, Seams

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    _Host: type[Any] = AsyncScheduler
else:
    _Host = object

#: vLLM's order of waiting requests under its priority policy.
place_of = operator.attrgetter("priority", "arrival_time", "request_id")
#: The plan that changes nothing.
NEUTRAL = StepPlan()
#: The same where vLLM itself puts all prefills off: all decodes take part.
BETWEEN_PREFILLS = StepPlan(problem="cadence")


class SteeringMixin(_Host):
    """Hides, orders, limits, preempts and refuses as a plan says."""

    policy: Any
    running: list[Request]
    waiting: GuardedQueue
    max_num_scheduled_tokens: int
    sola_guard: Guard
    sola_monitor: StateMonitor
    _seams: Seams
    _rows: RunningRows[Request]
    _counts: dict[str, int]
    _has_stepped_aside: bool
    _tokens_per_decode: int

    def _start_steering(self) -> None:
        # Chunks of models with aligned state must span a block, or they would never start.
        self._min_budget = (
            self.block_size if getattr(self, "need_mamba_block_aligned_split", False) else 1
        )
        self._num_hidden = 0  # of those that hold a slot: they sit this step out
        self._num_unseen = 0  # the same while vLLM schedules
        self._has_kept_some = False  # of those who wait, some for whom the engine had room
        # vLLM's first model runner keeps the state of thinking budgets by place in the batch: the
        # place that a request with one leaves passes its state on to whoever gets it.
        self._keeps_places = (
            self.vllm_config.reasoning_config is not None
            and not self.vllm_config.use_v2_model_runner
        )
        # Parts of an image attend to each other; on the CPU a seeded generator has no offset to be
        # set back to, which vLLM's first model runner does after each part of a prompt.
        self._keeps_items = bool(self.scheduler_config.disable_chunked_mm_input)
        self._keeps_seeds = current_platform.is_cpu() and not self.vllm_config.use_v2_model_runner
        self._has_seeds = False  # since the engine was idle, of those who came, some with a seed
        self._is_rejecting = False
        self._rejected: list[Request] = []

    def add_request(self, request: Request) -> None:
        if self._keeps_seeds:
            is_first = not self.requests
            self._has_seeds = self._is_seeded(request) or (self._has_seeds and not is_first)
        super().add_request(request)

    @contextmanager
    def _applied(self, plan: StepPlan) -> Iterator[None]:
        """Show vLLM what the plan lets it see; put everything back afterwards."""
        shows_some = (self.lora_config or self._has_seeds) and not self._has_stepped_aside
        if plan is NEUTRAL and not shows_some:
            yield
            return
        slots, running = self._seams.slots_attribute, self.running
        num_slots, limits = getattr(self, slots), self._limits()
        hidden: list[Request] = []
        try:
            hidden = self._show(plan)
        except Exception as error:
            self.sola_guard.failed("applying a plan", error)
            self.running = [r for r in running if r.status == RequestStatus.RUNNING]
            self._limits(limits)
            self.waiting.unplan()
        self._num_hidden = self._num_unseen = len(hidden)
        setattr(self, slots, num_slots - len(hidden))
        try:
            yield
        finally:
            self.running.extend(hidden)
            self._num_unseen = 0
            self._limits(limits)
            setattr(self, slots, num_slots)
            self.waiting.unplan()

    def _limits(self, limits: tuple[Any, int, Any] | None = None) -> tuple[Any, int, Any]:
        """What a plan changes for one step; put back first if `limits` are given."""
        chunks = None
        if limits is not None:
            self.policy, self.max_num_scheduled_tokens, chunks = limits
        return self.policy, self.max_num_scheduled_tokens, self._seams.limit_chunks(chunks)

    def get_request_counts(self) -> tuple[int, int]:
        """Requests with a slot and without, as vLLM counts them, those that are hidden included."""
        num_running, num_waiting = super().get_request_counts()
        return num_running + self._num_unseen, num_waiting

    def _note_capacity(self, output: Any) -> None:
        """Tell vLLM after a planned step whether the engine is short of room for prefills.

        While it is, vLLM lets them start at any step, also between those at which data parallel
        ranks have agreed to. It goes by whether anybody is left waiting; here by whether those who
        are find no slot, memory or tokens. Tokens that are short because a plan kept requests
        waiting do not count.
        """
        first: Request | None = next(iter(self.waiting), None)
        if first is None or not self._seams.num_ready():
            self.prefill_capacity_bound = self._has_kept_some = False
            return
        is_chunked = self.scheduler_config.enable_chunked_prefill
        left = self.max_num_scheduled_tokens - output.total_num_scheduled_tokens
        lacks_tokens = left < (self._min_budget if is_chunked else first.num_tokens)
        self._has_kept_some |= not lacks_tokens
        blocks = -(-first.num_tokens // self.block_size)
        self.prefill_capacity_bound = (
            (lacks_tokens and not self._has_kept_some)
            or len(self.running) >= self._seams.num_slots
            or blocks > self.kv_cache_manager.block_pool.get_num_free_blocks()
        )

    def _show(self, plan: StepPlan) -> list[Request]:
        """Do what the plan says before vLLM's own step; returns the requests that sit it out."""
        if len(plan.reject):
            self._reject(plan.reject)
        if len(plan.preempt):
            self._preempt_rows(plan.preempt)
        # Adapters of requests about to be hidden count, so this comes before hiding them.
        shown: list[Request] | None = None
        if plan.admit is not None or self.lora_config or self._has_seeds:
            offered = self.waiting if plan.admit is None else self._requests(plan.admit)
            shown = self._seams.within_max_loras(offered)
        run = None if plan.run is None or self._is_as_it_runs(plan.run) else plan.run
        if plan.run is not None:  # the plan orders by class itself: vLLM's victim is the last
            self.policy = SchedulingPolicy.FCFS
        most = self.max_num_scheduled_tokens
        is_limited = plan.token_budget is not None or plan.prefill_cap is not None
        if is_limited and not self._starts_whole(plan, shown):
            self._limit(plan)
        hidden: list[Request] = []
        if run is not None:
            hidden, num_more = self._hide(run)
            budget = self.max_num_scheduled_tokens + num_more * self._tokens_per_decode
            self.max_num_scheduled_tokens = min(most, budget)
        if shown is not None:
            self.waiting.plan(self._seeded_whole(shown) if self._has_seeds else shown)
        return hidden

    def _limit(self, plan: StepPlan) -> None:
        """Let the step have no more tokens than the plan says, and each prefill."""
        if plan.token_budget is not None:
            budget = max(self._min_budget, plan.token_budget)
            self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, budget)
        if plan.prefill_cap is not None:
            cap = max(self._min_budget, plan.prefill_cap)
            self._seams.limit_chunks((min(cap, self._seams.max_chunk() or cap), False))

    def _is_as_it_runs(self, run: IntArray) -> bool:
        rows = self._rows.of(self.running)
        return len(run) == len(rows) == np.count_nonzero(run == rows)

    def _hide(self, run: IntArray) -> tuple[list[Request], int]:
        """Reorder `running` as planned; returns who sits out, and how many must take part beyond.

        `run` names each row once; rows that have no slot (any more) are skipped.
        """
        running, rows = self.running, self._rows.of(self.running)
        place_of = np.full(self.sola_monitor.table.capacity, -1)
        place_of[rows] = np.arange(len(rows))
        places = place_of[run]
        places = places[places >= 0]
        sits_out = np.ones(len(rows), dtype=bool)
        sits_out[places] = False
        (held,) = sits_out.nonzero()
        stays = [place for place in held.tolist() if self._must_take_part(running[place])]
        if stays:
            places, held = np.concatenate([stays, places]), held[~np.isin(held, stays)]
        hidden = [running[place] for place in held.tolist()]
        shown = list(map(running.__getitem__, places.tolist()))
        self._counts["num_reordered"] += bool(np.count_nonzero(places[1:] < places[:-1]))
        self._counts["num_held"] += len(hidden)
        self.running = shown
        self._rows.put(shown, rows[places])
        return hidden, len(stays)

    def _starts_whole(self, plan: StepPlan, shown: list[Request] | None) -> bool:
        """Whether a prefill of the step may be split by vLLM alone, not for a plan's sake."""
        if not (self._keeps_items or self._has_seeds):
            return False
        rows = self._rows.of(self.running) if plan.run is None else plan.run
        rows = rows[self.sola_monitor.table.phase[rows] == PREFILL]
        waiting = self.waiting if shown is None else shown
        return any(map(self._is_whole, (*self._requests(rows), *self._seams.resuming(), *waiting)))

    def _is_whole(self, request: Request) -> bool:
        return self._is_seeded(request) or (self._keeps_items and bool(request.mm_features))

    def _is_seeded(self, request: Request) -> bool:
        params = request.sampling_params
        return self._keeps_seeds and params is not None and params.seed is not None

    def _seeded_whole(self, shown: list[Request]) -> list[Request]:
        """Those before the first prompt with a seed that the step would have to split.

        Whoever is behind it waits too, as where vLLM splits no prompts: it starts as soon as those
        who run leave room. A prompt longer than any step is left to vLLM.
        """
        most = left = self.max_num_scheduled_tokens
        longest = self._seams.max_chunk() or most
        for request in (*self.running, *self._seams.resuming()):
            num_new = min(request.num_tokens - request.num_computed_tokens, longest)
            left -= max(num_new, self._tokens_per_decode)
        for place, request in enumerate(shown):
            num_new = request.num_tokens - request.num_computed_tokens
            if max(0, left) < num_new <= most and self._is_seeded(request):
                return shown[:place]
            left -= max(num_new, self._tokens_per_decode)
        return shown

    def _must_take_part(self, request: Request) -> bool:
        """Whether others get wrong tokens when this decode sits a step out."""
        params = request.sampling_params
        return (
            self._keeps_places
            and params is not None
            and params.thinking_token_budget is not None
            and not request.is_prefill_chunk
        )

    def _requests(self, rows: IntArray) -> Iterable[Request]:
        req_id, requests = self.sola_monitor.table.req_id, self.requests
        return (requests[name] for row in rows.tolist() if (name := req_id[row]) in requests)

    def _preempt_rows(self, rows: IntArray) -> None:
        running, most = set(self.running), self.max_num_scheduled_tokens
        victims = [
            request
            for request in self._requests(rows)
            if request in running
            and self._seams.can_preempt(request)
            and not (self._is_seeded(request) and request.num_tokens > most)
            and not self._seams.is_ending(request)  # it gives all it has by itself
        ]
        if not victims:
            return
        gone = set(victims)
        self.running = [request for request in self.running if request not in gone]
        timestamp = time.monotonic()
        for request in victims:
            self._seams.preempt(request, timestamp)
            self._counts["num_preempted_by_policy"] += 1

    def _make_one_give_back(self) -> None:
        """Break a deadlock of vLLM's: all who could run wait, for KV that others of them hold.

        Streaming sessions hold KV while they wait. If they go on together and memory has no room
        for any, vLLM waits for ever; here the last of them gives its KV back, to be loaded or
        computed anew. Those that wait for their client's next input keep theirs: vLLM knows their
        answers by it.
        """
        waiting = [r for r in self._seams.not_running() if r.status.name != WAITS_FOR_INPUT]
        if any(self._is_blocked_waiting_status(r.status) for r in waiting):
            return  # a load or a grammar ends by itself
        holding = [r for r in waiting if r.num_computed_tokens]
        if not holding or len(waiting) == 1:
            return  # nobody's KV would help another
        last = max(holding, key=place_of)
        if self._seams.can_preempt(last):
            self._seams.give_back(last, time.monotonic())
            self._counts["num_kv_given_back"] += 1

    def _reject(self, rows: IntArray) -> None:
        for request in list(self._requests(rows)):
            if request in self.waiting:
                row = self.sola_monitor.table.row_of[request.request_id]
                refusal = Refusal.of_row(self.sola_monitor.table, row)
                request.stop_reason = refusal.to_stop_reason()
                self._rejected.append(request)  # before anything can fail: it must be answered
                self._is_rejecting = True
                try:
                    self.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR)
                finally:
                    self._is_rejecting = False

    def _answer_rejected(self, outputs: Any) -> None:
        """A rejected request is answered: its stream ends with finish reason "error"."""
        while self._rejected:
            request = self._rejected[0]
            if request.is_finished():  # else it could not be refused, and goes on
                answer = EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=request.stop_reason,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
                group = outputs.setdefault(request.client_index, EngineCoreOutputs())
                group.outputs.append(answer)
            del self._rejected[0]
