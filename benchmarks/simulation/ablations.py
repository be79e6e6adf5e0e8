"""Schedulers with one part left out: SOLA's section 6.3.1, and every mechanism of `attain`."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np

from sola_sched.config.sola_config import CONFIG_KEY
from sola_sched.planner import paper
from sola_sched.planner.attain import AttainPlanner, AttainTuning
from sola_sched.planner.base import peak_tokens
from sola_sched.simulator.baselines.base import STOCK, Rule
from sola_sched.simulator.baselines.rules import ShortestJobFirst
from sola_sched.vllm_adapter.scheduler import Scheduler


class PaperWithoutPeakMemory(Scheduler):
    """SOLA's own policy, but it admits whatever has a slot and, for now, blocks."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.additional_config[CONFIG_KEY]["policy"] = "paper"
        super().__init__(vllm_config, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(paper, "num_that_fit", _all_fit):
            return super().schedule(*args, **kwargs)


class PeakMemoryAlone(ShortestJobFirst):
    """vLLM, first come first served, but admission ends where the predicted peak does (SOLA 5.1).

    Of the base class only the prediction of output lengths is used.
    """

    def plan(self) -> Rule:
        waiting = list(self.waiting)
        if not waiting:
            return STOCK
        capacity = self.kv_cache_manager.block_pool.num_gpu_blocks * self.block_size
        candidates = [*self.running, *waiting[: self._num_free_slots()]]
        used = np.array([request.num_tokens for request in candidates], dtype=np.float64)
        left = self._left(candidates)
        count = len(self.running)
        while count < len(candidates):
            if count and peak_tokens(used[: count + 1], left[: count + 1]) > capacity:
                break
            count += 1
        return Rule(admit=candidates[len(self.running) : count])

    def _left(self, requests: list[Any]) -> Any:
        classes = np.array([self._class_of(request) for request in requests])
        done = np.array([request.num_output_tokens for request in requests])
        limits = np.array([request.max_tokens for request in requests])
        return self._lengths.remaining(classes, done, limits)


def _all_fit(state: Any, growing: Any, index: Any, *_args: Any, **_kwargs: Any) -> int:
    return len(index)


def _tuned(**constants: Any) -> type[Scheduler]:
    """`attain` with other constants."""

    class Tuned(Scheduler):
        def sola_new_planner(self) -> Any:
            return AttainPlanner(self.sola_config, AttainTuning(**constants))

    return Tuned


WithoutPeakMemory = _tuned(planned_memory=math.inf)
WithoutCatchingUp = _tuned(catching_up=0.0)
WithoutHeldDecodes = _tuned(holds=False)
WithoutLimitForLost = _tuned(for_lost=math.inf)
WithoutLead = _tuned(leads=False)
WithoutLending = _tuned(lends=False)
WithoutLendingPastLost = _tuned(lends_past_lost=False)
WithoutFirstDeadline = _tuned(ends_with_first=False)
WithoutTooSlow = _tuned(decode_margin=0.0)
WithoutOthersLost = _tuned(serves_lost_together=False)
WithoutTiles = _tuned(many_tiles=0, sub_tile=1)
WithPlannedMemory97 = _tuned(planned_memory=0.97)
WithoutMargins = _tuned(decode_margin=1.0, prefill_margin=1.0)
