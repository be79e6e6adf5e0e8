"""Who sleeps, with made-up services on a made-up clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.colocation.sleeping import Dormitory, SleepOptions, WakeError


class FakeSleeper:
    """Notes what it is told; asleep at first.

    Attributes:
        failures: Of its next moves, which do not take effect.
        lost: Of its next moves, which take effect.
        unanswered: Of the next questions whether it sleeps.
        num_ticks: Turns of the event loop that a move takes.
    """

    def __init__(self, name: str, log: list[str], is_asleep: bool = True) -> None:
        self.name, self.log, self.is_asleep = name, log, is_asleep
        self.failures: list[Exception] = []
        self.lost: list[Exception] = []
        self.unanswered: list[Exception] = []
        self.num_ticks = 1

    async def sleep(self) -> None:
        await self._do("sleep", is_asleep=True)

    async def wake_up(self) -> None:
        await self._do("wake", is_asleep=False)

    async def is_sleeping(self) -> bool:
        if self.unanswered:
            raise self.unanswered.pop()
        return self.is_asleep

    async def _do(self, word: str, *, is_asleep: bool) -> None:
        self.log.append(f"{word} {self.name}")
        for _ in range(self.num_ticks):
            await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop()
        self.is_asleep = is_asleep
        if self.lost:
            raise self.lost.pop()


class World:
    """A dormitory, its log, and its time."""

    def __init__(self, names: str, options: SleepOptions) -> None:
        self.log: list[str] = []
        self.now_s = 0.0
        self.sleepers = {name: FakeSleeper(name, self.log) for name in names}
        self.dormitory = Dormitory(self.sleepers, options, lambda: self.now_s)

    async def settle(self) -> None:
        """Until nobody has anything to do at this time."""
        for _ in range(60):
            await asyncio.sleep(0)

    async def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        async with self.dormitory._changed:
            self.dormitory._changed.notify_all()
        await self.settle()

    def ask(self, name: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A request that lasts until its event is set."""
        done = asyncio.Event()

        async def serve() -> None:
            async with self.dormitory.awake(name):
                self.log.append(f"serve {name}")
                assert not self.sleepers[name].is_asleep
                await done.wait()
                assert not self.sleepers[name].is_asleep
                self.log.append(f"end {name}")

        return asyncio.create_task(serve()), done


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    await world.dormitory.start()
    task = asyncio.create_task(world.dormitory.run())
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def in_world(
    names: str, options: SleepOptions, play: Callable[[World], Awaitable[None]]
) -> list[str]:
    """Play in a world; what was logged."""

    async def whole() -> list[str]:
        async with running(World(names, options)) as world:
            await play(world)
            return world.log

    return asyncio.run(whole())


async def serve_once(world: World, name: str) -> None:
    task, done = world.ask(name)
    done.set()
    await world.settle()
    await task


def test_a_request_wakes_its_service_and_idleness_puts_it_to_sleep() -> None:
    async def play(world: World) -> None:
        task, done = world.ask("a")
        await world.settle()
        await world.wait(1000.0)  # a long answer
        done.set()
        await task
        await world.wait(9.0)
        assert "sleep a" not in world.log
        await world.wait(1.1)

    log = in_world("ab", SleepOptions(idle_s=10.0), play)

    assert log == ["wake a", "serve a", "end a", "sleep a"]


def test_an_idle_service_makes_room_at_once() -> None:
    async def play(world: World) -> None:
        for name in "ab":
            task, done = world.ask(name)
            done.set()
            await world.settle()
            await task

    log = in_world("ab", SleepOptions(max_awake=1), play)

    assert log == ["wake a", "serve a", "end a", "sleep a", "wake b", "serve b", "end b"]


def test_a_busy_service_ends_its_requests_and_takes_no_more_before_it_makes_room() -> None:
    async def play(world: World) -> None:
        first, first_done = world.ask("a")
        await world.settle()
        other, other_done = world.ask("b")
        await world.wait(4.0)
        again, again_done = world.ask("a")  # it may stay for five seconds: let in
        await world.settle()
        await world.wait(1.1)
        late, late_done = world.ask("a")
        await world.settle()
        assert world.log == ["wake a", "serve a", "serve a"]
        for event in (first_done, again_done, other_done, late_done):
            event.set()
            await world.settle()
        await world.wait(6.0)
        await asyncio.gather(first, again, other, late)

    log = in_world("ab", SleepOptions(max_awake=1, least_s=5.0), play)

    assert log[3:] == ["end a", "end a", "sleep a", "wake b", "serve b", "end b",
                       "sleep b", "wake a", "serve a", "end a"]  # fmt: skip


