"""`sola_sched.Scheduler`: vLLM's V1 scheduler, steered by a planner.

vLLM's own `schedule()` does the work - prefix cache, block allocation, structured output,
speculative decoding, LoRA, KV connectors. Before each call a plan is made and vLLM is shown what it
says; afterwards everything is put back. See `docs/design.md` for the seams and the rules they
follow.

The class here overrides what vLLM calls, and hands over to parts, each of which owns its state:

    planning        observes the state and asks the planner
    steering        shows vLLM what the plan says, and puts it back
    shortage        tells vLLM what a step was short of, and makes room where it would wait for ever
    rejecting        ends requests that a plan rejects, and answers them
    booking         tells the state what vLLM does; arrival_times and targets know the requests
    sessions        keeps streaming sessions whole that are preempted amid a turn
    swapping        takes KV to the host and back; None where nothing is swapped
    turns           takes turns with other engines on the same GPU; None without that option
    reporting       figures, log and metrics
    changing        options that change while the engine runs; None without such a file
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as SynchronousScheduler
from vllm.v1.request import Request

from sola_sched.colocation.lease import Lease
from sola_sched.config.live_options import LiveOptions
from sola_sched.core.monitor import StateMonitor
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.length_predictor.process.client import PredictionClient, make_client
from sola_sched.planner import Planner, make_planner
from sola_sched.reports.log import IntervalLog
from sola_sched.vllm_adapter import first_start
from sola_sched.vllm_adapter.changing import make_changing
from sola_sched.vllm_adapter.guard import Guard
from sola_sched.vllm_adapter.reports.reporting import Reporting
from sola_sched.vllm_adapter.requests.arrival_times import ArrivalTimes
from sola_sched.vllm_adapter.requests.booking import Booking, tells_of_failed_loads
from sola_sched.vllm_adapter.requests.prefix_lookups import PrefixLookups
from sola_sched.vllm_adapter.requests.rejecting import Rejecting
from sola_sched.vllm_adapter.requests.sessions import Sessions
from sola_sched.vllm_adapter.requests.targets import Targets
from sola_sched.vllm_adapter.steps.guarded_queue import GuardedQueue
from sola_sched.vllm_adapter.steps.planning import Planning, cost_model_of
from sola_sched.vllm_adapter.steps.shortage import Shortage
from sola_sched.vllm_adapter.steps.steering import Steering
from sola_sched.vllm_adapter.steps.turns import make_turns
from sola_sched.vllm_adapter.support import refuse_others, support_of
from sola_sched.vllm_adapter.swap.swapping import make_swapping
from sola_sched.vllm_adapter.versions import WAITS_FOR_INPUT, Seams, check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from sola_sched.kv_swap.connector import SolaKVSwapConnector
    from sola_sched.kv_swap.manager import SwapManager

    _Host: type[Any] = AsyncScheduler
else:
    _Host = object

# A child of vLLM's logger: its level and handlers are the ones an operator has set up.
logger = init_logger("vllm.sola_sched")


class SolaSchedulerMixin(_Host):
    """SOLA's observe - plan - apply loop around the `schedule()` of a vLLM scheduler.

    Mix it in before any class derived from vLLM's `AsyncScheduler` (or `Scheduler`, which loses
    asynchronous scheduling). Under asynchronous scheduling `schedule()` runs again before the
    previous step's output is known, so the observed state lags the step in flight; tokens in
    flight are accounted for as delivered at the step's predicted end.

    Attributes:
        sola_config: Our options in force.
        sola_options: Where they come from.
        sola_wall_clock: Time on the scale of `Request.arrival_time`; replaceable as `sola_clock`.
        sola_cpu_clock: Processor time of this thread in seconds, which plans are held to.
        sola_guard: What failed so far; see `Guard`.
        sola_monitor: The state that planners see.
        sola_planner: The policy; None while it is compiled. Replaceable.
        sola_predictions: Predicts output lengths from text; None without that. Replaceable.
        sola_support: Whether the engine is steered, and with which limits.
    """

    waiting: GuardedQueue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(vllm.__version__)
        refuse_others(_vllm_config_of(args, kwargs).model_config)
        super().__init__(*args, **kwargs)
        self._seams = seams = Seams(self)
        self.sola_options = LiveOptions(self.vllm_config.additional_config)
        config = self.sola_config = self.sola_options.config
        self.sola_wall_clock: Callable[[], float] = time.time
        self.sola_cpu_clock: Callable[[], float] = time.thread_time
        self.sola_guard = Guard(logger)
        self.sola_monitor = StateMonitor(
            cost_model_of(config, self.vllm_config),
            LengthHistogram(),
            time.monotonic,
            config.shares,
        )
        self.sola_planner: Planner | None = self.sola_new_planner()
        self.sola_predictions: PredictionClient | None = make_client(
            config, self.vllm_config.model_config
        )
        self.sola_support = support_of(self.vllm_config, config)
        self._make_parts(seams)
        self._say_what_is_on()

    def _make_parts(self, seams: Seams) -> None:
        honours_priority = self.policy == SchedulingPolicy.PRIORITY
        interval_log = IntervalLog(self.sola_config.log_interval_s)
        lookups = PrefixLookups(seams, self.block_size) if seams.caches_prefixes else None
        arrivals = ArrivalTimes(self)
        targets = Targets(self.sola_config, self.vllm_config.model_config.served_model_name)
        self._swapping = make_swapping(self, seams)
        self._sessions = Sessions(self, seams)
        self._rejecting = Rejecting(self)
        self._booking = Booking(
            self,
            seams,
            arrivals=arrivals,
            targets=targets,
            lookups=lookups,
            interval_log=interval_log,
            honours_priority=honours_priority,
        )
        self._steering = Steering(
            self,
            seams,
            booking=self._booking,
            rejecting=self._rejecting,
            swapping=self._swapping,
            honours_priority=honours_priority,
        )
        self._shortage = Shortage(self, seams, self._steering.min_budget)
        self._planning = Planning(
            self,
            seams,
            booking=self._booking,
            steering=self._steering,
            swapping=self._swapping,
            lookups=lookups,
        )
        self._reporting = Reporting(
            self,
            seams,
            interval_log=interval_log,
            arrivals=arrivals,
            targets=targets,
            planning=self._planning,
            steering=self._steering,
            shortage=self._shortage,
            swapping=self._swapping,
        )
        self._turns = make_turns(self)
        self._changing = make_changing(self, targets, self._planning, self._reporting)

    def _say_what_is_on(self) -> None:
        config = self.sola_config
        logger.info(
            "sola_sched: policy %s, targets by default: %s%s; cost model %s",
            config.policy,
            config.default_slo,
            "".join(
                f"; of class {name!r}: {slo}"
                + (f", {config.shares[name]:.0%} of the time" if name in config.shares else "")
                for name, slo in config.classes.items()
            ),
            config.profile or "learned from live steps",
        )
        tell = logger.warning if self.sola_support.own_order else logger.info
        tell("sola_sched: %s", self.sola_support)
        if self.sola_planner is None:
            logger.info(
                "sola_sched: the policy is being compiled, once on this machine, which takes about "
                "half a minute; until then steps are in vLLM's own order"
            )

    # For users ------------------------------------------------------------------------------

    def sola_new_planner(self) -> Planner | None:
        """The planner, at start and whenever the state is built anew; None while it is compiled.

        May be overridden, by a scheduler whose planner is not one of the options'.
        """
        if self.sola_config.policy == "attain" and first_start.is_compiling():
            return None
        return make_planner(self.sola_config)

    @property
    def sola_clock(self) -> Callable[[], float]:
        """Monotonic time in seconds; replaceable, e.g. by a simulator."""
        return self.sola_monitor.clock

    @sola_clock.setter
    def sola_clock(self, clock: Callable[[], float]) -> None:
        self.sola_monitor.clock = clock

    @property
    def sola_swap(self) -> SolaKVSwapConnector | None:
        """The connector's scheduler half, None where nothing is swapped."""
        return None if self._swapping is None else self._swapping.connector

    @property
    def sola_copies(self) -> SwapManager:
        """The host copies; others after a failure. Only where something is swapped."""
        assert self._swapping is not None
        return self._swapping.copies

    @property
    def sola_lease(self) -> Lease | None:
        """This engine's part of the turn; None without the option, and after a failure."""
        return None if self._turns is None else self._turns.lease

    def sola_stats(self) -> dict[str, Any]:
        """Counters since start: requests, attainment, interventions, cost-model error."""
        return self._reporting.stats()

    # One step -------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._changing is not None:
            self._changing.step()
        turns = self._turns
        is_drained = turns is not None and turns.begin_step()
        self._steering.begin_step()
        if self._swapping is not None:
            self._swapping.begin_step()
        if self.sola_planner is None:
            self._planning.look_for_planner()
        is_throttled = args[0] if args else kwargs.get("throttle_prefills", False)
        plan = self._planning.plan(bool(is_throttled))
        self._steering.show(plan)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._steering.put_back()
            if turns is not None:
                turns.put_back()
        num_scheduled = len(output.num_scheduled_tokens)
        if num_scheduled:
            num_held = len(self.running) - num_scheduled
            self._reporting.telemetry.count_step(
                plan, self._planning.plan_s, num_held, self._planning.why_unplanned
            )
        is_stalled = self._planning.scheduled(plan, output)
        has_nobody = not (num_scheduled or self.running or is_stalled or is_drained)
        if has_nobody and self._pause_state is PauseState.UNPAUSED and not self._frees(output):
            self._shortage.make_room()
        if self._steering.has_cadence and plan.admit is not None and num_scheduled:
            self._shortage.note_capacity(output)
        self._booking.scheduled(output, self._steering.num_held)
        if turns is not None:
            turns.scheduled(output)
        return output

    def _frees(self, output: Any) -> bool:
        """Whether blocks have come free in this step, or are about to."""
        is_copying = self._swapping is not None and self._swapping.frees_soon()
        return is_copying or bool(getattr(output, "preempted_req_ids", None))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._booking.is_updating = True
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._booking.is_updating = False
        self._booking.num_in_flight -= 1
        if self._sessions.to_place:
            self._sessions.place()
        self._booking.updated(outputs)
        if tells_of_failed_loads(model_runner_output):
            self._booking.loads_failed()
        if self._rejecting.unanswered:
            try:
                self._rejecting.answer(outputs)
            except Exception as error:  # those left are answered in the next step
                self.sola_guard.failed_beside("answering those that were rejected", error)
        self._reporting.updated(outputs)
        if self._turns is not None:
            self._turns.updated(scheduler_output)
        return outputs

    # What vLLM does with requests -----------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if self._changing is not None:
            self._changing.look()
        self._booking.received(request)
        self._steering.received(request)
        super().add_request(request)

    def get_request_counts(self) -> tuple[int, int]:
        """Requests with a slot and without, as vLLM counts them, those that are held included."""
        num_running, num_waiting = super().get_request_counts()
        return (
            num_running + len(self._steering.out_of_sight),
            num_waiting + len(self._seams.apart),
        )

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        if self._swapping is not None:
            self._swapping.leaves(request, drop_stale_output)
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._booking.preempted(request)

    def _enqueue_waiting_request(self, request: Request) -> None:
        self._booking.goes_back(request)
        super()._enqueue_waiting_request(request)

    def _handle_stopped_request(self, request: Request) -> bool:
        # One that has a token has computed some: it was preempted since the step was scheduled.
        if request.resumable and not request.num_computed_tokens:
            self._sessions.stopped(request)
        return bool(super()._handle_stopped_request(request))

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        was_parked = session.status.name == WAITS_FOR_INPUT
        swapping = self._swapping
        tokens = [] if swapping is None else swapping.tokens_of(session)
        super()._update_request_as_session(session, update)
        if swapping is not None:
            swapping.continued(session, tokens)
        self._sessions.continued(session, was_parked)
        self._booking.continued(session)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        if self._swapping is not None:
            self._swapping.has_loaded(request)
        super()._update_waiting_for_remote_kv(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._reporting.spans is not None and not self.sola_guard.is_lost:
            self._reporting.spans.ended(request.request_id, request.trace_headers)
        self._booking.ended(request, is_rejected=self._rejecting.is_rejecting)
        if self._sessions.without_kv:
            self._sessions.ended(request)
        if self._swapping is not None:
            self._swapping.ended(request)
        return super()._free_request(request, *args, **kwargs)

    # Life of the engine ---------------------------------------------------------------------

    def has_requests(self) -> bool:
        """vLLM's engine asks before each step, and waits for its clients where there are none."""
        has_requests = bool(self._rejecting.unanswered) or bool(super().has_requests())
        if not has_requests:
            self._booking.has_no_requests()
            if self._turns is not None:
                self._turns.has_no_requests()
        return has_requests

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        super().set_pause_state(*args, **kwargs)
        self._booking.has_no_requests()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        if self._swapping is None:
            return bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))
        being_written = self._swapping.begin_reset(reset_running_requests)
        try:
            return bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))
        finally:
            self._swapping.end_reset(being_written)

    def shutdown(self) -> None:
        if self._turns is not None:
            self._turns.close()
        if self.sola_predictions is not None:
            self.sola_predictions.close()
        super().shutdown()


