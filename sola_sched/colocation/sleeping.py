"""Which services of a GPU sleep: put to sleep when idle, woken by a request, none in flight lost.

A service that sleeps has its weights in host memory and no KV cache (vLLM's sleep mode, level 1),
so that others have the GPU's memory. `Dormitory` counts who is in flight where: a service is put to
sleep only while nobody is, and lets nobody in until it is awake again. Where fewer fit into the
memory than are asked for, a service that is waited for takes the place of the one that has been
idle longest, or else of the one that has been awake longest, once its requests have ended. A
service that failed to fall asleep lets nobody in until it has told whether it sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger("sola_sched.colocation")


class WakeError(RuntimeError):
    """A service could not be woken.

    Args:
        name: Of the service.
        failure: Why.
    """

    def __init__(self, name: str, failure: Exception) -> None:
        super().__init__(f"{name!r} could not be woken: {failure}")
        self.name, self.failure = name, failure


class Sleeper(Protocol):
    """What can be put to sleep."""

    async def sleep(self) -> None:
        """Return when it sleeps."""

    async def wake_up(self) -> None:
        """Return when it can serve."""

    async def is_sleeping(self) -> bool:
        """What it is now."""


@dataclass
class Service:
    """What is known of one service.

    Attributes:
        is_awake: It takes requests.
        is_known: Whether it is awake is known; a sleep that failed may have taken effect.
        is_moving: It is being put to sleep, woken, or asked whether it sleeps.
        is_leaving: It takes no more requests, since its place is wanted.
        num_in_flight, num_waiting: Requests that it serves, and that wait for it.
        asked_s: Since when requests have waited for it.
        awake_s, used_s: When it woke, and when its last request ended.
        again_s: When it may be told to sleep or asked whether it sleeps, after that failed.
        failure: Why it could not be woken, for those who wait now.
    """

    sleeper: Sleeper
    is_awake: bool = False
    is_known: bool = True
    is_moving: bool = False
    is_leaving: bool = False
    num_in_flight: int = 0
    num_waiting: int = 0
    asked_s: float = 0.0
    awake_s: float = 0.0
    used_s: float = 0.0
    again_s: float = 0.0
    failure: Exception | None = None

    @property
    def lets_in(self) -> bool:
        """Whether a request may go to it now."""
        return self.is_awake and not self.is_moving and not self.is_leaving

    @property
    def is_idle(self) -> bool:
        """Whether it could be put to sleep now."""
        return (
            self.is_awake and not self.is_moving and not self.num_in_flight and not self.num_waiting
        )


@dataclass(frozen=True)
class SleepOptions:
    """When services sleep.

    Attributes:
        idle_s: Seconds without a request after which a service is put to sleep, >= 0.
        max_awake: Services that fit into the GPU's memory together, >= 1; None for all.
        least_s: Seconds for which a service that has woken keeps its place although others wait.
        retry_s: Seconds until a service that would not sleep is told so again, and one that did not
            tell whether it sleeps is asked again.
    """

    idle_s: float = 300.0
    max_awake: int | None = None
    least_s: float = 5.0
    retry_s: float = 10.0


@dataclass
class Dormitory:
    """Decides who sleeps. Of one event loop; call `run` in a task of its own.

    Args:
        sleepers: The services by name.
        options: When they sleep.
        clock: Monotonic seconds.
    """

    sleepers: Mapping[str, Sleeper]
    options: SleepOptions = field(default_factory=SleepOptions)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.services = {name: Service(sleeper) for name, sleeper in self.sleepers.items()}
        self._changed = asyncio.Condition()
        self._moves: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Learn who is awake."""
        now_s = self.clock()
        for service in self.services.values():
            service.is_awake = not await service.sleeper.is_sleeping()
            service.awake_s = service.used_s = now_s

    @contextlib.asynccontextmanager
    async def awake(self, name: str) -> AsyncIterator[None]:
        """Around a request: it begins when the service is awake, which it stays until its end.

        Raises:
            KeyError: There is no service of that name.
            WakeError: It could not be woken.
        """
        service = self.services[name]
        async with self._changed:
            if not service.num_waiting:
                service.asked_s = self.clock()
            service.num_waiting += 1
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: service.lets_in or service.failure is not None)
                failure = None if service.lets_in else service.failure
                service.num_in_flight += failure is None
            finally:
                service.num_waiting -= 1
                if not service.num_waiting:
                    service.failure = None
                    self._changed.notify_all()  # it may be that nobody wants its place any more
        if failure is not None:
            raise WakeError(name, failure) from failure
        try:
            yield
        finally:
            # Not awaited: a request that is cancelled must be counted too.
            service.num_in_flight -= 1
            service.used_s = self.clock()
            self._nudge()

    async def run(self) -> None:
        """Put to sleep and wake, for ever."""
        try:
            while True:
                async with self._changed:
                    due_s = self._decide()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), due_s)
        finally:
            for move in self._moves:
                move.cancel()

    def _decide(self) -> float | None:
        """Begin the moves that are due; returns seconds until the next one is, None for never."""
        now_s, options, times = self.clock(), self.options, []
        self._keep_those_that_may_stay()
        for service in self.services.values():
            if service.is_awake and not service.is_moving and service.is_leaving:
                if not service.num_in_flight:
                    self._move(service, self._fall_asleep)
            elif service.is_idle:
                left_s = max(service.used_s + options.idle_s, service.again_s) - now_s
                if left_s <= 0.0:
                    self._move(service, self._fall_asleep)
                else:
                    times.append(left_s)
            elif not service.is_known and not service.is_moving:
                left_s = service.again_s - now_s
                if left_s <= 0.0 or (service.num_waiting and service.failure is None):
                    self._move(service, self._ask)
                else:
                    times.append(left_s)
        for service in sorted(self._wanted(), key=lambda each: each.asked_s):
            if options.max_awake is None or self._num_there() < options.max_awake:
                self._move(service, self._wake)
            else:
                times.append(self._make_room(now_s))
        return min(filter(None, times), default=None)

    def _wanted(self) -> list[Service]:
        """Those that are waited for and have to be woken."""
        return [
            service
            for service in self.services.values()
            if service.num_waiting and not service.is_awake and not service.is_moving
            and service.is_known and service.failure is None
        ]  # fmt: skip

    def _num_there(self) -> int:
        """Services that have memory of the GPU: who is on the way to sleep still has its own, and
        who does not tell may have it."""
        return sum(
            each.is_awake or each.is_moving or not each.is_known for each in self.services.values()
        )

    def _keep_those_that_may_stay(self) -> None:
        """Who was to leave goes on if there is room for all that are waited for, since who wanted
        its place has gone or has another one."""
        leaving = [s for s in self.services.values() if s.is_leaving and not s.is_moving]
        most = self.options.max_awake
        if leaving and (most is None or self._num_there() + len(self._wanted()) <= most):
            for service in leaving:
                service.is_leaving = False
            self._changed.notify_all()

    def _make_room(self, now_s: float) -> float:
        """Let one go that is awake, unless one goes already; seconds until one may, 0 for now."""
        awake = [each for each in self.services.values() if each.is_awake]
        if any(each.is_leaving or each.is_moving for each in awake):
            return 0.0
        ready = [each for each in awake if each.again_s <= now_s]
        idle = [each for each in ready if each.is_idle]
        if idle:
            self._move(min(idle, key=lambda each: each.used_s), self._fall_asleep)
            return 0.0
        oldest = min(ready, key=lambda each: each.awake_s, default=None)
        times = [each.again_s - now_s for each in awake if each.again_s > now_s]
        if oldest is not None:
            left_s = oldest.awake_s + self.options.least_s - now_s
            if left_s <= 0.0:
                oldest.is_leaving = True
                if not oldest.num_in_flight:
                    self._move(oldest, self._fall_asleep)
                return 0.0
            times.append(left_s)
        return min(times, default=0.0)

    def _move(self, service: Service, move: Callable[[Service], Awaitable[None]]) -> None:
        async def whole() -> None:
            await move(service)
            async with self._changed:
                service.is_moving = service.is_leaving = False
                self._changed.notify_all()

        service.is_moving = True
        task = asyncio.create_task(whole())
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    async def _wake(self, service: Service) -> None:
        try:
            await service.sleeper.wake_up()
            service.is_awake = True
        except Exception as error:
            logger.error("a service could not be woken: %s", error)
            # Its answer may be lost, and it awake. One that is gone takes no place: no `_ask`.
            with contextlib.suppress(Exception):
                service.is_awake = not await service.sleeper.is_sleeping()
            if not service.is_awake:
                self._fail(service, error)
        if service.is_awake:
            service.awake_s = service.used_s = service.again_s = self.clock()

    async def _fall_asleep(self, service: Service) -> None:
        try:
            await service.sleeper.sleep()
            service.is_awake = False
        except Exception as error:
            logger.error("a service could not be put to sleep: %s", error)
            await self._ask(service)

    async def _ask(self, service: Service) -> None:
        """Learn whether a service sleeps that could not be put to sleep."""
        try:
            service.is_awake = not await service.sleeper.is_sleeping()
            service.is_known = True
        except Exception as error:
            logger.error("a service does not tell whether it sleeps: %s", error)
            service.is_awake = service.is_known = False
            self._fail(service, error)
        service.awake_s = self.clock()
        service.again_s = service.awake_s + self.options.retry_s

    def _fail(self, service: Service, error: Exception) -> None:
        if service.num_waiting:  # for others it is old
            service.failure = error

    def _nudge(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.ensure_future(notify())
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