def test_a_service_whose_place_nobody_wants_any_more_takes_requests_again() -> None:
    async def play(world: World) -> None:
        long, long_done = world.ask("a")
        await world.settle()
        other, _ = world.ask("b")
        await world.wait(5.1)
        late, late_done = world.ask("a")
        late_done.set()
        await world.settle()
        assert world.log == ["wake a", "serve a"]  # it is to leave

        other.cancel()
        await world.settle()
        assert world.log == ["wake a", "serve a", "serve a", "end a"]

        again, again_done = world.ask("b")  # it wants the place anew
        await world.settle()
        for event in (long_done, again_done):
            event.set()
            await world.settle()
        await asyncio.gather(long, late, again)

    log = in_world("ab", SleepOptions(max_awake=1, least_s=5.0), play)

    assert log[4:] == ["end a", "sleep a", "wake b", "serve b", "end b"]


def test_a_service_stays_when_another_one_has_made_the_room() -> None:
    async def play(world: World) -> None:
        tasks = {name: world.ask(name) for name in "ab"}
        await world.settle()
        tasks["c"] = world.ask("c")
        await world.wait(5.1)  # a is to leave
        tasks["b"][1].set()
        await world.settle()
        await world.wait(10.1)  # but b is idle, and sleeps
        tasks["late a"] = world.ask("a")
        await world.settle()
        for _, done in tasks.values():
            done.set()
            await world.settle()
        await asyncio.gather(*(task for task, _ in tasks.values()))

    log = in_world("abc", SleepOptions(idle_s=10.0, max_awake=2, least_s=5.0), play)

    assert "sleep a" not in log
    assert log.index("serve c") < log.index("end a")


def test_a_service_that_cannot_be_woken_fails_those_who_wait_and_is_tried_again() -> None:
    async def play(world: World) -> None:
        world.sleepers["a"].failures = [RuntimeError("out of memory")]
        tasks = [world.ask("a")[0] for _ in range(2)]
        await world.settle()
        for task in tasks:
            with pytest.raises(WakeError, match="'a' could not be woken: out of memory"):
                await task
        await serve_once(world, "a")

    log = in_world("a", SleepOptions(), play)

    assert log == ["wake a", "wake a", "serve a", "end a"]


def test_a_request_after_a_failure_that_nobody_waited_for_is_a_new_attempt() -> None:
    async def play(world: World) -> None:
        world.sleepers["a"].failures = [RuntimeError("out of memory")]
        world.sleepers["a"].num_ticks = 20
        gone, _ = world.ask("a")
        while not world.log:
            await asyncio.sleep(0)
        gone.cancel()
        await world.settle()
        await serve_once(world, "a")

    log = in_world("a", SleepOptions(), play)

    assert log == ["wake a", "wake a", "serve a", "end a"]


def test_a_service_that_sleeps_although_it_failed_to_say_so_is_woken() -> None:
    async def play(world: World) -> None:
        await serve_once(world, "a")
        world.sleepers["a"].lost = [TimeoutError()]
        await world.wait(10.1)
        await serve_once(world, "a")
        await serve_once(world, "b")  # no pause is left of the time when it failed

    log = in_world("ab", SleepOptions(idle_s=10.0, max_awake=1), play)

    assert log[:7] == ["wake a", "serve a", "end a", "sleep a", "wake a", "serve a", "end a"]
    assert log[7:] == ["sleep a", "wake b", "serve b", "end b"]


def test_a_service_that_woke_although_it_failed_to_say_so_serves() -> None:
    async def play(world: World) -> None:
        world.sleepers["a"].lost = [TimeoutError()]
        await serve_once(world, "a")

    assert in_world("a", SleepOptions(), play) == ["wake a", "serve a", "end a"]


def test_a_service_that_is_gone_when_it_is_woken_takes_no_place() -> None:
    async def play(world: World) -> None:
        world.sleepers["a"].failures = [OSError("refused")]
        world.sleepers["a"].unanswered = [OSError("refused") for _ in range(9)]
        task, _ = world.ask("a")
        await world.settle()
        with pytest.raises(WakeError, match="'a' could not be woken: refused"):
            await task
        await serve_once(world, "b")

    log = in_world("ab", SleepOptions(max_awake=1), play)

    assert log == ["wake a", "wake b", "serve b", "end b"]


