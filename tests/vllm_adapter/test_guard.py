"""The account of failures: what is logged, what is forgiven, when the guard steps aside."""

from __future__ import annotations

import itertools
import logging

import pytest

from sola_sched.vllm_adapter.guard import (
    FIRST_PAUSE,
    FORGIVEN_AFTER_STEPS,
    LONGEST_PAUSE,
    PATIENCE,
    Guard,
)

pytestmark = pytest.mark.injects_failures


@pytest.fixture
def guard() -> Guard:
    return Guard(logging.getLogger("test_guard"))


def fail(guard: Guard, num_times: int, quiet_steps: int = 1, doing: str = "planning") -> None:
    for _ in range(num_times):
        for _ in range(quiet_steps):
            guard.step()
        guard.failed(doing, ValueError("no"))
        guard.restored()


def test_a_failure_is_logged_once_with_its_traceback_and_counted_each_time(
    guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        try:
            raise ValueError("no such row")
        except ValueError as error:
            guard.failed("planning", error)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.exc_info is not None
    assert "no such row" in str(record.exc_info[1])
    assert guard.num_failures == {"planning": 3}


def test_failures_of_another_kind_or_elsewhere_are_logged_too(
    guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    guard.failed("planning", ValueError())
    guard.failed("planning", KeyError())
    guard.failed("booking", ValueError())
    assert len(caplog.records) == 3


def test_the_state_is_lost_until_it_is_restored(guard: Guard) -> None:
    assert not guard.is_lost
    guard.failed("planning", ValueError())
    assert guard.is_lost
    guard.restored()
    assert not guard.is_lost


def test_repeated_failures_end_it_for_good(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    fail(guard, PATIENCE)
    assert not guard.is_aside
    fail(guard, 1)
    assert guard.is_aside
    guard.restored()
    assert guard.is_lost
    assert sum("steps aside for good" in record.message for record in caplog.records) == 1


def test_failures_far_apart_are_forgiven(guard: Guard) -> None:
    fail(guard, 20 * PATIENCE, quiet_steps=FORGIVEN_AFTER_STEPS)
    assert not guard.is_aside


def test_a_report_that_fails_is_logged_once_and_disturbs_nothing(
    guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10 * PATIENCE):
        guard.failed_beside("logging", ValueError("no"))
    assert not guard.is_lost
    assert not guard.is_aside
    assert len(caplog.records) == 1
    assert guard.num_failures == {"logging": 10 * PATIENCE}


def steps_to_plan(guard: Guard, num_steps: int, is_slow: bool = True) -> list[int]:
    """The steps at which a plan is made, each of them too slow or none."""
    planned = []
    for step in range(num_steps):
        guard.step()
        if not guard.is_pausing:
            planned.append(step)
            if is_slow:
                guard.took_too_long("planning", 0.5, 0.1)
    return planned


def test_a_slow_plan_leaves_the_state_as_it_is_and_is_counted(
    guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="test_guard")
    assert len(steps_to_plan(guard, PATIENCE)) == PATIENCE
    assert not guard.is_lost
    assert guard.num_failures["planning"] == PATIENCE
    assert "0.500 s" in caplog.text
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1


def test_slow_plans_make_planning_pause_ever_longer_and_never_end_it(guard: Guard) -> None:
    planned = steps_to_plan(guard, 20 * LONGEST_PAUSE)

    pauses = [after - before for before, after in itertools.pairwise(planned[PATIENCE:])]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE
    assert not guard.is_aside
    assert not guard.is_lost


def test_planning_goes_on_once_plans_are_quick_again(guard: Guard) -> None:
    steps_to_plan(guard, 3 * FIRST_PAUSE)
    later = steps_to_plan(guard, 5000, is_slow=False)
    assert later[0] <= 2 * FIRST_PAUSE
    assert later == list(range(later[0], 5000))

    again = steps_to_plan(guard, FIRST_PAUSE + PATIENCE + 2)

    assert len(again) == PATIENCE + 2  # as at first


def test_slow_plans_do_not_add_up_with_failures(guard: Guard) -> None:
    steps_to_plan(guard, 10 * FIRST_PAUSE)
    fail(guard, PATIENCE)
    assert not guard.is_aside
