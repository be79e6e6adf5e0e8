from __future__ import annotations

import time

import pytest

from sola_sched.bench.backends.clock import CLOCKS, CpuClock, make_clock


@pytest.mark.parametrize("name", CLOCKS)
def test_clocks_advance_and_wait(name: str) -> None:
    clock = make_clock(name)
    start_s = clock.now_s()

    due_s = start_s + 0.02
    while clock.now_s() < due_s:
        clock.wait_until(due_s)

    assert due_s <= clock.now_s() < due_s + 5.0
    assert clock.name == name


def test_cpu_clock_skips_waits_and_ignores_sleep() -> None:
    clock = CpuClock()
    real_s, start_s = time.monotonic(), clock.now_s()

    clock.wait_until(start_s + 1000.0)
    waited_s = clock.now_s()
    time.sleep(0.2)

    assert 1000.0 <= waited_s - start_s < 1001.0
    assert clock.now_s() - waited_s < 0.1
    assert time.monotonic() - real_s < 60.0


def test_cpu_clock_counts_work() -> None:
    clock = CpuClock()
    start_s, cpu_s = clock.now_s(), time.thread_time()

    while time.thread_time() - cpu_s < 0.05:
        pass

    assert clock.now_s() - start_s >= 0.05
