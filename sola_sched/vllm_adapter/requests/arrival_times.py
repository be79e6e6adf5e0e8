"""When each request arrived, on the scheduler's own clock, and each input of a session."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.request import Request

from sola_sched.config.slo import history
from sola_sched.core.arrivals import ArrivalClock
from sola_sched.errors import SloError

if TYPE_CHECKING:
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin

logger = init_logger("vllm.sola_sched")


class ArrivalTimes:
    """Finds arrivals at receipt, and keeps them as long as the requests live.

    Args:
        scheduler: Whose requests they are; its monitor has our clock.
    """

    def __init__(self, scheduler: SolaSchedulerMixin) -> None:
        self._scheduler, self._monitor = scheduler, scheduler.sola_monitor
        self._clock = ArrivalClock()
        self._arrived_s: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._inputs_s: WeakKeyDictionary[Request, deque[float]] = WeakKeyDictionary()

    @property
    def num_implausible(self) -> int:
        """Arrivals that could not be right, which count from their receipt."""
        return self._clock.num_implausible

    def step(self) -> None:
        """Look at the clock at each step, so that a jump of another one is noticed."""
        self._clock.look(self._monitor.clock())

    def of(self, request: Request) -> float:
        """Its arrival on our clock, as it was found at its receipt."""
        arrival_s = self._arrived_s.get(request)
        if arrival_s is None:
            arrival_s = self._arrived_s[request] = self._find(request)
        return arrival_s

    def note_input(self, session: Request, following: Request) -> None:
        """The next input of a session has come; it may have to wait for an answer to end."""
        self._inputs_s.setdefault(session, deque()).append(self._find(following))

    def begin_input(self, session: Request) -> None:
        """From now on the session's arrival is that of its oldest input not begun."""
        inputs_s = self._inputs_s.get(session)
        self._arrived_s[session] = inputs_s.popleft() if inputs_s else self._monitor.clock()

    def _find(self, request: Request) -> float:
        """When one that is received now arrived, on our clock."""
        now_s = self._monitor.clock()
        return now_s - self._wait_s(request, now_s) - _waited_before_s(request)

    def _wait_s(self, request: Request, now_s: float) -> float:
        """How long it has waited until now; its stamp is of another process' wall clock."""
        clock = self._clock
        if not self._scheduler.requests:
            clock.look(now_s)
        wall_s, num_before = self._scheduler.sola_wall_clock(), clock.num_implausible
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


def _waited_before_s(request: Request) -> float:
    """How long it has waited elsewhere, as a gateway says."""
    params = request.sampling_params
    if params is None or not params.extra_args:
        return 0.0
    try:
        return history(params.extra_args)[0]
    except SloError:  # the default targets are used then, with a line in the log
        return 0.0
