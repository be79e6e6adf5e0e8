"""Applying a plan: what vLLM's own `schedule()` gets to see for the length of one call.

Everything that it changes is put back after the call, whatever happens.
"""

from __future__ import annotations

import operator
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from sola_sched.core.state import PREFILL, IntArray, StepPlan
from sola_sched.vllm_adapter.steps.adapter_slots import AdapterSlots
from sola_sched.vllm_adapter.steps.guarded_queue import GuardedQueue
from sola_sched.vllm_adapter.versions import Seams

if TYPE_CHECKING:
    from sola_sched.vllm_adapter.requests.booking import Booking
    from sola_sched.vllm_adapter.requests.rejecting import Rejecting
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin
    from sola_sched.vllm_adapter.swap.swapping import Swapping

#: vLLM's order of waiting requests under its priority policy.
place_of = operator.attrgetter("priority", "arrival_time", "request_id")
#: The plan that changes nothing.
NEUTRAL = StepPlan()
#: The same where vLLM itself puts all prefills off: all decodes take part.
BETWEEN_PREFILLS = StepPlan(problem="cadence")
#: The same where all decode and nobody waits, so that there is nothing to show.
SETTLED = StepPlan(problem="decode")


class Steering:
    """Holds, orders, limits, preempts and rejects as a plan says.

    Args:
        scheduler: vLLM's. It gets a waiting queue of ours, until `step_aside`.
        seams: Of the same scheduler.
        booking: Knows the rows of those that run.
        rejecting: Ends those that a plan rejects.
        swapping: Copies KV to the host; None where nothing is swapped.
        honours_priority: Whether vLLM goes by the requests' priorities.

    Attributes:
        num_held: Requests with a slot that sit the latest step out.
        out_of_sight: The same while vLLM schedules: they are not in its `running` then.
        num_tokens: The most that the latest planned step could have.
        offered: Waiting requests that vLLM was shown in it; None for all.
        counts: Interventions since start, by name.
        has_cadence: Prefills start at some steps only (`--prefill-schedule-interval`).
        min_budget: The fewest tokens with which vLLM starts a prefill that is computed in parts.
    """

    def __init__(
        self,
        scheduler: SolaSchedulerMixin,
        seams: Seams,
        *,
        booking: Booking,
        rejecting: Rejecting,
        swapping: Swapping | None,
        honours_priority: bool,
    ) -> None:
        self._scheduler, self._seams = scheduler, seams
        self._adapters = AdapterSlots(scheduler, seams)
        self._booking, self._rejecting, self._swapping = booking, rejecting, swapping
        self._monitor, self._guard = scheduler.sola_monitor, scheduler.sola_guard
        scheduler.waiting = GuardedQueue(
            key=place_of if honours_priority else None,
            own_queue=seams.own_queue,
            without_place=seams.without_place,
            failed=scheduler.sola_guard.failed,
        )
        self._tokens_per_decode = 1 + int(scheduler.num_spec_tokens)
        # Chunks of models with aligned state must span a block, or they would never start.
        is_aligned = getattr(scheduler, "need_mamba_block_aligned_split", False)
        self.min_budget = scheduler.block_size if is_aligned else 1
        is_first_runner = not scheduler.vllm_config.use_v2_model_runner
        # vLLM's first model runner keeps the state of thinking budgets by place in the batch. When
        # one leaves and the last of the batch, without a budget, gets its place, the state stays.
        may_reason = scheduler.vllm_config.reasoning_config is not None
        self._keeps_places = may_reason and is_first_runner
        # Parts of an image attend to each other; on the CPU a seeded generator has no offset to be
        # set back to, which vLLM's first model runner does after each part of a prompt.
        self._keeps_items = bool(scheduler.scheduler_config.disable_chunked_mm_input)
        self._keeps_seeds = current_platform.is_cpu() and is_first_runner
        # Where prefills start at some steps only, vLLM asks what the engine is short of.
        self.has_cadence = scheduler.scheduler_config.prefill_schedule_interval > 1
        # Since the engine was idle, of those who came, some with a seed, or a thinking budget.
        self._has_seeds = self._has_budgets = False
        self._has_stepped_aside = False
        self._is_reordered = False  # `running`, by plans, since it was in vLLM's order
        # While vLLM schedules, what it had before: policy, tokens of a step, and of a chunk.
        self._before: tuple[Any, int, tuple[int, bool] | None] | None = None
        self.num_held = 0
        self.out_of_sight: list[Request] = []
        self.num_tokens = 0
        self.offered: list[Request] | None = None
        self.counts = dict.fromkeys(("num_held", "num_reordered", "num_preempted_by_policy"), 0)

    def received(self, request: Request) -> None:
        """A request is about to be added."""
        if not self._scheduler.requests:
            self._has_seeds = self._has_budgets = False
        self._has_seeds |= self._is_seeded(request)
        self._has_budgets |= self._must_take_part(request)

    def begin_step(self) -> None:
        """Call before a step is planned."""
        self.num_held = 0
        if not self._has_stepped_aside:
            self._scheduler.waiting.begin_step(self._seams.drained_first())

    def step_aside(self) -> None:
        """Give vLLM a waiting queue of its own again."""
        self._has_stepped_aside = True
        self._scheduler.waiting = self._seams.own_queue(self._scheduler.waiting)

    # Around vLLM's own step -----------------------------------------------------------------

    def show(self, plan: StepPlan) -> None:
        """Let vLLM see what the plan says, until `put_back`; all as it is where that fails."""
        scheduler = self._scheduler
        if self._is_reordered and plan.run is None and plan.problem == NEUTRAL.problem:
            self._put_in_own_order()
        if plan is SETTLED or (plan is NEUTRAL and not self._limits_vllm()):
            return
        running = scheduler.running
        may_limit = plan.prefill_cap is not None or self._shares_tokens()
        chunks = self._seams.chunk_limit() if may_limit else None
        self._before = scheduler.policy, scheduler.max_num_scheduled_tokens, chunks
        held: list[Request] = []
        try:
            held = self._show(plan)
        except Exception as error:
            self._guard.failed("applying a plan", error)
            scheduler.running = [r for r in running if r.status == RequestStatus.RUNNING]
            self.put_back()
        if held:
            self.out_of_sight, self.num_held = held, len(held)
            self._seams.add_slots(-len(held))

    def put_back(self) -> None:
        """Undo what `show` has changed. Call after vLLM's own step, whatever came of it."""
        if self._before is None:
            return
        scheduler = self._scheduler
        if self._seams.apart:
            self._seams.put_back()
        held, self.out_of_sight = self.out_of_sight, []
        if held:
            scheduler.running.extend(held)
            self._seams.add_slots(len(held))
        self.num_tokens = scheduler.max_num_scheduled_tokens
        scheduler.policy, scheduler.max_num_scheduled_tokens, chunks = self._before
        self._before = None
        if chunks is not None:
            self._seams.limit_chunks(*chunks)
        scheduler.waiting.unplan()

    def _put_in_own_order(self) -> None:
        """Requests with a slot in the order in which they got it, as vLLM would have them."""
        self._is_reordered = False
        try:
            self._scheduler.running = sorted(
                self._scheduler.running, key=self._booking.admission_of
            )
        except Exception as error:
            self._guard.failed_beside("putting requests back in vLLM's order", error)

    def _limits_vllm(self) -> bool:
        """Whether a step without a plan is not all vLLM's."""
        limits = self._counts_adapters() or self._has_seeds or self._shares_tokens()
        return limits and not self._has_stepped_aside

    def _counts_adapters(self) -> bool:
        """Whether adapters of all who run count, and of those whose KV is being loaded.

        vLLM goes by those that it computes in the step, and ends the engine if later too many are.
        Where plans are only counted nobody is held, so these are all who run; but while copies to
        the host hold blocks, whoever finds none waits for their end, and is not computed.
        """
        scheduler = self._scheduler
        if not scheduler.lora_config:
            return False
        is_shadow, swapping = scheduler.sola_support.is_shadow, self._swapping
        return not is_shadow or (swapping is not None and swapping.frees_soon())

    def _shares_tokens(self) -> bool:
        """Whether a step leaves tokens for all prompts that are computed in parts."""
        return self._has_budgets and not self._scheduler.sola_support.is_shadow

    def _show(self, plan: StepPlan) -> list[Request]:
        """Do what the plan says before vLLM's own step; returns the requests that sit it out."""
        scheduler = self._scheduler
        if len(plan.reject):
            self._rejecting.reject(self._requests(plan.reject))
        if len(plan.preempt):
            self._preempt(plan.preempt)
        # Adapters of requests about to be held count, so this comes before they are taken out.
        shown = None if plan.admit is None else self._requests(plan.admit)
        counts_adapters = self._counts_adapters()
        if counts_adapters or (shown is None and self._has_seeds):
            self._seams.merge_skipped()  # also where no plan was made
            shown = list(scheduler.waiting) if shown is None else shown
        if counts_adapters:
            active, late = self._adapters.count()
            asking, shown = shown or [], self._adapters.within(shown or (), active)
            if len(shown) < len(asking):
                self._seams.defer(set(asking).difference(shown))
            if late:
                self._seams.set_apart(list(late))
        if plan.run is not None:  # the plan orders by class itself: vLLM's victim is the last
            scheduler.policy = SchedulingPolicy.FCFS
        most = scheduler.max_num_scheduled_tokens
        is_limited = plan.token_budget is not None or plan.prefill_cap is not None
        may_be_whole = self._keeps_items or self._has_seeds
        is_whole = may_be_whole and self._starts_whole(plan, shown)
        if is_limited and not is_whole:
            self._limit(plan)
        held: list[Request] = []
        if plan.run is not None and not self._is_as_it_runs(plan.run):
            held, num_more = self._hold(plan.run, shown or [])
            scheduler.max_num_scheduled_tokens = min(
                most, scheduler.max_num_scheduled_tokens + num_more
            )
        if self._shares_tokens() and not is_whole:
            self._share_tokens(most)
        if shown is not None:
            shown = self._seeded_whole(shown) if self._has_seeds else shown
            scheduler.waiting.plan(shown)
        self.offered = shown
        return held

    def _limit(self, plan: StepPlan) -> None:
        """Let the step have no more tokens than the plan says, and each prefill."""
        scheduler = self._scheduler
        if plan.token_budget is not None:
            budget = max(self.min_budget, plan.token_budget)
            scheduler.max_num_scheduled_tokens = min(scheduler.max_num_scheduled_tokens, budget)
        if plan.prefill_cap is not None:
            self._limit_chunks(plan.prefill_cap)

    def _limit_chunks(self, cap: int) -> None:
        """Let each prefill have so many tokens, and no fewer than a decode with its drafts.

        vLLM holds decodes to that limit too, and expects that a request with one token left to
        compute, which it pads to the length of a decode, gets all of it.
        """
        cap = max(self.min_budget, self._tokens_per_decode, cap)
        self._seams.limit_chunks(min(cap, self._seams.max_chunk() or cap), False)

    # Those with a slot ----------------------------------------------------------------------

    def _is_as_it_runs(self, run: IntArray) -> bool:
        rows = self._booking.rows.of(self._scheduler.running)
        return len(run) == len(rows) == np.count_nonzero(run == rows)

    def _hold(self, run: IntArray, starting: list[Request]) -> tuple[list[Request], int]:
        """Reorder `running` as planned; returns who sits out, and the tokens of who must not.

        `run` names each row once; rows that have no slot (any more) are skipped.

        Args:
            run: Who takes part, in this order.
            starting: Waiting requests that may start in the same step.
        """
        running = self._scheduler.running
        rows = self._booking.rows.of(running)
        place_of = np.full(self._monitor.table.capacity, -1)
        place_of[rows] = np.arange(len(rows))
        places = place_of[run]
        places = places[places >= 0]
        sits_out = np.ones(len(rows), dtype=bool)
        sits_out[places] = False
        (left,) = sits_out.nonzero()
        decodes, parts = self._that_must(places, left, starting) if self._has_budgets else ([], [])
        num_more = len(decodes) * self._tokens_per_decode + len(parts) * self.min_budget
        if num_more:
            places = np.concatenate([decodes, places, parts]).astype(np.intp)
            left = left[~np.isin(left, [*decodes, *parts])]
        self._is_reordered = True
        held = [running[place] for place in left.tolist()]
        shown = list(map(running.__getitem__, places.tolist()))
        self.counts["num_reordered"] += bool(np.count_nonzero(places[1:] < places[:-1]))
        self.counts["num_held"] += len(held)
        self._scheduler.running = shown
        self._booking.rows.put(shown, rows[places])
        return held, num_more

    def _that_must(
        self, places: IntArray, left: IntArray, starting: list[Request]
    ) -> tuple[list[int], list[int]]:
        """Decodes and partly computed prompts of those left out that must take part all the same.

        Prompts need not where the batch does not shrink: then vLLM gives the places of those who
        leave it to those who come, and sets them up; else to others of the batch.
        """
        running = self._scheduler.running
        stays = [place for place in left.tolist() if self._must_take_part(running[place])]
        decodes = [place for place in stays if not running[place].is_prefill_chunk]
        in_batch = self._scheduler.prev_step_scheduled_req_ids
        parts = [place for place in stays if running[place].request_id in in_batch]
        parts = [place for place in parts if running[place].is_prefill_chunk]
        if parts:
            budget = self._scheduler.max_num_scheduled_tokens
            budget += len(decodes) * self._tokens_per_decode
            in_step = [running[place] for place in (*decodes, *places.tolist())]
            if self._num_in_step(in_step, starting, budget) >= len(in_batch):
                parts = []
        return decodes, parts

    def _num_in_step(self, running: list[Request], starting: list[Request], left: int) -> int:
        """Requests that a step of so many tokens computes of these, while memory lasts."""
        running = [request for request in running if not self._seams.is_ending(request)]
        longest = self._seams.max_chunk() or left
        for request in running:
            is_part = request.is_prefill_chunk
            num_new = request.num_tokens - request.num_computed_tokens
            left -= min(num_new, longest) if is_part else self._tokens_per_decode
        num_starting = 0
        for request in starting[: max(0, self._seams.num_slots - len(self._scheduler.running))]:
            if left < self.min_budget:
                break
            left -= min(request.num_tokens - request.num_computed_tokens, longest)
            num_starting += 1
        return len(running) + num_starting

    def _must_take_part(self, request: Request) -> bool:
        """Whether others may get wrong tokens when this one sits a step out."""
        params = request.sampling_params
        return (
            self._keeps_places and params is not None and params.thinking_token_budget is not None
        )

    def _share_tokens(self, most: int) -> None:
        """Share tokens among the prompts computed in parts, so that all who must get some.

        Else the first of them may leave none to those behind it, who would sit the step out.
        """
        scheduler = self._scheduler
        running = scheduler.running
        behind = [place for place, request in enumerate(running) if self._must_take_part(request)]
        if not behind:
            return
        ahead = running[: behind[-1] + 1]
        lacking = [r.num_tokens - r.num_computed_tokens for r in ahead if r.is_prefill_chunk]
        for_decodes = (len(ahead) - len(lacking)) * self._tokens_per_decode
        budget = scheduler.max_num_scheduled_tokens
        if for_decodes + sum(lacking) <= budget:
            return
        share = 0
        if lacking:
            share = max(self.min_budget, (budget - for_decodes) // len(lacking))
            self._limit_chunks(share)
        budget = max(budget, for_decodes + share * len(lacking))
        scheduler.max_num_scheduled_tokens = min(most, budget)

    def _requests(self, rows: IntArray) -> list[Request]:
        if not len(rows):
            return []
        req_id, requests = self._monitor.table.req_id, self._scheduler.requests
        return [requests[name] for row in rows.tolist() if (name := req_id[row]) in requests]

    def _preempt(self, rows: IntArray) -> None:
        scheduler = self._scheduler
        running, most = set(scheduler.running), scheduler.max_num_scheduled_tokens
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
        scheduler.running = [request for request in scheduler.running if request not in gone]
        timestamp = time.monotonic()
        for request in victims:
            self._seams.preempt(request, timestamp)
            self.counts["num_preempted_by_policy"] += 1

    # Prompts that must not be split ---------------------------------------------------------

    def _starts_whole(self, plan: StepPlan, shown: list[Request] | None) -> bool:
        """Whether a prefill of the step may be split by vLLM alone, not for a plan's sake."""
        rows = self._booking.rows.of(self._scheduler.running) if plan.run is None else plan.run
        rows = rows[self._monitor.table.phase[rows] == PREFILL]
        waiting = self._scheduler.waiting if shown is None else shown
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
        most = left = self._scheduler.max_num_scheduled_tokens
        longest = self._seams.max_chunk() or most
        for request in (*self._scheduler.running, *self._seams.resuming()):
            num_new = min(request.num_tokens - request.num_computed_tokens, longest)
            left -= max(num_new, self._tokens_per_decode)
        for place, request in enumerate(shown):
            num_new = request.num_tokens - request.num_computed_tokens
            if max(0, left) < num_new <= most and self._is_seeded(request):
                return shown[:place]
            left -= max(num_new, self._tokens_per_decode)
        return shown
