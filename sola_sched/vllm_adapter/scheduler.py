"""`sola_sched.Scheduler`: vLLM's V1 scheduler, steered by a planner.

vLLM's own `schedule()` does the work - prefix cache, block allocation, structured output,
speculative decoding, LoRA, KV connectors. Before each call the mixin observes the state and asks
the planner; around the call it applies the plan through narrow seams; afterwards it puts back
what it hid. See `docs/design.md` for the seams and the rules they follow.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.ewt import update_waits
from sola_sched.core.live import LiveRequest
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import StepPlan
from sola_sched.cost.model import CostModel
from sola_sched.length_predictor.client import make_client
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.planner import Planner, make_planner, pass_through
from sola_sched.reports import load, load_text
from sola_sched.reports.log import IntervalLog, engine_stats, waits_for_slots_alone
from sola_sched.vllm_adapter import first_start
from sola_sched.vllm_adapter.adapter_slots import leave_out, with_late_refused
from sola_sched.vllm_adapter.booking import BookingMixin, tells_of_failed_loads
from sola_sched.vllm_adapter.engine_facts import differences, facts_of
from sola_sched.vllm_adapter.guard import Guard
from sola_sched.vllm_adapter.guarded_queue import GuardedQueue
from sola_sched.vllm_adapter.prefix_lookups import PrefixLookups
from sola_sched.vllm_adapter.sessions import SessionsMixin
from sola_sched.vllm_adapter.steering import BETWEEN_PREFILLS, NEUTRAL, SteeringMixin, place_of
from sola_sched.vllm_adapter.support import refuse_others, support_of
from sola_sched.vllm_adapter.swapping import SwapMixin
from sola_sched.vllm_adapter.telemetry_sender import TelemetrySender
from sola_sched.vllm_adapter.turns import TurnsMixin
from sola_sched.vllm_adapter.versions import Seams, check_version

# A child of vLLM's logger: its level and handlers are the ones an operator has set up.
logger = init_logger("vllm.sola_sched")


_id_of = operator.attrgetter("request_id")
#: Steps between two looks whether the policy has been compiled.
_LOOK_EVERY = 8
#: Plans between two estimates of the waits: where swapping goes by them, and where nobody does.
_REVIEW_PLANS, _REPORT_PLANS = 16, 128
#: Weight of one plan in so many in the running means.
_REVIEW_WEIGHT = 1.0 / 32.0


class SolaSchedulerMixin(BookingMixin, SessionsMixin, SteeringMixin, SwapMixin):
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

    waiting: GuardedQueue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(vllm.__version__)
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        refuse_others(config.model_config)
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
            self._new_cost_model(),
            LengthHistogram(),
            lambda: self.sola_clock(),
            config.shares,
        )
        self.sola_planner = self._new_planner()
        self.sola_predictions = make_client(config, self.vllm_config.model_config)
        self._honours_priority = self.policy == SchedulingPolicy.PRIORITY
        self.waiting = GuardedQueue(
            key=place_of if self._honours_priority else None,
            own_queue=self._seams.own_queue,
            without_place=self._seams.without_place,
            failed=self.sola_guard.failed,
        )
        self.sola_support = support_of(self.vllm_config, config)
        self._tokens_per_decode = 1 + int(self.num_spec_tokens)
        self._default_slo = config.default_slo
        self._num_blocks = max(1, self.kv_cache_manager.block_pool.num_gpu_blocks - 1)
        self._start_booking()
        self._start_sessions()
        self._start_steering()
        self._lookups = PrefixLookups(self._seams, self.block_size)
        self._num_unplanned = 0  # steps while the policy was compiled
        self._has_stepped_aside = False
        self._num_in_flight = 0  # steps scheduled and not yet updated
        self._stalled = False
        self._counts = dict.fromkeys(
            (
                "num_held",
                "num_reordered",
                "num_preempted_by_policy",
                "num_invalid_slo",
                "num_stalled",
                "num_kv_given_back",
            ),
            0,
        )
        self._problems: dict[str, int] = {}
        self._interval_log = IntervalLog(config.log_interval_s)
        self._num_plans = 0
        self._short_of_slots = 0.0
        self._plan_s = 0.0
        self._telemetry = TelemetrySender(
            log_stats=bool(getattr(self, "log_stats", False)),
            load_interval_s=config.load_interval_s,
        )
        logger.info(
            "sola_sched: policy %s, targets by default: %s%s; cost model %s",
            config.policy,
            self._default_slo,
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

    def _new_planner(self) -> Planner | None:
        """The planner, at start and whenever the state is built anew; None while it is compiled."""
        if self.sola_config.policy == "attain" and first_start.is_compiling():
            return None
        return make_planner(self.sola_config)

    def _look_for_planner(self) -> None:
        """Plan from now on, if the policy has been compiled; looked for every few steps."""
        self._num_unplanned += 1
        if self._num_unplanned % _LOOK_EVERY:
            return
        self.sola_planner = self._new_planner()
        if self.sola_planner is not None:
            logger.info("sola_sched: the policy has been compiled: steps are planned from now on")

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

    def shutdown(self) -> None:
        if self.sola_predictions is not None:
            self.sola_predictions.close()
        super().shutdown()

    def has_requests(self) -> bool:
        """vLLM's engine asks before each step, and waits for its clients where there are none."""
        has_requests = bool(self._rejected) or super().has_requests()
        if not has_requests:
            self._was_idle()
        return has_requests

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        super().set_pause_state(*args, **kwargs)
        self._was_idle()

    def _was_idle(self) -> None:
        """What passes until the next step is scheduled is not its time."""
        self._book("booking idle time", self._note_idle)

    def _note_idle(self) -> None:
        self.sola_monitor.set_busy(False)
        if not self.running:  # those that ended are kept no longer
            self._rows.of(self.running)

    # One step -------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._num_hidden = 0
        if not self._has_stepped_aside:
            self.waiting.begin_step(self._seams.drained_first())
        self._settle_loads()
        self._is_throttled = bool(args[0] if args else kwargs.get("throttle_prefills", False))
        if self.sola_planner is None:
            self._look_for_planner()
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
        if not (num_scheduled or self.running or self._stalled or self._is_paused()):
            self._book("making room among those that wait", self._make_one_give_back)
        if plan.admit is not None and num_scheduled:
            self._book("telling what the engine is short of", self._note_capacity, output)
        self._book("booking a step", self._record, output)
        self._num_in_flight += 1
        return output

    def _why_unplanned(self, plan: StepPlan) -> str:
        """Why the step with this plan is in vLLM's own order; empty if it is not."""
        if plan.problem not in (NEUTRAL.problem, "stalled"):
            return ""
        if self.sola_planner is None:
            return "compiling"
        if self.sola_guard.is_aside:
            return "aside"
        if self.sola_support.own_order:
            return "not_steered"
        if self.sola_guard.is_lost:
            return "failed"
        if self.sola_guard.is_pausing:
            return "slow"
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
                return NEUTRAL
            if guard.is_lost:
                self._restore_state()
            if guard.is_pausing:
                self.sola_monitor.begin_step()
                return NEUTRAL
            plan = self._plan()
        except Exception as error:
            guard.failed("planning a step", error)
            return NEUTRAL
        self._plan_s = seconds = self.sola_cpu_clock() - started_s
        limit_s = self.sola_config.plan_limit_s
        if limit_s is not None and seconds > limit_s:
            guard.took_too_long("planning a step", seconds, limit_s)
        return plan

    def _restore_state(self) -> None:
        """Build the state anew from what vLLM knows of its requests."""
        self.waiting.renew()
        running = set(self.running)
        live = [*self.running, *self._seams.not_running()]
        self.sola_monitor.rebuild(
            [self._as_known(request, request in running) for request in live], self._num_in_flight
        )
        self.sola_planner = self._new_planner()
        self._forget_rows()
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
        self._forget_rows()
        self.waiting = self._seams.own_queue(self.waiting)
        predictions, self.sola_predictions = self.sola_predictions, None
        if predictions is not None:  # its end may take seconds
            threading.Thread(target=predictions.close, daemon=True).start()

    def _plan(self) -> StepPlan:
        self.sola_monitor.begin_step()
        self._seams.merge_skipped()
        if self.sola_predictions is not None:
            for req_id, prediction in self.sola_predictions.poll():
                self.sola_monitor.predicted(req_id, prediction)
        planner = self.sola_planner
        if planner is None or self.sola_support.own_order or self._stalled or self._is_paused():
            return NEUTRAL
        if self._seams.defers_prefills(self._is_throttled):
            return BETWEEN_PREFILLS
        row_of = self.sola_monitor.table.row_of
        self.sola_monitor.parked([row_of[r.request_id] for r in self._seams.parked()])
        pool = self.kv_cache_manager.block_pool
        state = self.sola_monitor.state(
            self._rows.of(self.running),
            max_num_tokens=self.max_num_scheduled_tokens,
            max_num_running=self._seams.num_slots,
            num_free_blocks=pool.get_num_free_blocks(),
            num_blocks=self._num_blocks,
            block_size=self.block_size,
            tokens_per_decode=self._tokens_per_decode,
            chunks_prefills=self.scheduler_config.enable_chunked_prefill,
            max_chunk=self._seams.max_chunk(),
        )
        left_out = state.waiting[:0]
        if self.lora_config:
            left_out = leave_out(state, self.requests, self._seams)
        if self._seams.caches_prefixes:
            self._lookups.step(state.waiting, self.requests, self.sola_monitor)
        self._expect_loads(state)
        plan = pass_through(
            state,
            planner.plan(state),
            with_swaps=self._with_swaps,
            resuming=list(map(self._tokens_to_resume, self._seams.resuming())),
        )
        if len(left_out) and self.sola_config.overload == "reject":
            plan = with_late_refused(state, plan, left_out)
        if len(plan.reject):
            known = self._lookups.without_unknown(state, plan.reject)
            plan = dataclasses.replace(plan, reject=known)
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

    def _is_paused(self) -> bool:
        state = getattr(self, "_pause_state", None)
        return state is not None and state.name != "UNPAUSED"

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._is_updating = True
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._is_updating = False
        self._num_in_flight -= 1
        if self._to_place:
            self._place_sessions()
        self._book("booking the outcome of a step", self._learn, outputs)
        if tells_of_failed_loads(model_runner_output):
            self._book("booking a failed load", self._set_back)
        if self._rejected:
            try:
                self._answer_rejected(outputs)
            except Exception as error:  # those left are answered in the next step
                self.sola_guard.failed_beside("answering those that were refused", error)
        if self.sola_config.log_interval_s:
            try:
                self._log()
            except Exception as error:
                self.sola_guard.failed_beside("logging", error)
        self._telemetry.send(
            outputs,
            self.sola_monitor,
            is_idle=not self.requests,
            is_followed=not self.sola_guard.is_lost,
            swapped_bytes=self._swapped_bytes,
            load=self._load,
        )
        return outputs

    def _load(self) -> str:
        """What routers are told."""
        return load_text.to_json(
            load.load_of(
                self.sola_monitor,
                max_num_seqs=self._seams.num_slots,
                max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
                max_model_len=self.vllm_config.model_config.max_model_len,
                num_gpus=self.vllm_config.parallel_config.world_size,
                num_free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),
                num_blocks=self._num_blocks,
                block_size=self.block_size,
                serves_lost_last=self.sola_config.traits.serves_lost_last,
            )
        )

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


class Scheduler(TurnsMixin, SolaSchedulerMixin, AsyncScheduler):
    """Drop-in replacement: ``vllm serve MODEL --scheduler-cls sola_sched.Scheduler``.

    Works with asynchronous scheduling on and off. Options come from
    ``--additional-config '{"sola_sched": {...}}'``; see `SolaConfig`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            self.__dict__.update(_synchronous_methods(self))


def _synchronous_methods(scheduler: AsyncScheduler) -> dict[str, Callable[..., Any]]:
    """Methods of vLLM's synchronous scheduler, by name, in place of those of its asynchronous one.

    Without asynchronous scheduling vLLM itself takes the synchronous class, which does less for
    each token. What a class in between overrides stays.
    """
    methods = {}
    for name, method in vars(AsyncScheduler).items():
        simple = getattr(super(AsyncScheduler, scheduler), name, None)
        is_in_force = getattr(type(scheduler), name) is method
        if callable(method) and callable(simple) and is_in_force and not name.startswith("__"):
            methods[name] = simple
    return methods
