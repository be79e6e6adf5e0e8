"""`sola_sched.Scheduler`: vLLM's V1 scheduler, steered by a planner.

vLLM's own `schedule()` does the work - prefix cache, block allocation, structured output,
speculative decoding, LoRA, KV connectors. Before each call the mixin observes the state and asks
the planner; around the call it applies the plan through narrow seams; afterwards it puts back
what it hid. See `docs/design.md` for the seams and the rules they follow.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from sola_sched.config.slo import CLASS_KEY, DEFAULT_CLASS, SloTarget, request_target
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.arrivals import ArrivalClock
from sola_sched.core.ewt import update_waits
from sola_sched.core.monitor import LiveRequest, StateMonitor
from sola_sched.core.queues import PlannedQueue
from sola_sched.core.running_rows import RunningRows
from sola_sched.core.state import DECODE, PREFILL, IntArray, StepPlan
from sola_sched.cost.model import CostModel
from sola_sched.errors import SloError
from sola_sched.length_predictor.client import make_client
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.planner import (
    Planner,
    in_class_order,
    make_planner,
    with_padding,
    with_room_to_resume,
)
from sola_sched.reports.log import IntervalLog, engine_stats, waits_for_slots_alone
from sola_sched.reports.refusals import Refusal
from sola_sched.vllm_adapter.engine_facts import differences, facts_of
from sola_sched.vllm_adapter.guard import Guard
from sola_sched.vllm_adapter.support import support_of
from sola_sched.vllm_adapter.swapping import SwapMixin
from sola_sched.vllm_adapter.telemetry_sender import TelemetrySender
from sola_sched.vllm_adapter.versions import Seams, check_version

# A child of vLLM's logger: its level and handlers are the ones an operator has set up.
logger = init_logger("vllm.sola_sched")

_NEUTRAL = StepPlan()
_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
_id_of = operator.attrgetter("request_id")
_tokens_of = operator.attrgetter("new_token_ids")
#: vLLM's order of waiting requests under its priority policy.
_place_of = operator.attrgetter("priority", "arrival_time", "request_id")
#: How requests end with a complete answer, and how by an error of the engine.
_BY_ITSELF = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)
_FAILED = (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)
#: Waiting requests whose prefix is looked up in the cache at a step; a new one is at once.
_LOOKUPS_PER_STEP = 4
#: Plans between two estimates of the waits: where swapping goes by them, and where nobody does.
_REVIEW_PLANS, _REPORT_PLANS = 16, 128
#: Weight of one plan in so many in the running means.
_REVIEW_WEIGHT = 1.0 / 32.0


class SolaSchedulerMixin(SwapMixin):
    """SOLA's observe - plan - apply loop around the `schedule()` of a vLLM scheduler.

    Mix it in before any class derived from vLLM's `AsyncScheduler` (or `Scheduler`, which loses
    asynchronous scheduling). Under asynchronous scheduling `schedule()` runs again before the
    previous step's output is known, so the observed state lags the step in flight; tokens in
    flight are accounted for as delivered at the step's predicted end.

    Attributes:
        sola_clock: Monotonic time in seconds; replaceable, e.g. by a simulator.
        sola_wall_clock: Time on the scale of `Request.arrival_time`; replaceable likewise.
        sola_cpu_clock: Processor time of this thread in seconds, which plans are held to.
        sola_guard: What failed so far; see `Guard`.
        sola_support: Whether the engine is steered, and with which limits.
    """

    policy: Any
    running: list[Request]
    waiting: PlannedQueue[Request]
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(vllm.__version__)
        super().__init__(*args, **kwargs)
        self._seams = Seams(self)
        self._start_swapping()
        self.sola_config = SolaConfig.from_additional(self.vllm_config.additional_config)
        self.sola_clock: Callable[[], float] = time.monotonic
        self.sola_wall_clock: Callable[[], float] = time.time
        self.sola_cpu_clock: Callable[[], float] = time.thread_time
        self.sola_guard = Guard(logger)
        config = self.sola_config
        self.sola_monitor = StateMonitor(
            self._new_cost_model(), LengthHistogram(), lambda: self.sola_clock()
        )
        self.sola_planner = self._new_planner()
        self.sola_predictions = make_client(config, self.vllm_config.model_config)
        self._honours_priority = self.policy == SchedulingPolicy.PRIORITY
        self.waiting = PlannedQueue(key=_place_of if self._honours_priority else None)
        self.sola_support = support_of(self.vllm_config, config)
        self._tokens_per_decode = 1 + int(self.num_spec_tokens)
        self._default_slo = config.default_slo
        self._num_blocks = max(1, self.kv_cache_manager.block_pool.num_gpu_blocks - 1)
        # Chunks of models with aligned state must span a block, or they would never start.
        self._min_budget = (
            self.block_size if getattr(self, "need_mamba_block_aligned_split", False) else 1
        )
        self._rows: RunningRows[Request] = RunningRows(self.sola_monitor.table.row_of)
        self._planned_rows = _NO_ROWS  # of those that ran when the step was planned
        self._num_hidden = 0  # of those that hold a slot: they sit this step out
        self._next_lookup = 0
        self._is_updating = False
        self._has_stepped_aside = False
        self._num_in_flight = 0  # steps scheduled and not yet updated
        self._stalled = False
        self._arrivals = ArrivalClock()
        self._arrived_s: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._is_rejecting = False
        self._ended: list[tuple[str, RequestStatus]] = []
        self._rejected: list[Request] = []
        self._counts = dict.fromkeys(
            (
                "num_held",
                "num_reordered",
                "num_preempted_by_policy",
                "num_invalid_slo",
                "num_stalled",
            ),
            0,
        )
        self._problems: dict[str, int] = {}
        self._interval_log = IntervalLog(config.log_interval_s)
        self._num_plans = 0
        self._short_of_slots = 0.0
        self._plan_s = 0.0
        self._telemetry = TelemetrySender(log_stats=bool(getattr(self, "log_stats", False)))
        logger.info(
            "sola_sched: policy %s, targets by default: %s%s; cost model %s",
            config.policy,
            self._default_slo,
            "".join(f"; of class {name!r}: {slo}" for name, slo in config.classes.items()),
            config.profile or "learned from live steps",
        )
        tell = logger.warning if self.sola_support.own_order else logger.info
        tell("sola_sched: %s", self.sola_support)

    def _new_planner(self) -> Planner:
        """The planner, at start and whenever the state is built anew."""
        return make_planner(self.sola_config)

    def _new_cost_model(self) -> CostModel:
        """The profile's, which says what is wrong with it; an empty one that learns without."""
        config = self.sola_config
        if config.profile is None:
            return CostModel(alpha=config.alpha)
        cost = CostModel.load(config.profile, alpha=config.alpha)
        cost.on_relearned = partial(logger.warning, "sola_sched: profile %s: %s", config.profile)
        if other := differences(cost.meta, facts_of(self.vllm_config)):
            logger.warning(
                "sola_sched: profile %s was measured on another engine: %s. Its step times are "
                "corrected while this one runs; measure it with `python -m sola_sched.profile`.",
                config.profile,
                ", ".join(other),
            )
        return cost

    # Arrivals and ends ----------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._book("booking an arrival", self._arrived, request)
        super().add_request(request)

    def _book(self, doing: str, action: Callable[..., None], *args: Any) -> None:
        """Let the state follow an event of the engine; a state that is lost follows nothing."""
        if self.sola_guard.is_lost:
            return
        try:
            action(*args)
        except Exception as error:
            self.sola_guard.failed(doing, error)

    def _arrival_s(self, request: Request) -> float:
        """Its arrival on our clock, as it was found at its receipt."""
        arrival_s = self._arrived_s.get(request)
        if arrival_s is None:
            now_s = self.sola_clock()
            arrival_s = self._arrived_s[request] = now_s - self._wait_s(request, now_s)
        return arrival_s

    def _wait_s(self, request: Request, now_s: float) -> float:
        """How long it has waited until now; its stamp is of another process' wall clock."""
        clock = self._arrivals
        if not self.requests:
            clock.look(now_s)
        wall_s, num_before = self.sola_wall_clock(), clock.num_implausible
        wait_s = clock.wait_s(
            request.arrival_time, now_s=now_s, wall_s=wall_s, front_end=request.client_index
        )
        if num_before == 0 < clock.num_implausible:
            logger.warning(
                "%s: its arrival time must be at most about a second before its receipt (it is "
                "%.3f s by this engine's wall clock): such requests count from their receipt, "
                "later ones by the same difference. Synchronize the clocks of the machines.",
                request.request_id,
                wall_s - request.arrival_time,
            )
        return wait_s

    def _arrived(self, request: Request) -> None:
        slo_class, slo = self._slo_of(request)
        arrival_s = self._arrival_s(request)
        self._interval_log.begin(arrival_s)
        row = self.sola_monitor.add(
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=max(1, request.max_tokens),
            slo=slo,
            slo_class=slo_class,
            arrival_s=arrival_s,
            priority=request.priority if self._honours_priority else 0,
        )
        if self._seams.caches_prefixes:
            self.sola_monitor.expect_cached(row, self._seams.num_cached_tokens(request))
        if self.sola_predictions is not None:
            self.sola_predictions.submit(request.request_id, request.prompt_token_ids)

    def _slo_of(self, request: Request) -> tuple[str, SloTarget]:
        """Name of its SLO class, and its targets."""
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        try:
            target = request_target(extra_args, self._default_slo, self.sola_config.classes)
        except SloError as error:  # the front end refuses these unless the plug-in is off
            self._counts["num_invalid_slo"] += 1
            if self._counts["num_invalid_slo"] == 1:
                logger.warning("%s: using the default SLO instead. %s", request.request_id, error)
            return DEFAULT_CLASS, self._default_slo
        return (extra_args or {}).get(CLASS_KEY) or DEFAULT_CLASS, target

    def _enqueue_waiting_request(self, request: Request) -> None:
        self._book("booking a request that goes back to wait", self._paused, request)
        super()._enqueue_waiting_request(request)

    def _paused(self, request: Request) -> None:
        row = self.sola_monitor.table.row_of.get(request.request_id)
        if row is not None and self.sola_monitor.table.phase[row] == DECODE:
            # A streaming session goes back for its next input.
            self.sola_monitor.requeued(row, num_tokens=request.num_tokens, at_front=False)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._book("booking a preemption", self._displaced, request)

    def _displaced(self, request: Request) -> None:
        row = self.sola_monitor.table.row_of[request.request_id]
        self.sola_monitor.requeued(row, num_tokens=request.num_tokens, at_front=True)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._book("booking the end of a request", self._has_ended, request)
        return super()._free_request(request, *args, **kwargs)

    def _has_ended(self, request: Request) -> None:
        by_itself = request.status in _BY_ITSELF
        if self._is_updating:  # its last tokens are booked after the update
            self._ended.append((request.request_id, request.status))
        else:
            self._book_end(request.request_id, request.status)
        if self.sola_predictions is not None:
            self.sola_predictions.ended(
                request.request_id,
                request.num_output_tokens if by_itself else 0,
                is_cut=request.status == RequestStatus.FINISHED_LENGTH_CAPPED,
            )

    def _book_end(self, req_id: str, status: RequestStatus) -> None:
        self.sola_monitor.finished(
            req_id,
            by_itself=status in _BY_ITSELF,
            rejected=self._is_rejecting,
            failed=status in _FAILED,
        )

    def shutdown(self) -> None:
        if self.sola_predictions is not None:
            self.sola_predictions.close()
        super().shutdown()

    def has_requests(self) -> bool:
        return bool(self._rejected) or super().has_requests()

    # One step -------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._num_hidden = 0
        plan = self._guarded_plan()
        with self._applied(plan):
            output = super().schedule(*args, **kwargs)
        if num_scheduled := len(output.num_scheduled_tokens):
            num_held = len(self.running) - num_scheduled
            self._telemetry.count_step(self._plan_s, num_held, lambda: self._why_unplanned(plan))
        # If a plan that withheld something left nothing to run, the next step is vLLM's own.
        withheld = plan.run is not None or (plan.admit is not None and bool(self.waiting))
        self._stalled = withheld and not output.num_scheduled_tokens
        self._counts["num_stalled"] += self._stalled
        self._book("booking a step", self._record, output)
        self._num_in_flight += 1
        return output

    def _why_unplanned(self, plan: StepPlan) -> str:
        """Why the step with this plan is in vLLM's own order; empty if it is not."""
        if plan.problem not in (_NEUTRAL.problem, "stalled"):
            return ""
        if self.sola_guard.is_aside:
            return "aside"
        if self.sola_support.own_order:
            return "not_steered"
        if self.sola_guard.is_lost:
            return "failed"
        if self._stalled or plan.problem == "stalled":
            return "stalled"
        if self._is_paused():
            return "paused"
        return "no_targets" if self.sola_monitor.cost.is_ready else "learning"

    def _guarded_plan(self) -> StepPlan:
        """The plan of this step; vLLM's own order where it cannot be made."""
        guard = self.sola_guard
        guard.step()
        started_s = self.sola_cpu_clock()
        try:
            if guard.is_aside:
                self._step_aside()
                return _NEUTRAL
            if guard.is_lost:
                self._restore_state()
            plan = self._plan()
        except Exception as error:
            guard.failed("planning a step", error)
            return _NEUTRAL
        self._plan_s = seconds = self.sola_cpu_clock() - started_s
        limit_s = self.sola_config.plan_limit_s
        if limit_s is not None and seconds > limit_s:
            guard.took_too_long("planning a step", seconds, limit_s)
        return plan

    def _restore_state(self) -> None:
        """Build the state anew from what vLLM knows of its requests."""
        running = set(self.running)
        live = [*self.running, *self._seams.not_running()]
        self.sola_monitor.rebuild(
            [self._as_known(request, request in running) for request in live], self._num_in_flight
        )
        self.sola_planner = self._new_planner()
        self._rows = RunningRows(self.sola_monitor.table.row_of)
        self._ended.clear()
        if self.sola_predictions is not None:
            self.sola_predictions.forget_but(map(_id_of, live))
        self.sola_guard.restored()

    def _as_known(self, request: Request, holds_slot: bool) -> LiveRequest:
        slo_class, slo = self._slo_of(request)
        return LiveRequest(
            req_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=max(1, request.max_tokens),
            slo=slo,
            slo_class=slo_class,
            arrival_s=self._arrival_s(request),
            priority=request.priority if self._honours_priority else 0,
            holds_slot=holds_slot,
            num_computed=request.num_computed_tokens,
            num_tokens=request.num_tokens + request.num_output_placeholders,
            num_output=request.num_output_tokens,
            num_in_flight=request.num_output_placeholders,
            num_preemptions=request.num_preemptions,
        )

    def _step_aside(self) -> None:
        """Leave everything to vLLM; harmless when that has been done."""
        if self._has_stepped_aside:
            return
        self._has_stepped_aside = True
        self.waiting = self._seams.own_queue(self.waiting)
        predictions, self.sola_predictions = self.sola_predictions, None
        if predictions is not None:  # its end may take seconds
            threading.Thread(target=predictions.close, daemon=True).start()

    def _plan(self) -> StepPlan:
        self._seams.merge_skipped()
        if self.sola_predictions is not None:
            for req_id, prediction in self.sola_predictions.poll():
                self.sola_monitor.predicted(req_id, prediction)
        if self.sola_support.own_order or self._stalled or self._is_paused():
            return _NEUTRAL
        row_of = self.sola_monitor.table.row_of
        self.sola_monitor.parked([row_of[r.request_id] for r in self._seams.parked()])
        pool = self.kv_cache_manager.block_pool
        self._planned_rows = self._rows.of(self.running)
        state = self.sola_monitor.state(
            self._planned_rows,
            max_num_tokens=self.max_num_scheduled_tokens,
            max_num_running=self._seams.num_slots,
            num_free_blocks=pool.get_num_free_blocks(),
            num_blocks=self._num_blocks,
            block_size=self.block_size,
            tokens_per_decode=self._tokens_per_decode,
            chunks_prefills=self.scheduler_config.enable_chunked_prefill,
        )
        if self._seams.caches_prefixes:
            self._expect_cached(state.waiting)
        self._expect_loads(state)
        plan = in_class_order(state, self._with_swaps(state, self.sola_planner.plan(state)))
        plan = with_padding(state, plan)
        if resuming := self._seams.resuming():
            plan = with_room_to_resume(state, plan, list(map(self._tokens_to_resume, resuming)))
        self._num_plans += 1
        if self._num_plans % _REVIEW_PLANS == 1 and state.cost.is_ready:
            if self.sola_swap is not None or self._num_plans % _REPORT_PLANS == 1:
                update_waits(state, plan)
            is_short = waits_for_slots_alone(state)
            self._short_of_slots += _REVIEW_WEIGHT * (is_short - self._short_of_slots)
        self._problems[plan.problem] = self._problems.get(plan.problem, 0) + 1
        return plan

    def _tokens_to_resume(self, request: Request) -> int:
        left = request.num_tokens - request.num_computed_tokens
        return left if left > 1 else self._tokens_per_decode

    def _expect_cached(self, waiting: IntArray) -> None:
        """Look up what the prefix cache holds of a few waiting requests, in turn."""
        if not len(waiting):
            return
        table = self.sola_monitor.table
        first, self._next_lookup = self._next_lookup, self._next_lookup + _LOOKUPS_PER_STEP
        for place in range(first, first + min(len(waiting), _LOOKUPS_PER_STEP)):
            row = int(waiting[place % len(waiting)])
            request = self.requests[table.req_id[row]]
            self.sola_monitor.expect_cached(row, self._seams.num_cached_tokens(request))

    def _is_paused(self) -> bool:
        state = getattr(self, "_pause_state", None)
        return state is not None and state.name != "UNPAUSED"

    @contextmanager
    def _applied(self, plan: StepPlan) -> Iterator[None]:
        """Show vLLM what the plan lets it see; put everything back afterwards."""
        if plan is _NEUTRAL and not (self.lora_config and not self._has_stepped_aside):
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
        self._num_hidden = len(hidden)
        setattr(self, slots, num_slots - len(hidden))
        try:
            yield
        finally:
            self.running.extend(hidden)
            self._limits(limits)
            setattr(self, slots, num_slots)
            self.waiting.unplan()

    def _limits(self, limits: tuple[Any, int, int] | None = None) -> tuple[Any, int, int]:
        """What a plan changes for one step; put back first if `limits` are given."""
        config = self.scheduler_config
        if limits is not None:
            self.policy, self.max_num_scheduled_tokens, config.long_prefill_token_threshold = limits
        return self.policy, self.max_num_scheduled_tokens, config.long_prefill_token_threshold

    def _show(self, plan: StepPlan) -> list[Request]:
        """Do what the plan says before vLLM's own step; returns the requests that sit it out."""
        if len(plan.reject):
            self._reject(plan.reject)
        if len(plan.preempt):
            self._preempt_rows(plan.preempt)
        # Adapters of requests about to be hidden count, so this comes before hiding them.
        if plan.admit is not None:
            rows = plan.admit
            self.waiting.plan(
                self._seams.within_max_loras(self._requests(rows)) if len(rows) else ()
            )
        elif self.lora_config:
            self.waiting.plan(self._seams.within_max_loras(self.waiting))
        run = None if plan.run is None or self._is_as_it_runs(plan.run) else plan.run
        if plan.run is not None:  # the plan orders by class itself: vLLM's victim is the last
            self.policy = SchedulingPolicy.FCFS
        if plan.token_budget is not None:
            most = self.max_num_scheduled_tokens
            self.max_num_scheduled_tokens = min(most, max(self._min_budget, plan.token_budget))
        if plan.prefill_cap is not None:
            cap, config = max(self._min_budget, plan.prefill_cap), self.scheduler_config
            config.long_prefill_token_threshold = min(
                cap, config.long_prefill_token_threshold or cap
            )
        return [] if run is None else self._hide(run)

    def _is_as_it_runs(self, run: IntArray) -> bool:
        rows = self._rows.of(self.running)
        return len(run) == len(rows) == np.count_nonzero(run == rows)

    def _hide(self, run: IntArray) -> list[Request]:
        """Reorder `running` as planned; returns the requests that sit out.

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
        hidden = [running[place] for place in held.tolist()]
        shown = list(map(running.__getitem__, places.tolist()))
        self._counts["num_reordered"] += bool(np.count_nonzero(places[1:] < places[:-1]))
        self._counts["num_held"] += len(hidden)
        self.running = shown
        self._rows.put(shown, rows[places])
        return hidden

    def _requests(self, rows: IntArray) -> Iterable[Request]:
        req_id, requests = self.sola_monitor.table.req_id, self.requests
        return (requests[name] for row in rows.tolist() if (name := req_id[row]) in requests)

    def _preempt_rows(self, rows: IntArray) -> None:
        running = set(self.running)
        victims = [
            request
            for request in self._requests(rows)
            if request in running and self._seams.can_preempt(request)
        ]
        if not victims:
            return
        gone = set(victims)
        self.running = [request for request in self.running if request not in gone]
        timestamp = time.monotonic()
        for request in victims:
            self._seams.preempt(request, timestamp)
            self._counts["num_preempted_by_policy"] += 1

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

    def _record(self, output: Any) -> None:
        """Book the step that was just scheduled."""
        self._arrivals.look(self.sola_clock())
        monitor = self.sola_monitor
        table = monitor.table
        row_of = table.row_of
        scheduled = output.num_scheduled_tokens
        num_shown = len(self.running) - self._num_hidden
        if len(scheduled) == num_shown:  # as nearly always: in the order of `running`
            rows = self._rows.of(self.running)
            rows = rows[:num_shown] if self._num_hidden else rows
        else:
            rows = np.fromiter(map(row_of.__getitem__, scheduled), np.int64, len(scheduled))
        if rows is self._planned_rows and table.num_in_phase[DECODE] == len(rows):
            monitor.scheduled(rows, _NO_ROWS, _NO_ROWS)
            return
        others = table.phase[rows] != DECODE
        (places,) = others.nonzero()
        if not len(places):
            monitor.scheduled(rows, _NO_ROWS, _NO_ROWS)
            return
        prefills = rows[places]
        tokens = []
        for row in prefills.tolist():
            name = table.req_id[row]
            tokens.append(scheduled[name])
            if table.phase[row] != PREFILL:
                request = self.requests[name]
                monitor.admitted(
                    row,
                    num_computed=request.num_computed_tokens - scheduled[name],
                    prefill_target=request.num_tokens,
                )
        monitor.scheduled(rows[~others], prefills, np.array(tokens, dtype=np.int64))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._is_updating = True
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._is_updating = False
        self._num_in_flight -= 1
        self._book("booking the outcome of a step", self._learn, outputs)
        if self._rejected:
            self._answer_rejected(outputs)
        if self.sola_config.log_interval_s:
            try:
                self._log()
            except Exception as error:
                self.sola_guard.failed_to_report("logging", error)
        self._telemetry.send(
            outputs,
            self.sola_monitor,
            is_idle=not self.requests,
            is_followed=not self.sola_guard.is_lost,
            swapped_bytes=self._swapped_bytes,
        )
        return outputs

    def _learn(self, outputs: Any) -> None:
        """Book the tokens and the ends of the oldest step in flight."""
        monitor = self.sola_monitor
        if (
            sum(len(group.outputs) for group in outputs.values()) == monitor.num_expected
            and self._tokens_per_decode == 1
            and all(status in _BY_ITSELF for _, status in self._ended)
        ):
            monitor.completed()
        else:
            answers = [out for group in outputs.values() for out in group.outputs]
            answers = [out for out in answers if out.new_token_ids]
            rows = map(monitor.table.row_of.__getitem__, map(_id_of, answers))
            tokens = map(len, map(_tokens_of, answers))
            monitor.completed(
                np.fromiter(rows, np.int64, len(answers)),
                np.fromiter(tokens, np.int64, len(answers)),
            )
        for name, status in self._ended:
            self._book_end(name, status)
        self._ended.clear()
        self.sola_monitor.set_busy(bool(self.requests))

    def _answer_rejected(self, outputs: Any) -> None:
        """A rejected request is answered: its stream ends with finish reason "error"."""
        for request in self._rejected:
            if not request.is_finished():  # it could not be refused, and goes on
                continue
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
        self._rejected.clear()

    # Figures --------------------------------------------------------------------------------

    def sola_stats(self) -> dict[str, Any]:
        """Counters since start: requests, attainment, interventions, cost-model error."""
        return {
            **engine_stats(self.sola_config.policy, self.sola_monitor),
            "problems": dict(self._problems),
            "short_of_slots": self._short_of_slots,
            "num_implausible_arrivals": self._arrivals.num_implausible,
            "predictor": (
                self.sola_predictions.stats() if self.sola_predictions is not None else {}
            ),
            "failures": dict(self.sola_guard.num_failures),
            "is_aside": self.sola_guard.is_aside,
            **self._counts,
            **self._swap_stats(),
        }

    def _log(self) -> None:
        passed_s = self._interval_log.due_s(
            self.sola_clock(), not self.requests, self.sola_monitor.stats.num_ended
        )
        if passed_s is not None:
            num_running, num_waiting = len(self.running), len(self.waiting)
            line = self._interval_log.line(
                passed_s, self.sola_stats(), num_running=num_running, num_waiting=num_waiting
            )
            logger.info("sola_sched: %s", line)


class Scheduler(SolaSchedulerMixin, AsyncScheduler):
    """Drop-in replacement: ``vllm serve MODEL --scheduler-cls sola_sched.Scheduler``.

    Works with asynchronous scheduling on and off. Options come from
    ``--additional-config '{"sola_sched": {...}}'``; see `SolaConfig`.
    """
