"""Failures injected into the scheduler at the calls between it and its parts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import sola_sched
from sola_sched.colocation.lease import Lease
from sola_sched.core.arrivals import ArrivalClock
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.queues import PlannedQueue
from sola_sched.core.steps import StepsInFlight
from sola_sched.cost.model import CostModel
from sola_sched.kv_swap.host_copy import Segment
from sola_sched.kv_swap.host_pool import SlotAllocator
from sola_sched.kv_swap.manager import SwapManager
from sola_sched.kv_swap.policy import Link
from sola_sched.kv_swap.worker import SwapWorker
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.planner.alise import AlisePlanner
from sola_sched.planner.attain import AttainPlanner
from sola_sched.planner.doubling import DoublingPlanner
from sola_sched.planner.paper import PaperPlanner
from sola_sched.vllm_adapter.requests.rejecting import Rejecting
from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin
from sola_sched.vllm_adapter.steps import planning
from sola_sched.vllm_adapter.steps.steering import Steering
from sola_sched.vllm_adapter.swap.swapping import Swapping
from sola_sched.vllm_adapter.versions import Seams


class EndlessAnswers:
    """A predictor client that has an answer for a random request at every step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def poll(self) -> list[Any]:
        names = list(self._scheduler.requests)[:1]
        return [(name, sola_sched.LengthPrediction.exactly(50)) for name in names]

    def submit(self, *_: Any) -> None: ...
    def ended(self, *_: Any, **__: Any) -> None: ...
    def forget_but(self, *_: Any) -> None: ...
    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


#: Where it may fail: owner and attribute. Each is called from `schedule`, `update_from_output`,
#: `add_request` or vLLM's hooks in them.
SITES: dict[str, tuple[Any, str]] = {
    "attain": (AttainPlanner, "plan"),
    "paper": (PaperPlanner, "plan"),
    "alise": (AlisePlanner, "plan"),
    "doubling": (DoublingPlanner, "plan"),
    "arrival clock": (ArrivalClock, "wait_s"),
    "monitor add": (StateMonitor, "add"),
    "monitor begin_step": (StateMonitor, "begin_step"),
    "monitor expect_cached": (StateMonitor, "expect_cached"),
    "monitor state": (StateMonitor, "state"),
    "monitor parked": (StateMonitor, "parked"),
    "monitor predicted": (StateMonitor, "predicted"),
    "monitor requeued": (StateMonitor, "requeued"),
    "monitor admitted": (StateMonitor, "admitted"),
    "monitor scheduled": (StateMonitor, "scheduled"),
    "monitor completed": (StateMonitor, "completed"),
    "monitor finished": (StateMonitor, "finished"),
    "monitor set_busy": (StateMonitor, "set_busy"),
    "monitor rebuild": (StateMonitor, "rebuild"),
    "monitor unplanned": (StateMonitor, "unplanned"),
    "steps begin": (StepsInFlight, "begin"),
    "steps end": (StepsInFlight, "end"),
    "cost renew": (CostModel, "renew"),
    "lengths": (LengthHistogram, "observe"),
    "waits": (planning, "update_waits"),
    "show queue": (PlannedQueue, "plan"),
    "show all": (PlannedQueue, "unplan"),
    "queue add": (PlannedQueue, "add_request"),
    "queue prepend": (PlannedQueue, "prepend_request"),
    "queue peek": (PlannedQueue, "peek_request"),
    "queue pop": (PlannedQueue, "pop_request"),
    "queue remove": (PlannedQueue, "remove_requests"),
    "queue bool": (PlannedQueue, "__bool__"),
    "queue len": (PlannedQueue, "__len__"),
    "queue iter": (PlannedQueue, "__iter__"),
    "queue contains": (PlannedQueue, "__contains__"),
    "merge skipped": (Seams, "merge_skipped"),
    "part skipped": (Seams, "part_skipped"),
    "parked": (Seams, "parked"),
    "resuming": (Seams, "resuming"),
    "may preempt": (Seams, "can_preempt"),
    "is ending": (Seams, "is_ending"),
    "hold": (Steering, "_hold"),
    "preempt": (Steering, "_preempt"),
    "answer": (Rejecting, "answer"),
    "predictor ended": (EndlessAnswers, "ended"),
    "predictor forget_but": (EndlessAnswers, "forget_but"),
    "predictor poll": (EndlessAnswers, "poll"),
    "predictor submit": (EndlessAnswers, "submit"),
    "reject": (Rejecting, "reject"),
    "statistics": (SolaSchedulerMixin, "sola_stats"),
}
#: The same of KV swapping.
SWAP_SITES: dict[str, tuple[Any, str]] = {
    "expect loads": (Swapping, "expect_loads"),
    "plan swaps": (Swapping, "with_swaps"),
    "weigh a copy": (Link, "is_worth_loading"),
    "learn from a copy": (Link, "observe"),
    "save": (SwapManager, "save"),
}
#: The same of the bookkeeping of copies, where vLLM calls it in its own step, and within it.
COPY_SITES: dict[str, tuple[Any, str]] = {
    "copy cut": (SwapManager, "cut"),
    "copy covers": (SwapManager, "covered_tokens"),
    "copy dropped": (SwapManager, "drop"),
    "copy ended": (SwapManager, "_ended"),
    "copy loadable": (SwapManager, "loadable"),
    "copy loaded": (SwapManager, "load"),
    "copy released": (SwapManager, "_release"),
    "copy saved": (SwapManager, "_order_save"),
    "copy saving": (SwapManager, "is_saving"),
    "copy started": (SwapManager, "_start"),
    "copies dropped": (SwapManager, "drop_all"),
    "copies free blocks": (SwapManager, "frees_blocks"),
    "copies idle": (SwapManager, "is_idle"),
    "copies reported": (SwapManager, "report"),
    "copies sent": (SwapManager, "take_jobs"),
    "pieces of a load": (Segment, "load_pieces"),
    "session copy": (Swapping, "_cut_copy"),
    "slots freed": (SlotAllocator, "free"),
    "slots taken": (SlotAllocator, "allocate"),
}
#: The same of the turns on a shared GPU.
TURN_SITES: dict[str, tuple[Any, str]] = {
    "turn given": (Lease, "give"),
    "turn left": (Lease, "close"),
    "turn taken": (Lease, "take"),
    "turn wanted": (Lease, "is_wanted"),
    "turn withdrawn": (Lease, "withdraw"),
}
#: The same of the worker half of swapping, when it starts.
WORKER_SITES: dict[str, tuple[Any, str]] = {"worker started": (SwapWorker, "__init__")}
ALL_SITES = SITES | SWAP_SITES | COPY_SITES | TURN_SITES | WORKER_SITES