class Scheduler(SolaSchedulerMixin, AsyncScheduler):
    """Drop-in replacement: ``vllm serve MODEL --scheduler-cls sola_sched.Scheduler``.

    Works with asynchronous scheduling on and off. Off, an instance is of a subclass (of yours, if
    you derive from this one) with the methods of vLLM's synchronous scheduler. Options come from
    ``--additional-config '{"sola_sched": {...}}'``; see `SolaConfig`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance, in the mode that the configuration says."""
        chosen: Any = cls
        if not _vllm_config_of(args, kwargs).scheduler_config.async_scheduling:
            chosen = _synchronous(chosen)
        return super().__new__(chosen)


@cache
def _synchronous(cls: type[AsyncScheduler]) -> type[AsyncScheduler]:
    """A subclass with the methods of vLLM's synchronous scheduler.

    Without asynchronous scheduling vLLM itself takes the synchronous class, which does less for
    each token. What a class above vLLM's asynchronous one overrides stays.
    """
    methods = {}
    for name, method in vars(AsyncScheduler).items():
        simple = getattr(SynchronousScheduler, name, None)
        is_in_force = getattr(cls, name) is method
        if callable(method) and callable(simple) and is_in_force and not name.startswith("__"):
            methods[name] = simple
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {**names, **methods})


def _vllm_config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> VllmConfig:
    """The configuration among the arguments of a scheduler's constructor."""
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
