"""What a step takes is learned from steps alone, whatever an engine waits for between them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from virtual_runs import STEP_TIME, make_small_engine, step_until, warm_up
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

import sola_sched
from sola_sched.cost.fit import StepShape
from sola_sched.simulator import VirtualRequest
from sola_sched.simulator.host import make_request
from sola_sched.vllm_adapter.steps.turns import Turns

pytestmark = pytest.mark.vllm

#: Of step times that are learned from steps without noise.
TOLERANCE = 0.03
_SHAPES = {
    StepShape(8, 800, 0, 0.0, 0.0): STEP_TIME.base_s + 8 * STEP_TIME.per_decode_s,
    StepShape(0, 0, 300, 9e4, 0.0): STEP_TIME.base_s + 300 * STEP_TIME.per_prefill_token_s,
    StepShape(8, 800, 300, 9e4, 0.0): STEP_TIME.base_s
    + 8 * STEP_TIME.per_decode_s
    + 300 * STEP_TIME.per_prefill_token_s,
}


def test_time_without_steps_is_learned_as_nobodys(idle: Idle) -> None:
    assert max(map(abs, idle.errors())) < TOLERANCE
    assert idle.engine_time_s <= 1.01 * idle.step_time_s
    assert idle.scheduler.sola_stats()["failures"] == {}


def test_an_idle_engine_refuses_nobody_and_serves_at_once(idle: Idle) -> None:
    engine, now_s = idle.engine, idle.engine.clock.now
    idle.add(4, prompt_len=200, output_len=20)
    names = idle.names[-4:]

    step_until(engine, lambda: all(engine.record(name).finish_reason for name in names))

    assert all(engine.record(name).finish_reason == "length" for name in names)
    assert max(engine.record(name).first_token_s for name in names) < now_s + 0.2


class Idle:
    """An engine with one sort of pauses between its steps, of random lengths."""

    def __init__(self, *, is_async: bool, seed: int) -> None:
        self.engine = make_small_engine(
            sola_sched.Scheduler,
            {"ttft_s": 1.0, "tpot_s": 0.05, "overload": "reject", "plan_limit_s": None},
            async_scheduling=is_async,
            step_time=self._step_time,
        )
        self.scheduler = self.engine.scheduler
        self.rng = np.random.default_rng(seed)
        self.names: list[str] = []
        self.engine_time_s = self.step_time_s = 0.0
        warm_up(self.engine)
        self.end()
        state = self.scheduler.sola_monitor.state

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = state(*args, **kwargs)
            self.engine_time_s += found.elapsed_s
            return found

        self.scheduler.sola_monitor.state = watched
        self.step_time_s = 0.0

    def _step_time(self, *args: Any) -> float:
        seconds = STEP_TIME(*args)
        self.step_time_s += seconds
        return seconds

    def errors(self) -> list[float]:
        cost = self.scheduler.sola_monitor.cost
        return [cost.step_s(shape) / true_s - 1.0 for shape, true_s in _SHAPES.items()]

    def add(self, count: int, **options: int) -> None:
        lengths = {"prompt_len": int(self.rng.integers(20, 400)), "output_len": 10} | options
        for _ in range(count):
            self.names.append(f"r{len(self.names)}")
            self.engine.add(VirtualRequest(self.names[-1], self.engine.clock.now, **lengths))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def end(self) -> None:
        step_until(self.engine, lambda: False)

    def drain(self) -> None:
        """The engine's loop until it waits for its clients."""
        self.engine.admit()
        while self.engine.has_work:
            self.engine.step()

    def pass_time(self) -> None:
        self.engine.clock.now += float(self.rng.choice([0.004, 0.05, 3.0, 60.0]))


def without_requests(idle: Idle) -> None:
    idle.add(3)
    idle.end()
    idle.pass_time()


def with_sessions_that_wait(idle: Idle) -> None:
    engine, name = idle.engine, "session"
    virtual = VirtualRequest(name, engine.clock.now, prompt_len=30, output_len=2)
    if name not in engine.scheduler.requests:
        engine.add(virtual)
        engine._requests[name].resumable = True
    else:
        more = make_request(virtual, engine.vllm_config, engine._block_hasher)
        more.resumable = True
        engine.scheduler.add_request(more)
    idle.drain()
    idle.pass_time()


def paused_with_those_that_run(idle: Idle) -> None:
    idle.add(3)
    idle.steps(4)
    idle.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    idle.drain()
    idle.pass_time()
    idle.scheduler.set_pause_state(PauseState.UNPAUSED)
    idle.steps(4)


def paused_while_nobody_looks(idle: Idle) -> None:
    """As in-process: nobody runs the engine's loop between pause and resumption."""
    idle.add(3)
    idle.steps(4)
    while idle.engine._in_flight:
        idle.engine.finish_step()
    idle.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    idle.pass_time()
    idle.scheduler.set_pause_state(PauseState.UNPAUSED)
    idle.steps(4)


def paused_with_those_that_wait(idle: Idle) -> None:
    idle.add(2)
    idle.steps(2)
    idle.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    idle.add(2)
    idle.engine.admit()
    idle.drain()
    idle.pass_time()
    idle.scheduler.set_pause_state(PauseState.UNPAUSED)
    idle.steps(4)


def asleep_without_those_it_had(idle: Idle) -> None:
    idle.add(3)
    idle.steps(4)
    idle.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for name in idle.names[-3:]:
        idle.engine.abort(name)
    idle.drain()
    idle.pass_time()
    idle.scheduler.set_pause_state(PauseState.UNPAUSED)


def while_another_engine_computes(idle: Idle) -> None:
    if idle.scheduler.sola_lease is None:
        idle.scheduler._turns = Turns(idle.scheduler, Turn(idle))
    idle.add(3)
    idle.steps(4)


class Turn(SimpleNamespace):
    """Of two engines, the other of which computes between any two steps of this one."""

    def __init__(self, idle: Idle) -> None:
        super().__init__(stats=SimpleNamespace(num_lost=0), limit_s=2.0, is_wanted=True)
        self._idle = idle

    def take(self, urgency: Callable[[], float]) -> None:
        self._idle.engine.clock.now += float(self._idle.rng.choice([0.0, 0.01, 0.05, 0.3]))

    def give(self, urgency: Callable[[], float] | None) -> None: ...

    def withdraw(self) -> None: ...


_SORTS = (
    without_requests,
    with_sessions_that_wait,
    paused_with_those_that_run,
    paused_while_nobody_looks,
    paused_with_those_that_wait,
    asleep_without_those_it_had,
    while_another_engine_computes,
)


def _all_sorts(idle: Idle) -> None:
    sorts = _SORTS[:-1]
    sorts[int(idle.rng.integers(len(sorts)))](idle)


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(
    scope="module", params=[*_SORTS, _all_sorts], ids=lambda sort: sort.__name__.strip("_")
)
def idle(request: pytest.FixtureRequest, is_async: bool) -> Idle:
    idle = Idle(is_async=is_async, seed=5)
    for _ in range(40):
        request.param(idle)
    if idle.scheduler.sola_lease is not None:
        idle.scheduler.sola_lease.is_wanted = False
        idle.end()
        idle.scheduler._turns = None
    session: Any = idle.scheduler.requests.get("session")
    if session is not None:
        idle.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    idle.end()
    return idle


def test_an_idle_engine_keeps_no_request_that_has_ended() -> None:
    engine = make_small_engine(sola_sched.Scheduler, {}, async_scheduling=True)
    warm_up(engine, 10)
    step_until(engine, lambda: False)
    assert not engine.scheduler.has_requests()
    assert engine.scheduler._booking.rows._requests == []