class InjectedError(Exception):
    """What the injected failures raise."""


class Faults:
    """Raises at the sites named, before or after the call itself.

    Args:
        sites: Keys of `ALL_SITES`.
        share: Share of the calls that fail.
        seed: Which ones.
        first: Calls of each site that are left alone, e.g. while an engine starts.

    Attributes:
        num_raised: By site.
        share_of, first_of: By site, where it is another share or number.
    """

    def __init__(self, *sites: str, share: float, seed: int = 0, first: int = 0) -> None:
        self.num_raised = dict.fromkeys(sites, 0)
        self._rng = random.Random(seed)
        self._share, self._first = share, first
        self.share_of: dict[str, float] = {}
        self.first_of: dict[str, int] = {}
        self._num_calls = dict.fromkeys(sites, 0)
        self._has_stopped = False

    @property
    def total(self) -> int:
        """Failures injected so far."""
        return sum(self.num_raised.values())

    def stop(self, _result: object = None) -> tuple[()]:
        """Inject nothing from here on, as when all requests have ended and figures are read."""
        self._has_stopped = True
        return ()

    @contextmanager
    def injected(self) -> Iterator[Faults]:
        """Inject until the block ends."""
        with ExitStack() as stack:
            for site in self.num_raised:
                owner, name = ALL_SITES[site]
                original = getattr(owner, name)
                failing: Any
                if isinstance(original, property):
                    failing = property(self._failing(site, original.fget))
                else:
                    failing = self._failing(site, original)
                stack.enter_context(mock.patch.object(owner, name, failing))
            yield self
        print(f"{self.total} failures injected")  # `pytest -rP` shows it

    def _failing(self, site: str, original: Any) -> Any:
        @wraps(original)
        def failing(*args: Any, **kwargs: Any) -> Any:
            self._num_calls[site] += 1
            share = self.share_of.get(site, self._share)
            fails = (
                not self._has_stopped
                and self._num_calls[site] > self.first_of.get(site, self._first)
                and self._rng.random() < share
            )
            if fails and self._rng.random() < 0.5:
                self._raise(site)
            result = original(*args, **kwargs)
            if fails:
                self._raise(site)
            return result

        return failing

    def _raise(self, site: str) -> None:
        self.num_raised[site] += 1
        raise InjectedError(f"injected at {site!r}")
