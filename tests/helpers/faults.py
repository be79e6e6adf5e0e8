"""Failures injected into the scheduler at the calls between it and its parts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from sola_sched.core.monitor import StateMonitor
from sola_sched.core.queues import PlannedQueue
from sola_sched.cost.model import CostModel
from sola_sched.kv_swap.manager import SwapManager
from sola_sched.kv_swap.policy import Link
from sola_sched.length_predictor.histogram import LengthHistogram
from sola_sched.planner.alise import AlisePlanner
from sola_sched.planner.attain import AttainPlanner
from sola_sched.planner.paper import PaperPlanner
from sola_sched.vllm_adapter import scheduler as scheduler_module
from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin
from sola_sched.vllm_adapter.swapping import SwapMixin

#: Where it may fail: owner and attribute. Each is called from `schedule`, `update_from_output`,
#: `add_request` or vLLM's hooks in them.
SITES: dict[str, tuple[Any, str]] = {
    "attain": (AttainPlanner, "plan"),
    "paper": (PaperPlanner, "plan"),
    "alise": (AlisePlanner, "plan"),
    "monitor add": (StateMonitor, "add"),
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
    "cost observe": (CostModel, "observe"),
    "cost step": (CostModel, "step_s"),
    "lengths": (LengthHistogram, "observe"),
    "waits": (scheduler_module, "update_waits"),
    "show queue": (PlannedQueue, "plan"),
    "hide": (SolaSchedulerMixin, "_hide"),
    "preempt": (SolaSchedulerMixin, "_preempt_rows"),
    "reject": (SolaSchedulerMixin, "_reject"),
    "statistics": (SolaSchedulerMixin, "sola_stats"),
}
#: The same of KV swapping.
SWAP_SITES: dict[str, tuple[Any, str]] = {
    "expect loads": (SwapMixin, "_expect_loads"),
    "plan swaps": (SwapMixin, "_with_swaps"),
    "weigh a copy": (Link, "is_worth_loading"),
    "learn from a copy": (Link, "observe"),
    "save": (SwapManager, "save"),
}


class InjectedError(Exception):
    """What the injected failures raise."""


class Faults:
    """Raises at the sites named, before or after the call itself.

    Args:
        sites: Keys of `SITES` and `SWAP_SITES`.
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

    @property
    def total(self) -> int:
        """Failures injected so far."""
        return sum(self.num_raised.values())

    @contextmanager
    def injected(self) -> Iterator[Faults]:
        """Inject until the block ends."""
        with ExitStack() as stack:
            for site in self.num_raised:
                owner, name = (SITES | SWAP_SITES)[site]
                stack.enter_context(
                    mock.patch.object(owner, name, self._failing(site, getattr(owner, name)))
                )
            yield self

    def _failing(self, site: str, original: Any) -> Any:
        @wraps(original)
        def failing(*args: Any, **kwargs: Any) -> Any:
            self._num_calls[site] += 1
            share = self.share_of.get(site, self._share)
            fails = (
                self._num_calls[site] > self.first_of.get(site, self._first)
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