def test_a_service_lets_nobody_in_until_it_has_told_whether_it_sleeps() -> None:
    async def play(world: World) -> None:
        await serve_once(world, "a")
        sleeper = world.sleepers["a"]
        sleeper.lost = [TimeoutError()]
        sleeper.unanswered = [RuntimeError("it hangs") for _ in range(3)]
        await world.wait(10.1)
        assert len(sleeper.unanswered) == 2
        task, _ = world.ask("a")  # asks at once
        await world.settle()
        with pytest.raises(WakeError, match="'a' could not be woken: it hangs"):
            await task
        await world.wait(2.9)
        assert len(sleeper.unanswered) == 1
        await world.wait(0.2)
        assert not sleeper.unanswered
        await world.wait(3.1)
        await serve_once(world, "a")

    log = in_world("a", SleepOptions(idle_s=10.0, retry_s=3.0), play)

    assert log == ["wake a", "serve a", "end a", "sleep a", "wake a", "serve a", "end a"]


def test_a_service_that_may_be_awake_has_its_place_until_it_has_told() -> None:
    async def play(world: World) -> None:
        await serve_once(world, "a")
        world.sleepers["a"].lost = [TimeoutError()]
        world.sleepers["a"].unanswered = [RuntimeError("it hangs")]
        task, done = world.ask("b")
        done.set()
        await world.settle()
        await world.wait(2.9)
        assert world.log[3:] == ["sleep a"]
        await world.wait(0.2)
        await task

    log = in_world("ab", SleepOptions(max_awake=1, retry_s=3.0), play)

    assert log[3:] == ["sleep a", "wake b", "serve b", "end b"]


def test_a_service_that_will_not_make_room_is_told_again_after_a_pause() -> None:
    async def play(world: World) -> None:
        await serve_once(world, "a")
        world.sleepers["a"].failures = [RuntimeError("no") for _ in range(2)]
        task, done = world.ask("b")
        done.set()
        await world.settle()
        assert world.log[3:] == ["sleep a"]
        await world.wait(2.9)
        assert world.log[3:] == ["sleep a"]
        await world.wait(0.2)
        await world.wait(3.1)
        await task

    log = in_world("ab", SleepOptions(max_awake=1, retry_s=3.0), play)

    assert log[3:] == ["sleep a", "sleep a", "sleep a", "wake b", "serve b", "end b"]


def test_a_service_that_will_not_sleep_serves_on_and_is_told_again_later() -> None:
    async def play(world: World) -> None:
        task, done = world.ask("a")
        done.set()
        await world.settle()
        await task
        world.sleepers["a"].failures = [RuntimeError("no")]
        await world.wait(10.1)
        await world.wait(1.0)
        assert world.log.count("sleep a") == 1
        await world.wait(2.1)

    log = in_world("a", SleepOptions(idle_s=10.0, retry_s=3.0), play)

    assert log == ["wake a", "serve a", "end a", "sleep a", "sleep a"]


def test_a_request_that_is_cancelled_while_it_waits_or_runs_is_counted_out() -> None:
    async def play(world: World) -> None:
        running_one, _ = world.ask("a")
        await world.settle()
        waiting_one, _ = world.ask("b")
        await world.settle()
        waiting_one.cancel()
        running_one.cancel()
        await world.settle()
        for service in world.dormitory.services.values():
            assert (service.num_in_flight, service.num_waiting) == (0, 0)
        await world.wait(10.1)

    log = in_world("ab", SleepOptions(idle_s=10.0, max_awake=1), play)

    assert log[:2] == ["wake a", "serve a"]
    assert log[-1].startswith("sleep")


@given(
    plan=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=12),
    max_awake=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_every_request_is_served_by_an_awake_service_and_few_are_awake(
    plan: list[tuple[str, int]], max_awake: int
) -> None:
    async def play(world: World) -> None:
        asked = []
        for name, pause_s in plan:
            asked.append(world.ask(name))
            await world.wait(float(pause_s))
            assert sum(not s.is_asleep for s in world.sleepers.values()) <= max_awake
            if len(asked) % 3 == 0:
                asked[len(asked) // 2][1].set()
        for _, done in asked:
            done.set()
        for _ in range(4 * len(plan)):
            await world.wait(1.0)
        await asyncio.gather(*(task for task, _ in asked))

    log = in_world("abc", SleepOptions(idle_s=2.0, max_awake=max_awake, least_s=1.0), play)

    assert sum(line.startswith("end") for line in log) == len(plan)
