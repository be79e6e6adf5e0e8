"""Turns on a shared GPU, taken around the steps of an engine (option `turns`).

The turn is taken before a step is planned, so that the plan knows the time at which it runs, and
ends with the update from the step's output. An engine that has more to do keeps its claim, or the
turn itself while nobody else goes first.

With asynchronous scheduling a step is planned while the one before it runs, and a turn would never
end. So where somebody waits, the engine schedules nothing once: vLLM then waits for the step in
flight, and the turn is passed on with its output. The pipeline is full again after one step.

If a call of the lease fails, the engine leaves its group and goes on without turns: the others see
it as one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState

from sola_sched.colocation.lease import Lease
from sola_sched.colocation.urgency import urgency, urgency_of_a_waiter
from sola_sched.core.monitor import StateMonitor
from sola_sched.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin

logger = init_logger("vllm.sola_sched")

_T = TypeVar("_T")


class Turns:
    """The turns of one engine.

    Args:
        scheduler: Of that engine.
        lease: Its part of the group's turns.

    Attributes:
        lease: The same; None after a failure.
    """

    def __init__(self, scheduler: SolaSchedulerMixin, lease: Lease) -> None:
        self._scheduler = scheduler
        self.lease: Lease | None = lease
        self._has_deadlines = scheduler.sola_config.traits.goes_by_targets
        self._num_on_device = 0  # steps with tokens that are not updated yet
        self._overruns_told = 0
        self._paused_before: Any = None  # vLLM's state, while it is to schedule nothing

    def begin_step(self) -> bool:
        """Take the turn before a step is planned; whether the step is to be empty instead."""
        if not self._num_on_device:
            since_s = self._scheduler.sola_clock()
            self._of_lease(
                "taking a turn", None, lambda lease: lease.take(self._urgency_of_a_waiter)
            )
            waited_s = self._scheduler.sola_clock() - since_s
            monitor = self._scheduler.sola_monitor
            self._scheduler.sola_guard.book("booking a wait for the turn", monitor.waited, waited_s)
            return False
        if not self._of_lease("asking who waits for a turn", False, lambda lease: lease.is_wanted):
            return False
        self._paused_before = self._scheduler._pause_state
        self._scheduler._pause_state = PauseState.PAUSED_ALL
        return True

    def put_back(self) -> None:
        """Let steps have requests again. Call after vLLM's own `schedule()`."""
        if self._paused_before is not None:
            self._scheduler._pause_state, self._paused_before = self._paused_before, None

    def scheduled(self, output: Any) -> None:
        """A step has been scheduled, perhaps an empty one."""
        if output.num_scheduled_tokens:
            self._num_on_device += 1
        elif not self._num_on_device:
            self._give(None)  # there is nothing that could run

    def updated(self, output: Any) -> None:
        """A step has ended, and its outcome is booked."""
        if output.num_scheduled_tokens:
            self._num_on_device -= 1
            if not self._num_on_device:
                self._give(self._urgency if self._scheduler.requests else None)

    def has_no_requests(self) -> None:
        """The engine has nothing to do: all requests may have been aborted between two steps."""
        if not self._num_on_device:
            self._of_lease("withdrawing from turns", None, lambda lease: lease.withdraw())

    def close(self) -> None:
        """Leave the group."""
        self._of_lease("leaving the group of turns", None, lambda lease: lease.close())

    def _give(self, urgency: Callable[[], float] | None) -> None:
        """End a turn, as `Lease.give`."""
        self._of_lease("giving a turn back", False, lambda lease: lease.give(urgency))
        if self.lease is not None:
            self._tell(self.lease)

    def _of_lease(self, doing: str, otherwise: _T, action: Callable[[Lease], _T]) -> _T:
        """What the action returns; `otherwise` without a lease, which ends where it fails."""
        lease = self.lease
        if lease is None:
            return otherwise
        try:
            return action(lease)
        except Exception as error:
            self.lease = None
            lease.abandon()
            self._scheduler.sola_guard.failed_beside(
                doing,
                error,
                "this engine goes on without turns, beside the others; restart it to take turns "
                "again",
            )
            return otherwise

    def _urgency(self) -> float:
        return self._asked(urgency)

    def _urgency_of_a_waiter(self) -> float:
        config = self._scheduler.sola_config  # targets may change while the engine runs
        slos = (config.default_slo, *config.classes.values())
        shortest_ttft_s = min(slo.ttft_s for slo in slos)
        return self._asked(partial(urgency_of_a_waiter, shortest_ttft_s=shortest_ttft_s))

    def _asked(self, rule: Callable[[bool, StateMonitor, float], float]) -> float:
        now_s = self._scheduler.sola_clock()
        try:
            return rule(self._has_deadlines, self._scheduler.sola_monitor, now_s)
        except Exception as error:  # the planner's state is lost: see `Guard`
            self._scheduler.sola_guard.failed_beside("telling how urgent the next step is", error)
            return now_s if self._has_deadlines else 0.0

    def _tell(self, lease: Lease) -> None:
        num_lost = lease.stats.num_lost
        if num_lost > self._overruns_told == 0:
            logger.warning(
                "sola_sched: a step took longer than 'turns.limit_s' %g s, so another engine went "
                "on beside it. Raise the limit if such steps are usual; further ones are only "
                "counted.",
                lease.limit_s,
            )
        self._overruns_told = num_lost


def make_turns(scheduler: SolaSchedulerMixin) -> Turns | None:
    """Join the group that the options name; None without the option.

    Raises:
        ConfigError: The engine's ranks wait for each other.
    """
    config = scheduler.sola_config.turns
    if config is None:
        return None
    vllm_config = scheduler.vllm_config
    refuse_ranks(vllm_config.parallel_config)
    lease = Lease(
        config.group,
        name=str(vllm_config.model_config.served_model_name),
        share=config.share,
        limit_s=config.limit_s,
        rule="deadline" if scheduler.sola_config.traits.goes_by_targets else "shortest",
    )
    logger.info(
        "sola_sched: takes turns in group %r, guaranteed share %g", config.group, config.share
    )
    return Turns(scheduler, lease)


def refuse_ranks(parallel_config: ParallelConfig) -> None:
    """Refuse engines whose ranks wait for each other: they must not wait for turns as well."""
    num_ranks = parallel_config.data_parallel_size
    if num_ranks > 1:
        raise ConfigError(
            f"'turns' must be off with data parallelism (got {num_ranks} ranks), whose ranks wait "
            "for each other; run an engine for each GPU, behind a gateway."
        )
