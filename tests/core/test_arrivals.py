"""Arrival times from front ends whose clocks differ, drift and are set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sola_sched.core.arrivals import ArrivalClock

YEAR_S = 365.0 * 86400.0


def always(skew_s: float) -> Callable[[float], float]:
    return lambda time_s: skew_s


def after(step_s: float, at_s: float) -> Callable[[float], float]:
    """A clock that is set by `step_s` at a time."""
    return lambda time_s: step_s if time_s >= at_s else 0.0


class Engine:
    """Receives requests; `front_end` and `own` tell by how much the two wall clocks are off."""

    def __init__(
        self, front_end: Callable[[float], float], own: Callable[[float], float] | None = None
    ) -> None:
        self.front_end, self.own = front_end, own or always(0.0)
        self.clock = ArrivalClock()

    def waits_s(self, received_s: list[float], waited_s: list[float]) -> np.ndarray:
        """The waits that an idle engine makes out, for those that are true."""
        waits = []
        for now_s, wait_s in zip(received_s, waited_s, strict=True):
            self.clock.look(now_s)
            arrival_s = now_s - wait_s
            waits.append(
                self.clock.wait_s(
                    1.7e9 + arrival_s + self.front_end(arrival_s),
                    now_s=now_s,
                    wall_s=1.7e9 + now_s + self.own(now_s),
                )
            )
        return np.array(waits)


def traffic(seed: int = 0, count: int = 400) -> tuple[list[float], list[float]]:
    """Ten requests a second for 40 s; most wait some milliseconds, every tenth for 0.3 s."""
    rng = np.random.default_rng(seed)
    received = 100.0 + np.cumsum(rng.exponential(0.1, count))
    waited = rng.uniform(0.002, 0.010, count)
    waited[9::10] = 0.3
    return received.tolist(), waited.tolist()


def test_with_clocks_that_agree_the_wait_is_what_the_stamp_says() -> None:
    received, waited = traffic()
    engine = Engine(always(0.0))
    assert engine.waits_s(received, waited) == pytest.approx(waited, abs=1e-6)
    assert engine.clock.num_implausible == 0


@pytest.mark.parametrize("skew_s", [5.0, -5.0, 2.5, -2.5, 86400.0, 3 * YEAR_S, -3 * YEAR_S])
def test_a_skew_between_the_clocks_is_no_wait_and_a_wait_in_the_front_end_still_is(
    skew_s: float,
) -> None:
    received, waited = traffic()
    engine = Engine(always(skew_s))
    waits = engine.waits_s(received, waited)
    assert np.all(waits >= 0.0)
    assert waits == pytest.approx(waited, abs=0.012)
    assert engine.clock.num_implausible == 1


def test_a_front_end_that_is_a_little_ahead_makes_waits_shorter_by_no_more_than_that() -> None:
    received, waited = traffic()
    waits = Engine(always(0.2)).waits_s(received, waited)
    assert np.all(waits <= np.array(waited) + 1e-6)
    assert np.all(waits >= np.maximum(0.0, np.array(waited) - 0.21))


@pytest.mark.parametrize("step_s", [5.0, -5.0, 0.7, -0.7, 2.5, -2.5, YEAR_S, -YEAR_S])
@pytest.mark.parametrize("at_s", [110.0, 110.0005, 120.25])
def test_a_step_of_the_wall_clock_of_one_machine_harms_nobody(step_s: float, at_s: float) -> None:
    received, waited = traffic()
    waits = Engine(after(step_s, at_s), after(step_s, at_s)).waits_s(received, waited)
    # Those under way meanwhile too.
    assert np.all(waits <= np.array(waited) + 1e-6)
    assert np.count_nonzero(waits < np.array(waited) - 1e-6) <= 1


@pytest.mark.parametrize("step_s", [0.7, -0.7, 5.0, -5.0])
def test_a_step_harms_none_of_the_many_that_are_under_way_meanwhile(step_s: float) -> None:
    received = [100.0, *np.linspace(110.3, 110.4, 50).tolist()]
    waited = [0.005, *[0.35] * 50]
    at_s = 110.2  # all but the first were stamped before and are received after
    waits = Engine(after(step_s, at_s), after(step_s, at_s)).waits_s(received, waited)
    assert waits == pytest.approx(waited, abs=1e-6)


@pytest.mark.parametrize("step_s", [0.7, -0.7, 5.0, -5.0])
def test_a_step_of_the_engines_wall_clock_alone_harms_nobody(step_s: float) -> None:
    received, waited = traffic()
    waits = Engine(always(0.0), after(step_s, 120.0)).waits_s(received, waited)
    assert waits == pytest.approx(waited, abs=0.012)


@pytest.mark.parametrize("step_s", [5.0, -5.0, 2.5, -2.5])
def test_a_step_of_the_front_ends_clock_alone_harms_nobody(step_s: float) -> None:
    received, waited = traffic()
    waits = Engine(after(step_s, 120.0)).waits_s(received, waited)
    assert np.all(waits <= np.array(waited) + 1e-6)
    assert waits == pytest.approx(waited, abs=0.3)
    assert np.count_nonzero(np.abs(waits - waited) > 0.012) <= 1


@pytest.mark.parametrize("step_s", [0.6, -0.6])
def test_a_small_step_of_a_skewed_clock_is_found_within_seconds(step_s: float) -> None:
    received, waited = traffic()
    engine = Engine(lambda time_s: -5.0 + after(step_s, 110.0)(time_s))
    waits = engine.waits_s(received, waited)
    late = np.array(received) > 132.0
    assert late.sum() > 50
    assert waits[late] == pytest.approx(np.array(waited)[late], abs=0.012)


@pytest.mark.parametrize("drift", [1e-3, -1e-3])
def test_clocks_that_drift_apart_make_no_wait_of_more_than_the_usual_second(drift: float) -> None:
    received = np.arange(0.0, 20_000.0, 5.0).tolist()
    waited = [0.005] * len(received)
    waits = Engine(lambda time_s: drift * time_s).waits_s(received, waited)
    assert waits.max() < 1.7  # the second, and as much again in ten minutes
    assert waits[-1000:].max() < 0.05


def test_a_queue_that_grows_in_the_front_end_counts_as_waiting() -> None:
    received = np.arange(100.0, 130.0, 0.05).tolist()
    waited = np.clip(0.2 * (np.array(received) - 102.0), 0.0, 4.0).tolist()
    engine = Engine(always(0.0))
    assert engine.waits_s(received, waited) == pytest.approx(waited, abs=1e-6)


def test_a_wait_while_the_engine_did_not_look_is_believed() -> None:
    clock = ArrivalClock()
    clock.look(10.0)
    assert clock.wait_s(10.0, now_s=10.0, wall_s=10.0) == 0.0
    clock.look(10.0)  # a step of eight seconds begins
    assert clock.wait_s(10.5, now_s=18.0, wall_s=18.0) == pytest.approx(7.5)
    clock.look(18.0)
    assert clock.wait_s(10.5, now_s=18.0, wall_s=18.0) == pytest.approx(7.5)  # same queue
    assert clock.num_implausible == 0


def test_a_single_wait_that_nothing_explains_counts_from_its_receipt() -> None:
    received = [100.0, 101.0, 102.0, 103.0]
    engine = Engine(always(0.0))
    waits = engine.waits_s(received, [0.005, 60.0, 0.004, 0.3])
    assert waits == pytest.approx([0.005, 0.0, 0.004, 0.3], abs=1e-6)
    assert engine.clock.num_implausible == 1


def test_each_front_end_has_a_clock_of_its_own() -> None:
    clock = ArrivalClock()
    for i in range(20):
        now_s = 50.0 + i
        clock.look(now_s)
        for number, skew_s in enumerate((0.0, 5.0, -5.0)):
            wait_s = clock.wait_s(now_s - 0.2 + skew_s, now_s=now_s, wall_s=now_s, front_end=number)
            assert wait_s == pytest.approx(0.0 if number else 0.2, abs=1e-9)
    assert clock.num_implausible == 2


@pytest.mark.parametrize("stamp_s", [float("nan"), float("inf"), -float("inf")])
def test_a_stamp_that_is_no_time_counts_from_receipt(stamp_s: float) -> None:
    clock = ArrivalClock()
    assert clock.wait_s(stamp_s, now_s=5.0, wall_s=5.0) == 0.0
    assert clock.wait_s(4.8, now_s=5.0, wall_s=5.0) == pytest.approx(0.2)
