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

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState

from sola_sched.colocation.lease import Lease
from sola_sched.colocation.urgency import urgency, urgency_of_a_waiter
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.monitor import StateMonitor
from sola_sched.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    _Host: type[Any] = AsyncScheduler
else:
    _Host = object

logger = init_logger("vllm.sola_sched")

_T = TypeVar("_T")


class TurnsMixin(_Host):
    """Goes before `SolaSchedulerMixin`; without the option it does nothing.

    Attributes:
        sola_lease: This engine's part of the turn; None without the option, and after a failure.
    """

    sola_config: SolaConfig
    sola_monitor: StateMonitor
    _pause_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sola_lease: Lease | None = None
        self._num_on_device = 0  # steps with tokens that are not updated yet
        config = self.sola_config.turns
        if config is None:
            return
        refuse_ranks(self.vllm_config.parallel_config)
        name = str(self.vllm_config.model_config.served_model_name)
        self._has_deadlines = self.sola_config.traits.goes_by_targets
        rule = "deadline" if self._has_deadlines else "shortest"
        self.sola_lease = Lease(
            config.group, name=name, share=config.share, limit_s=config.limit_s, rule=rule
        )
        slos = (self.sola_config.default_slo, *self.sola_config.classes.values())
        self._shortest_ttft_s = min(slo.ttft_s for slo in slos)
        self._overruns_told = 0
        logger.info(
            "sola_sched: takes turns in group %r, guaranteed share %g", config.group, config.share
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.sola_lease is None:
            return super().schedule(*args, **kwargs)
        if self._num_on_device and self._of_lease(
            "asking who waits for a turn", False, lambda lease: lease.is_wanted
        ):
            with self._drained():
                return super().schedule(*args, **kwargs)
        if not self._num_on_device:
            since_s = self.sola_clock()
            self._of_lease(
                "taking a turn", None, lambda lease: lease.take(self._urgency_of_a_waiter)
            )
            waited_s = self.sola_clock() - since_s
            self._book("booking a wait for the turn", self.sola_monitor.waited, waited_s)
        output = super().schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            self._num_on_device += 1
        elif not self._num_on_device:
            self._give(None)  # there is nothing that could run
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.sola_lease is not None and scheduler_output.num_scheduled_tokens:
            self._num_on_device -= 1
            if not self._num_on_device:
                self._give(self._urgency if self.requests else None)
        return outputs

    def has_requests(self) -> bool:
        has_requests: bool = super().has_requests()
        if not has_requests and self.sola_lease is not None and not self._num_on_device:
            # All requests were aborted between two steps.
            self._of_lease("withdrawing from turns", None, lambda lease: lease.withdraw())
        return has_requests

    def shutdown(self) -> None:
        self._of_lease("leaving the group of turns", None, lambda lease: lease.close())
        super().shutdown()

    def _give(self, urgency: Callable[[], float] | None) -> None:
        """End a turn, as `Lease.give`."""
        self._of_lease("giving a turn back", False, lambda lease: lease.give(urgency))
        if self.sola_lease is not None:
            self._tell(self.sola_lease)

    def _of_lease(self, doing: str, otherwise: _T, action: Callable[[Lease], _T]) -> _T:
        """What the action returns; `otherwise` without a lease, which ends where it fails."""
        lease = self.sola_lease
        if lease is None:
            return otherwise
        try:
            return action(lease)
        except Exception as error:
            self.sola_lease = None
            lease.abandon()
            self.sola_guard.failed_beside(
                doing,
                error,
                "this engine goes on without turns, beside the others; restart it to take turns "
                "again",
            )
            return otherwise

    @contextlib.contextmanager
    def _drained(self) -> Iterator[None]:
        """Let the next `schedule()` give an empty step."""
        before, self._pause_state = self._pause_state, PauseState.PAUSED_ALL
        try:
            yield
        finally:
            self._pause_state = before

    def _urgency(self) -> float:
        return self._asked(urgency)

    def _urgency_of_a_waiter(self) -> float:
        return self._asked(partial(urgency_of_a_waiter, shortest_ttft_s=self._shortest_ttft_s))

    def _asked(self, rule: Callable[[bool, StateMonitor, float], float]) -> float:
        now_s = self.sola_clock()
        try:
            return rule(self._has_deadlines, self.sola_monitor, now_s)
        except Exception as error:  # the planner's state is lost: see `Guard`
            self.sola_guard.failed_beside("telling how urgent the next step is", error)
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


def refuse_ranks(parallel_config: ParallelConfig) -> None:
    """Refuse engines whose ranks wait for each other: they must not wait for turns as well."""
    num_ranks = parallel_config.data_parallel_size
    if num_ranks > 1:
        raise ConfigError(
            f"'turns' must be off with data parallelism (got {num_ranks} ranks), whose ranks wait "
            "for each other; run an engine for each GPU, behind a gateway."
        )
