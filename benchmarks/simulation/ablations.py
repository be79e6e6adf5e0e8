"""Schedulers with one part left out: SOLA's section 6.3.1, and every mechanism of `attain`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from unittest import mock

import numpy as np

from sola_sched.config.sola_config import CONFIG_KEY
from sola_sched.planner import paper
from sola_sched.planner.attain import best_effort, entry, lost, pace, planner
from sola_sched.planner.base import peak_tokens
from sola_sched.simulator.baselines.base import STOCK, Rule
from sola_sched.simulator.baselines.rules import ShortestJobFirst
from sola_sched.vllm_adapter.scheduler import Scheduler


class WithoutPeakMemory(Scheduler):
    """`attain` that admits whatever has a slot and, for now, blocks."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with (
            mock.patch.object(entry, "num_that_fit", _all_fit),
            mock.patch.object(paper, "num_that_fit", _all_fit),
        ):
            return super().schedule(*args, **kwargs)


class PaperWithoutPeakMemory(WithoutPeakMemory):
    """The same with SOLA's own policy."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.additional_config[CONFIG_KEY]["policy"] = "paper"
        super().__init__(vllm_config, *args, **kwargs)


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


def _without(owner: Any, name: str, value: Any) -> type[Scheduler]:
    """`attain` in which a name of its planner has another value."""

    class Without(Scheduler):
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(owner, name, value):
                return super().schedule(*args, **kwargs)

    return Without


def _tuned(**constants: Any) -> type[Scheduler]:
    """`attain` with other constants."""

    class Tuned(Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            attain: Any = self.sola_planner
            attain.tuning = dataclasses.replace(attain.tuning, **constants)

    return Tuned


class _JobsWithoutLead(pace.Jobs):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lead_s = 0.0


_weigh = lost.Decodes.weigh


def _weigh_banks(decodes: lost.Decodes) -> None:
    """A step is never longer than the smallest bank, or than a bare one where that is empty."""
    _weigh(decodes)
    least_s = float(decodes.bank_s[decodes.alive].min(initial=math.inf))
    decodes.slack_s = max(decodes.decode_s, least_s)


WithoutCatchingUp = _without(lost.Decodes, "weigh", _weigh_banks)
WithoutPromptsAlone = _without(planner, "find_prompts_alone", lambda *_, **__: None)
WithoutLead = _without(pace, "Jobs", _JobsWithoutLead)
WithoutLending = _without(lost.Decodes, "most_lent_s", lambda _: -math.inf)
WithoutLendingPastLost = _without(pace, "_is_sustained", lambda _: False)
WithoutFirstDeadline = _without(pace, "first_due_s", lambda *_: math.inf)
WithoutTooSlow = _without(lost, "_lose_too_slow", lambda *_: None)
WithoutOthersLost = _without(best_effort._LostStep, "_ends_beside", lambda *_: False)
WithoutBlocking = _without(best_effort.Account, "is_full", property(lambda _: False))
WithoutTiles = _tuned(many_tiles=0, sub_tile=1)
WithPlannedMemory97 = _tuned(planned_memory=0.97)
WithoutMargins = _tuned(decode_margin=1.0, prefill_margin=1.0)
