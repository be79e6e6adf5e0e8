"""Where the added time of a step goes: the parts of our calls, and vLLM's own time beside ours."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin

#: Parts of a step, and what they are; none counts what it calls of another one.
PARTS = {
    "vllm": "vLLM's own two calls, in ours",
    "observe": "the state of the step",
    "plan": "the planner",
    "apply": "what vLLM gets to see",
    "book_step": "booking the step",
    "book_tokens": "booking its outcome",
    "book_ends": "booking ends",
    "metrics": "metrics",
    "around": "our two calls, but for all of these",
    "arrivals": "booking arrivals, outside of both calls",
}
#: Where they are: attributes of the scheduler, and methods of these.
_METHODS = {
    "observe": ("_planning", "_plan"),
    "plan": ("sola_planner", "plan"),
    "apply": ("_steering", "_show"),
    "book_step": ("_booking", "_record"),
    "book_tokens": ("_booking", "_learn"),
    "book_ends": ("_booking", "_has_ended", "_book_end"),
    "metrics": ("_reporting.telemetry", "count_step", "send"),
    "arrivals": ("_booking", "_arrived"),
}


class Stopwatch:
    """Wall time by part, each without the parts that it calls."""

    def __init__(self) -> None:
        self.ns: defaultdict[str, int] = defaultdict(int)
        self._inner_ns = [0]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose time counts as `part`."""
        inner, now = self._inner_ns, time.perf_counter_ns

        def measured(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            start = now()
            try:
                return call(*args, **kwargs)
            finally:
                passed = now() - start
                self.ns[part] += passed - inner.pop()
                inner[-1] += passed

        return measured


class _Timed(AsyncScheduler):
    """vLLM's own scheduler: its time in both calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stopwatch = Stopwatch()
        super().__init__(*args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return self.stopwatch.timed("vllm", super().schedule)(*args, **kwargs)

    def update_from_output(self, *args: Any) -> Any:
        return self.stopwatch.timed("vllm", super().update_from_output)(*args)


class TimedSola(SolaSchedulerMixin, _Timed):
    """Ours, part by part."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch = self.stopwatch
        for part, (where, *names) in _METHODS.items():
            owner = attrgetter(where)(self)
            for name in names:
                setattr(owner, name, watch.timed(part, getattr(owner, name)))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return self.stopwatch.timed("around", super().schedule)(*args, **kwargs)

    def update_from_output(self, *args: Any) -> Any:
        return self.stopwatch.timed("around", super().update_from_output)(*args)
