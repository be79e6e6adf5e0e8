"""Making the plan of a step: observe the state, ask the planner, pass its plan on.

What fails or takes too long stops at the guard, and the step is in vLLM's own order.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.ewt import update_waits
from sola_sched.core.state import EngineLimits, IntArray, StepPlan, StepState
from sola_sched.cost.model import CostModel
from sola_sched.planner import pass_through
from sola_sched.reports.log import waits_for_slots_alone
from sola_sched.vllm_adapter.engine_facts import differences, facts_of
from sola_sched.vllm_adapter.requests.prefix_lookups import known_or_late
from sola_sched.vllm_adapter.steps.adapter_slots import AdapterSlots, with_late_rejected
from sola_sched.vllm_adapter.steps.put_off import PutOff
from sola_sched.vllm_adapter.steps.steering import BETWEEN_PREFILLS, NEUTRAL, SETTLED
from sola_sched.vllm_adapter.versions import Seams

if TYPE_CHECKING:
    from sola_sched.vllm_adapter.requests.booking import Booking
    from sola_sched.vllm_adapter.requests.prefix_lookups import PrefixLookups
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin
    from sola_sched.vllm_adapter.steps.steering import Steering
    from sola_sched.vllm_adapter.swap.swapping import Swapping

logger = init_logger("vllm.sola_sched")

_id_of = operator.attrgetter("request_id")
#: Steps between two looks whether the policy has been compiled.
_LOOK_EVERY = 8
#: Plans between two estimates of the waits: where swapping goes by them, and where nobody does.
_REVIEW_PLANS, _REPORT_PLANS = 16, 128
#: Of so many plans at least one is made anew, although nothing has happened: contexts grow. Others
#: are not asked for while nothing can be decided. It divides the numbers above.
_SETTLED_PLANS = 8
#: Weight of one plan in so many in the running means.
_REVIEW_WEIGHT = 1.0 / 32.0


class Planning:
    """Makes the plans of one scheduler.

    Args:
        scheduler: Whose steps they are; has the planner, the monitor, the guard and the clocks.
        seams: Of the same scheduler.
        booking: Keeps the state.
        steering: Carries the plans out.
        swapping: Expects copies and makes room; None where nothing is swapped.
        lookups: Looks waiting requests up in the prefix cache; None where nothing is cached.

    Attributes:
        num_plans: Since start.
        problems: Plans by the problem that was solved.
        short_of_slots: Share of the latest plans while slots alone were short.
        plan_s: Processor time of the latest plan; 0 where that of the step before it held.
        num_stalled: Steps since start in which nothing could run because of a plan.
        shadow: What plans would have done since start that are not followed (`steer` false).
    """

    def __init__(
        self,
        scheduler: SolaSchedulerMixin,
        seams: Seams,
        *,
        booking: Booking,
        steering: Steering,
        swapping: Swapping | None,
        lookups: PrefixLookups | None,
    ) -> None:
        self._scheduler, self._seams = scheduler, seams
        self._adapters = AdapterSlots(scheduler, seams)
        self._booking, self._steering = booking, steering
        self._swapping, self._lookups = swapping, lookups
        self._monitor, self._guard = scheduler.sola_monitor, scheduler.sola_guard
        self.change(scheduler.sola_config)
        self._rejects = scheduler.sola_config.overload == "reject"
        self._tokens_per_decode = 1 + int(scheduler.num_spec_tokens)
        self._limits = EngineLimits(
            max_num_tokens=scheduler.max_num_scheduled_tokens,
            max_num_running=seams.num_slots,
            num_blocks=max(1, scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1),
            block_size=scheduler.block_size,
            tokens_per_decode=self._tokens_per_decode,
            chunks_prefills=bool(scheduler.scheduler_config.enable_chunked_prefill),
            max_chunk=seams.max_chunk(),
        )
        self._put_off = PutOff(seams, scheduler.requests)
        self._is_stalled = False
        self._has_stepped_aside = False
        self._num_unplanned = 0  # steps while the policy was compiled
        self._has_no_policy = False  # it could not be made
        self.num_plans = self.num_stalled = 0
        self.problems: dict[str, int] = {}
        self.shadow = dict.fromkeys(("num_held", "num_preempted_by_policy", "num_rejected"), 0)
        self.short_of_slots = self.plan_s = 0.0

    def change(self, config: SolaConfig) -> None:
        """These are the options from now on."""
        self._plan_limit_s, self._steers = config.plan_limit_s, config.steer
        self._settled_at = -1  # epoch of the table if the latest plan left nothing to decide
        self._settled_plan, self._settled_problem = SETTLED, SETTLED.problem

    @property
    def num_blocks(self) -> int:
        """KV blocks that requests can have."""
        return self._limits.num_blocks

    def plan(self, is_throttled: bool) -> StepPlan:
        """The plan of the next step; vLLM's own order where it cannot be made.

        Args:
            is_throttled: What vLLM's engine says of the step: prefills are to be put off.
        """
        guard, scheduler = self._guard, self._scheduler
        guard.step()
        cpu_clock = scheduler.sola_cpu_clock
        try:
            if self._is_settled():
                return self._settled()
            started_s = cpu_clock()
            if guard.is_aside:
                self._step_aside()
                return NEUTRAL
            if guard.is_lost:
                self.restore()
            if guard.is_pausing:
                self._monitor.begin_step()
                self._hold_nobody()
                return NEUTRAL
            plan = self._plan(is_throttled)
        except Exception as error:
            guard.failed("planning a step", error)
            return NEUTRAL
        self.plan_s = seconds = cpu_clock() - started_s
        limit_s = self._plan_limit_s
        if limit_s is not None and seconds > limit_s:
            guard.took_too_long("planning a step", seconds, limit_s)
        return plan

    def _plan(self, is_throttled: bool) -> StepPlan:
        self._settled_at = -1
        self._monitor.begin_step()
        skipped = self._seams.merge_skipped()
        try:
            plan = self._plan_anew(is_throttled)
        finally:
            if not self._scheduler.sola_support.steers:
                self._seams.part_skipped(skipped)
        if plan is NEUTRAL or plan is BETWEEN_PREFILLS:
            self._hold_nobody()
        return plan

    def _hold_nobody(self) -> None:
        """A step without a plan begins."""
        self._monitor.fates.end_holds(self._monitor.clock())

    def _plan_anew(self, is_throttled: bool) -> StepPlan:
        scheduler, seams, monitor = self._scheduler, self._seams, self._monitor
        if scheduler.sola_predictions is not None:
            for req_id, prediction in scheduler.sola_predictions.poll():
                monitor.predicted(req_id, prediction)
        planner = scheduler.sola_planner
        if planner is None or scheduler.sola_support.own_order or self._is_stalled:
            return NEUTRAL
        if scheduler._pause_state is not PauseState.UNPAUSED:
            return NEUTRAL
        if seams.defers_prefills(is_throttled):
            return BETWEEN_PREFILLS if self._steers else NEUTRAL
        active, late = self._adapters.count()
        parked, resuming, row_of = seams.parked(), seams.resuming(late), monitor.table.row_of
        monitor.parked([row_of[request.request_id] for request in parked] if parked else ())
        state = monitor.state(
            self._booking.rows.of(scheduler.running),
            self._limits_now(),
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        )
        left_out = None
        if scheduler.lora_config:
            left_out = self._adapters.leave_out(state, active)
            if self._steers:
                seams.defer(scheduler.requests[state.table.req_id[row]] for row in left_out)
        if self._lookups is not None:
            self._lookups.step(state.waiting, scheduler.requests, monitor)
        with_swaps = None
        if self._swapping is not None:
            self._swapping.expect_loads(state)
            with_swaps = self._swapping.with_swaps
        plan = pass_through(
            state,
            planner.plan(state),
            with_swaps=with_swaps,
            resuming=list(map(self._tokens_to_resume, resuming)) if resuming else (),
        )
        plan = self._put_off.with_held(state, plan)
        if left_out is not None and len(left_out) and self._rejects:
            plan = with_late_rejected(state, plan, left_out)
        if len(plan.reject):
            plan = dataclasses.replace(plan, reject=self._to_refuse(state, plan.reject))
        self.num_plans += 1
        if self.num_plans % _REVIEW_PLANS == 1 and state.cost.is_ready:
            if self._swapping is not None or self.num_plans % _REPORT_PLANS == 1:
                update_waits(state, plan)
            is_short = waits_for_slots_alone(state)
            self.short_of_slots += _REVIEW_WEIGHT * (is_short - self.short_of_slots)
        self.problems[plan.problem] = self.problems.get(plan.problem, 0) + 1
        if not self._steers:
            self._count_shadow(plan)
            plan = NEUTRAL
        monitor.fates.planned(state, plan, monitor.clock())
        is_settled = plan.is_settled and not parked and _asks_for_nothing(state, plan)
        if is_settled and self._has_plenty(state):
            self._settled_at, self._settled_problem = monitor.table.epoch, plan.problem
            is_own = plan.problem == NEUTRAL.problem
            plan = self._settled_plan = NEUTRAL if is_own else SETTLED
        return plan

    def _to_refuse(self, state: StepState, rows: IntArray) -> IntArray:
        """`rows` without those who may be in time after all, if more of them is found computed."""
        if self._seams.loads_by_others:
            return known_or_late(state, rows, False)
        return rows if self._lookups is None else self._lookups.without_unknown(state, rows)

    def _has_plenty(self, state: StepState) -> bool:
        """Whether the next steps change nothing for what else goes by plans: copies, a cadence."""
        if self._steering.has_cadence:
            return False
        return self._swapping is None or self._swapping.has_plenty(state)

    def _is_settled(self) -> bool:
        """Whether nothing can be decided, as for the step before."""
        return (
            self._settled_at == self._monitor.table.epoch
            and self.num_plans % _SETTLED_PLANS != 0
            and not self._guard.is_lost
            and not self._guard.is_pausing
        )

    def _settled(self) -> StepPlan:
        """The plan of a step for which nothing can be decided: that of the one before it."""
        self._monitor.begin_step()
        self._monitor.unplanned()
        if self._lookups is not None:
            self._lookups.pass_step()
        self.num_plans += 1
        self.problems[self._settled_problem] += 1
        self.plan_s = 0.0
        return self._settled_plan

    def _limits_now(self) -> EngineLimits:
        """The engine's limits: the same object as long as none has changed."""
        seams, limits = self._seams, self._limits
        num_tokens, num_slots = self._scheduler.max_num_scheduled_tokens, seams.num_slots
        max_chunk = seams.max_chunk()
        if (
            num_tokens != limits.max_num_tokens
            or num_slots != limits.max_num_running
            or max_chunk != limits.max_chunk
        ):
            limits = self._limits = limits._replace(
                max_num_tokens=num_tokens, max_num_running=num_slots, max_chunk=max_chunk
            )
        return limits

    def _count_shadow(self, plan: StepPlan) -> None:
        """Count what a plan would have done that is not followed."""
        num_running = len(self._scheduler.running)
        if plan.run is not None:
            self.shadow["num_held"] += max(0, num_running - len(plan.run) - len(plan.preempt))
        self.shadow["num_preempted_by_policy"] += len(plan.preempt)
        self.shadow["num_rejected"] += len(plan.reject)

    def _tokens_to_resume(self, request: Request) -> int:
        left = request.num_tokens - request.num_computed_tokens
        return left if left > 1 else self._tokens_per_decode

    def scheduled(self, plan: StepPlan, output: Any) -> bool:
        """A step has been scheduled; whether its plan left nothing to run.

        If a plan that withheld something did, the next step is vLLM's own.
        """
        self._is_stalled = False
        if not output.num_scheduled_tokens:
            withheld = plan.run is not None or (
                plan.admit is not None and bool(self._scheduler.waiting)
            )
            self._is_stalled = withheld
            self.num_stalled += withheld
        if self._steering.num_held:
            self._guard.book("noting what vLLM puts off", self._note_put_off, plan, output)
        return self._is_stalled

    def _note_put_off(self, plan: StepPlan, output: Any) -> None:
        steering, waiting = self._steering, self._scheduler.waiting
        self._put_off.scheduled(
            self._monitor.table,
            plan,
            output,
            num_left=steering.num_tokens - output.total_num_scheduled_tokens,
            offered=[*islice(waiting, 1)] if steering.offered is None else steering.offered,
        )

    def why_unplanned(self, plan: StepPlan) -> str:
        """Why the step with this plan is in vLLM's own order; empty if it is not."""
        if plan.problem not in (NEUTRAL.problem, "stalled"):
            return ""
        scheduler = self._scheduler
        if scheduler.sola_planner is None:
            return "failed" if self._has_no_policy else "compiling"
        if self._guard.is_aside:
            return "aside"
        if scheduler.sola_support.own_order:
            return "not_steered"
        if self._guard.is_lost:
            return "failed"
        if self._guard.is_pausing:
            return "slow"
        if not self._steers:
            return "shadow"
        if self._is_stalled or plan.problem == "stalled":
            return "stalled"
        if scheduler._pause_state is not PauseState.UNPAUSED:
            return "paused"
        return "no_targets" if self._monitor.cost.is_ready else "learning"

    # The planner and the state --------------------------------------------------------------

    def look_for_planner(self) -> None:
        """Plan from now on, if the policy has been compiled; looked for every few steps."""
        self._num_unplanned += 1
        if self._num_unplanned % _LOOK_EVERY or self._has_no_policy:
            return
        try:
            self._scheduler.sola_planner = self._scheduler.sola_new_planner()
        except Exception as error:
            self._has_no_policy = True
            what_follows = "steps stay in vLLM's own order; restart the engine to try it again"
            self._guard.failed_beside("making the policy", error, what_follows)
        if self._scheduler.sola_planner is not None:
            logger.info("sola_sched: the policy has been compiled: steps are planned from now on")

    def restore(self) -> None:
        """Build the state anew from what vLLM knows of its requests."""
        scheduler, booking = self._scheduler, self._booking
        scheduler.waiting.renew()
        running = set(scheduler.running)
        live = [*scheduler.running, *self._seams.not_running()]
        self._monitor.rebuild(
            [booking.as_known(request, request in running) for request in live],
            booking.num_in_flight,
        )
        scheduler.sola_planner = scheduler.sola_new_planner()
        booking.forget_rows()
        if scheduler.sola_predictions is not None:
            scheduler.sola_predictions.forget_but(map(_id_of, live))
        self._guard.restored()

    def _step_aside(self) -> None:
        """Leave everything to vLLM; harmless when that has been done."""
        if self._has_stepped_aside:
            return
        self._has_stepped_aside = True
        self._booking.forget_rows()
        self._steering.step_aside()
        scheduler = self._scheduler
        if self._swapping is not None and scheduler.lora_config:
            self._swapping.end()  # with adapters it takes a queue of ours
        predictions, scheduler.sola_predictions = scheduler.sola_predictions, None
        if predictions is not None:  # its end may take seconds
            threading.Thread(target=predictions.close, daemon=True).start()


def _asks_for_nothing(state: StepState, plan: StepPlan) -> bool:
    """Whether the engine would do the same without this plan."""
    takes_nobody_out = not (len(plan.preempt) or len(plan.reject) or len(state.waiting))
    return (
        takes_nobody_out
        and plan.run is None
        and plan.token_budget is None
        and plan.prefill_cap is None
    )


def cost_model_of(config: SolaConfig, vllm_config: Any) -> CostModel:
    """The step-time model of an engine: the profile's, or one that learns from live steps.

    It says in the log where the profile is of another engine, and where it turns out to be wrong.
    """
    if config.profile is None:
        return CostModel(alpha=config.alpha)
    cost = CostModel.load(config.profile, alpha=config.alpha)
    cost.on_relearned = partial(logger.warning, "sola_sched: profile %s: %s", config.profile)
    if other := differences(cost.meta, facts_of(vllm_config)):
        logger.warning(
            "sola_sched: profile %s was measured on another engine: %s. Its step times are "
            "corrected while this one runs; measure it with `python -m sola_sched.profile`.",
            config.profile,
            ", ".join(other),
        )
    return cost
