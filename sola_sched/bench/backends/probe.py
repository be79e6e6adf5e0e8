"""Measures what a live vLLM scheduler costs and does."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from sola_sched.bench.backends.base import SchedulerStats

#: The cost model's error is a mean over about so many steps.
_STEPS_PER_ERROR = 100


class SchedulerProbe:
    """Measures a live vLLM scheduler by wrapping three of its bound methods.

    CPU time is that of the calling thread, so other processes do not count into it.
    """

    def __init__(self, scheduler: Any) -> None:
        schedule, update = scheduler.schedule, scheduler.update_from_output
        preempt = scheduler._preempt_request
        monitor = getattr(scheduler, "sola_monitor", None)
        self._guard = getattr(scheduler, "sola_guard", None)
        self.reset()

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            start_s = time.thread_time()
            output = schedule(*args, **kwargs)
            spent_s = time.thread_time() - start_s
            self._total_cpu_s += spent_s
            if output.total_num_scheduled_tokens:
                self._schedule_cpu_s.append(spent_s)
                self._num_running.append(len(output.num_scheduled_tokens))
            return output

        def timed_update(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            start_s = time.thread_time()
            result = update(scheduler_output, *args, **kwargs)
            spent_s = time.thread_time() - start_s
            self._total_cpu_s += spent_s
            if scheduler_output.total_num_scheduled_tokens:
                self._update_cpu_s.append(spent_s)
                if monitor is not None and len(self._update_cpu_s) % _STEPS_PER_ERROR == 0:
                    self._cost_errors.append(monitor.cost.mean_abs_error)
            return result

        def counted_preempt(*args: Any, **kwargs: Any) -> Any:
            self._num_preemptions += 1
            return preempt(*args, **kwargs)

        scheduler.schedule = timed_schedule
        scheduler.update_from_output = timed_update
        scheduler._preempt_request = counted_preempt

    def reset(self) -> None:
        """Forget everything measured so far."""
        self._schedule_cpu_s: list[float] = []
        self._update_cpu_s: list[float] = []
        self._num_running: list[int] = []
        self._total_cpu_s = 0.0
        self._num_preemptions = 0
        self._cost_errors: list[float] = []

    @property
    def problem(self) -> str:
        """What makes a comparison worthless: parts of our scheduler that failed; else empty."""
        failures = {} if self._guard is None else dict(self._guard.num_failures)
        return f"sola_sched failed in this run, see the log (times: {failures})" if failures else ""

    def stats(self) -> SchedulerStats:
        """Totals since the last ``reset``."""
        pairs = zip(self._schedule_cpu_s, self._update_cpu_s, strict=False)
        running = self._num_running
        errors = [error for error in self._cost_errors if math.isfinite(error)]
        return SchedulerStats(
            num_steps=len(self._schedule_cpu_s),
            cpu_s=self._total_cpu_s,
            step_cpu_s=[schedule_s + update_s for schedule_s, update_s in pairs],
            num_preemptions=self._num_preemptions,
            max_num_running=max(running, default=0),
            mean_num_running=float(np.mean(running)) if running else math.nan,
            cost_model_error=float(np.mean(errors)) if errors else math.nan,
        )
