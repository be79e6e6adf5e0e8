"""Which decodes of the fast model of `sola_sched` are on course, and how long steps they bear.

Token j after the first is due at ``first + j * TPOT``. Whoever decodes gets a token in each step,
so one time tells its course: when its token in step 0 would have been due.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sola_sched.planner.attain import AttainTuning
from sola_sched.prediction.length import NUM_LEVELS, FloatArray, remaining_mean
from sola_sched.simulator.cluster.fast import FastRequest

#: A decode is lost only if steps are longer than it bears by more than 1 / this.
_MARGIN = AttainTuning().decode_margin


class Course(NamedTuple):
    """Decodes that can still meet their targets: arrays of one value each, seconds.

    Attributes:
        bank_s: Time until the next token is due.
        tpot_s: Targets, less the margin.
        steps: Expected steps to come, >= 1.
        requests: Themselves.
    """

    bank_s: FloatArray
    tpot_s: FloatArray
    steps: FloatArray
    requests: Sequence[FastRequest]

    @property
    def sustain_s(self) -> FloatArray:
        """The longest mean step with which each meets its target."""
        sustain_s: FloatArray = (self.bank_s + (self.steps - 1.0) * self.tpot_s) / self.steps
        return sustain_s

    def longest_s(self, bare_s: float) -> float:
        """How long a step may take: as the smallest bank, and where that is less than halfway from
        a bare step to what the decode sustains, as long as that."""
        halfway_s = bare_s + 0.5 * np.maximum(0.0, self.sustain_s - bare_s)
        catch_up_s = np.minimum(halfway_s, self.tpot_s)
        longest_s = np.where(self.bank_s >= halfway_s, self.bank_s, catch_up_s)
        return float(longest_s.min(initial=math.inf))

    def can_lend_s(self, bare_s: float) -> float:
        """The longest step that all can catch up with, in later ones halfway between bare steps and
        their targets."""
        gain_s = 0.5 * np.maximum(0.0, self.tpot_s - bare_s)
        can_lend_s = self.bank_s + (self.steps - 1.0) * gain_s
        return float(can_lend_s.min(initial=math.inf))


class Decodes:
    """Those on course, and the lost.

    Attributes:
        lost: Those that run and cannot attain, by name.
    """

    def __init__(self) -> None:
        self.lost: dict[str, FastRequest] = {}
        self._numbers = itertools.count()
        self._number_of: dict[str, int] = {}  # one that was displaced has left an older entry
        # For each TPOT target, less its margin, those on course by when their token in step 0
        # would have been due.
        self._dues: dict[float, list[tuple[float, int, FastRequest]]] = {}

    @property
    def tightest_s(self) -> float:
        """The tightest target of those on course, less its margin; inf if nobody is."""
        return min(self._dues, default=math.inf)

    def join(self, request: FastRequest, tpot_s: float) -> None:
        """One has begun to decode.

        Args:
            request: It.
            tpot_s: Its target, less the margin.
        """
        if request.first_s - request.arrival_s > request.slo.ttft_s:
            self.lost[request.req_id] = request
        elif math.isfinite(tpot_s):
            step_of_first = request.joined - request.num_done + 1
            self._number_of[request.req_id] = number = next(self._numbers)
            due = (request.first_s - tpot_s * step_of_first, number, request)
            heapq.heappush(self._dues.setdefault(tpot_s, []), due)

    def forget(self, req_id: str) -> None:
        """One has ended."""
        self.lost.pop(req_id, None)
        self._number_of.pop(req_id, None)

    def _is_current(self, number: int, request: FastRequest) -> bool:
        return request.is_decoding and self._number_of.get(request.req_id) == number

    def slack_s(self, now_s: float, step: int, bare_s: float) -> float:
        """Time until the next token of one on course is due; forgets who is not.

        Args:
            now_s: Now.
            step: Steps so far.
            bare_s: Of a step of the decodes alone.
        """
        slack_s = math.inf
        for tpot_s, heap in list(self._dues.items()):
            while heap:
                base_s, number, request = heap[0]
                bank_s = base_s + tpot_s * (step + 1) - now_s
                if self._is_current(number, request):
                    gain_s = (request.ends - step) * (tpot_s - _MARGIN * bare_s)
                    if bank_s < 0.0 and bank_s + gain_s < 0.0:
                        self.lost[request.req_id] = request
                    if request.req_id not in self.lost:
                        slack_s = min(slack_s, bank_s)
                        break
                heapq.heappop(heap)
            if not heap:
                del self._dues[tpot_s]
        return slack_s

    def longest_s(self, now_s: float, step: int, bare_s: float) -> float:
        """How long the next step may take; see `slack_s` and `Course.longest_s`."""
        slack_s = self.slack_s(now_s, step, bare_s)
        if not self._dues or slack_s >= max(bare_s, *self._dues):
            return slack_s
        return self.course(now_s, step).longest_s(bare_s)

    def course(self, now_s: float, step: int) -> Course:
        """Where those on course are."""
        found = [
            (base_s, tpot_s, request)
            for tpot_s, heap in self._dues.items()
            for base_s, number, request in heap
            if self._is_current(number, request)
        ]
        if not found:
            return Course(np.empty(0), np.empty(0), np.empty(0), ())
        base_s, tpot_s, requests = zip(*found, strict=True)
        done = np.array([request.num_done - request.joined for request in requests]) + step
        quantiles = np.concatenate([request.quantiles for request in requests])
        left = remaining_mean(quantiles.reshape(-1, NUM_LEVELS), done, None)
        targets_s = np.array(tpot_s)
        bank_s = np.array(base_s) + targets_s * (step + 1) - now_s
        return Course(bank_s, targets_s, np.maximum(left, 1.0), requests)

    def lose_too_slow(
        self, now_s: float, step: int, decode_s: Callable[[int, int], float]
    ) -> list[FastRequest]:
        """Keep the most of those on course whose bare steps are short enough for all of them.

        Args:
            now_s: Now.
            step: Steps so far.
            decode_s: Time of a step of so many decodes with so many KV tokens in all, seconds.

        Returns:
            The others, which are lost now.
        """
        course = self.course(now_s, step)
        sustain_s = course.sustain_s
        order = np.argsort(-sustain_s, kind="stable").tolist()
        kept = ctx = 0
        for count, place in enumerate(order, 1):
            request = course.requests[place]
            ctx += request.num_computed + step - request.joined
            if _MARGIN * decode_s(count, ctx) <= sustain_s[place]:
                kept = count
        too_slow = [course.requests[place] for place in order[kept:]]
        self.lost |= {request.req_id: request for request in too_slow}
        return too_slow
