"""The fast model with what `sola_sched` does to requests, in its simplest form.

Kept of the `attain` planner (docs/design.md, "The objective"): prompts in order of their TTFT
deadlines; if not all can be on time, the costliest are given up, which then wait until nobody on
time does; a step is no longer than the smallest bank of the decodes on course allows; admission
stops where bare decode steps would outgrow the TPOT targets. Left out: borrowing, decodes that are
held, prompts alone, slots and memory as resources to plan, the share of the lost.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from sola_sched.simulator.cluster.fast import FastInstance, FastRequest
from sola_sched.simulator.cluster.step_model import BatchTime

#: Share of each target kept as a margin; the scheduler's default.
_SAFETY = 0.05
#: A chunk shorter than this is not worth what a step with one costs more.
_LEAST_CHUNK = 128


class FastSloInstance(FastInstance):
    """See `FastInstance` and the module."""

    def __init__(self, batch_time: BatchTime, **options: Any) -> None:
        super().__init__(batch_time, **options)
        self._numbers = itertools.count()
        self._on_time: list[tuple[float, int, FastRequest]] = []  # by deadline
        self._late: deque[FastRequest] = deque()
        # For each TPOT target, decodes by when token 0 would have been due.
        self._dues: dict[float, list[tuple[float, int, FastRequest]]] = {}

    def _push(self, request: FastRequest) -> None:
        deadline_s = request.arrival_s + request.slo.ttft_s * (1.0 - _SAFETY)
        bisect.insort(self._on_time, (deadline_s, next(self._numbers), request))

    def _push_back(self, request: FastRequest) -> None:
        bisect.insort(self._on_time, (-math.inf, next(self._numbers), request))

    def _peek(self, now_s: float) -> FastRequest | None:
        if not self._has_time_for_another():
            return None
        if self._on_time:
            return self._on_time[0][2]
        return self._late[0] if self._late else None

    def _pop(self) -> FastRequest:
        return self._on_time.pop(0)[2] if self._on_time else self._late.popleft()

    def _forget(self, request: FastRequest) -> None:
        if request in self._late:
            self._late.remove(request)
        else:
            self._on_time = [entry for entry in self._on_time if entry[2] is not request]

    def _waiting(self) -> Iterable[FastRequest]:
        return itertools.chain((entry[2] for entry in self._on_time), self._late)

    def _sort_out(self, now_s: float, token_s: float) -> None:
        """Give up the costliest prompts until all others can be on time (Moore and Hodgson).

        Args:
            now_s: Now.
            token_s: What a prompt token takes, with the decodes beside it.
        """
        left = sum(request.num_prompt - request.num_computed for request in self._prefills)
        time_s = now_s + left * token_s
        kept: list[tuple[int, int]] = []  # by cost, the largest first
        given_up = set()
        for place, (deadline_s, _, request) in enumerate(self._on_time):
            heapq.heappush(kept, (-request.num_prompt, place))
            time_s += request.num_prompt * token_s
            if time_s > deadline_s > -math.inf:
                tokens, costliest = heapq.heappop(kept)
                time_s += tokens * token_s
                given_up.add(costliest)
        if given_up:
            self._late.extend(self._on_time[place][2] for place in sorted(given_up))
            self._on_time = [e for i, e in enumerate(self._on_time) if i not in given_up]

    def _joined(self, request: FastRequest) -> None:
        tpot_s = request.slo.tpot_s
        if math.isfinite(tpot_s) and request.first_s - request.arrival_s <= request.slo.ttft_s:
            step_of_first = request.joined - request.num_done + 1
            due = (request.first_s - tpot_s * step_of_first, next(self._numbers), request)
            heapq.heappush(self._dues.setdefault(tpot_s, []), due)

    def _has_time_for_another(self) -> bool:
        """True if a decode step with one more request is within every target."""
        if not self._dues:
            return True
        more = len(self._running) + 1
        step_s = float(self._batch_time.decode_s(more, self._ctx))
        return step_s <= min(self._dues) * (1.0 - _SAFETY)

    def _slack_s(self, now_s: float) -> float:
        """How long the next step may take, so that no decode on course falls behind."""
        slack_s = math.inf
        for tpot_s, heap in list(self._dues.items()):
            while heap:
                base_s, _, request = heap[0]
                due_s = base_s + tpot_s * (self._step + 1)
                if request.is_decoding and not self._is_lost(request, due_s - now_s):
                    slack_s = min(slack_s, due_s - now_s)
                    break
                heapq.heappop(heap)
            if not heap:
                del self._dues[tpot_s]
        return slack_s

    def _is_lost(self, request: FastRequest, slack_s: float) -> bool:
        if slack_s >= 0.0:
            return False
        step_s = float(self._batch_time.decode_s(self._num_decodes, self._ctx))
        left = request.ends - self._step
        return slack_s + left * (request.slo.tpot_s - step_s) < 0.0

    def _room(self, now_s: float) -> int:
        """The largest chunk whose step ends within the slack."""
        most = super()._room(now_s)
        if not (self._prefills or self._on_time or self._late):
            return most
        slack_s = self._slack_s(now_s) * (1.0 - _SAFETY)

        def too_long(tokens: int) -> bool:
            step_s = self._batch_time.step_s(
                self._num_decodes, self._ctx, tokens, float(tokens * tokens), 0.0
            )
            return step_s > slack_s

        room = bisect.bisect_left(range(1, most + 1), True, key=too_long)
        if self._on_time and room:
            step_s = self._batch_time.step_s(
                self._num_decodes, self._ctx, room, float(room * room), 0.0
            )
            self._sort_out(now_s, step_s / room)
        return room if room >= min(_LEAST_CHUNK, self._wanted()) else 0

    def _wanted(self) -> int:
        """Tokens of the prompt that is next."""
        if self._prefills:
            return self._prefills[0].num_prompt - self._prefills[0].num_computed
        head = self._on_time[0][2] if self._on_time else self._late[0]
        return head.num_prompt

    def _quiet_steps(self, now_s: float) -> int:
        """Decode steps until the bank holds a chunk."""
        return 2
