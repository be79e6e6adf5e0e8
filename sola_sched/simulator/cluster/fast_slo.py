"""The fast model with what `sola_sched` does to requests, in its simplest form.

Kept of the `attain` planner (docs/design.md, "The objective"): prompts in order of their TTFT
deadlines; if not all can be on time, the costliest are given up, which then wait until nobody on
time does; a step is no longer than the smallest bank of the decodes on course allows, or, where
nobody is lost and somebody would be, than they can catch up with; of decodes that steps have become
too long for, those that bear the least are held, so that the others stay on course, and so are
those that came too late. The share of the lost shortens what the others may take, without being
served.
Left out: prompts alone, slots and memory as resources to plan, classes.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from sola_sched.prediction.length import NUM_LEVELS, remaining_mean
from sola_sched.simulator.cluster.fast import FastInstance, FastRequest
from sola_sched.simulator.cluster.step_model import BatchTime

#: Share of each target kept as a margin; the scheduler's default.
_SAFETY = 0.05
#: A decode is lost only if steps are longer than it bears by more than 1 / this; likewise.
_DECODE_MARGIN = 0.9
#: Share of the time that the lost get; the scheduler's default.
_LOST_SHARE = 0.05
#: Chunks are whole tiles; a shorter one is not worth what a step with it costs more.
_TILE = 128


class FastSloInstance(FastInstance):
    """See `FastInstance` and the module."""

    serves_lost_last = True

    def __init__(self, batch_time: BatchTime, **options: Any) -> None:
        super().__init__(batch_time, **options)
        self._numbers = itertools.count()
        self._on_time: list[tuple[float, int, FastRequest]] = []  # by deadline
        self._late: deque[FastRequest] = deque()
        # For each TPOT target, decodes on course by when token 0 would have been due.
        self._dues: dict[float, list[tuple[float, int, FastRequest]]] = {}
        self._lost: dict[str, FastRequest] = {}  # decodes that run and cannot attain
        self._held: dict[str, FastRequest] = {}  # those of them that sit out
        self._held_kv = 0

    # The queue.

    def _push(self, request: FastRequest) -> None:
        deadline_s = request.arrival_s + request.slo.ttft_s * (1.0 - _SAFETY)
        bisect.insort(self._on_time, (deadline_s, next(self._numbers), request))

    def _push_back(self, request: FastRequest) -> None:
        if request.req_id in self._lost:
            self._late.appendleft(request)
        else:
            bisect.insort(self._on_time, (-math.inf, next(self._numbers), request))

    def _peek(self, now_s: float) -> FastRequest | None:
        if self._on_time:
            return self._on_time[0][2]
        return self._late[0] if self._late and not self._held else None

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

    # Who is on course.

    def _joined(self, request: FastRequest) -> None:
        tpot_s = request.slo.tpot_s
        if request.first_s - request.arrival_s > request.slo.ttft_s:
            self._lost[request.req_id] = request
        elif math.isfinite(tpot_s):
            step_of_first = request.joined - request.num_done + 1
            due = (request.first_s - tpot_s * step_of_first, next(self._numbers), request)
            heapq.heappush(self._dues.setdefault(tpot_s, []), due)

    def _release(self, request: FastRequest) -> None:
        if self._held.pop(request.req_id, None) is not None:
            self._held_kv -= request.num_computed
            del self._running[request.req_id]
        else:
            super()._release(request)
        if request.num_done >= request.output_len - 1:
            self._lost.pop(request.req_id, None)

    def _used(self) -> float:
        return super()._used() + self._held_kv

    def _least_s(self) -> float:
        """How long decode steps may take for the tightest target."""
        share = _LOST_SHARE if self._late or self._lost else 0.0
        return min(self._dues) * (1.0 - _SAFETY) * (1.0 - share)

    def _keep_on_course(self, now_s: float) -> None:
        """Hold decodes that steps are too long for, and those that are lost if it helps."""
        self._slack_s(now_s)  # forgets who has ended
        if not self._dues:
            self._resume(now_s, math.inf)
            return
        least_s = self._least_s()
        step_s = float(self._batch_time.decode_s(self._num_decodes, self._ctx))
        if step_s > least_s:
            for request in self._lost.values():
                if request.is_decoding:
                    self._hold(request, now_s)
            step_s = float(self._batch_time.decode_s(self._num_decodes, self._ctx))
            if step_s > least_s:
                self._lose_too_slow(now_s)
        elif not (self._on_time or self._prefills):
            self._resume(now_s, least_s)

    def _lose_too_slow(self, now_s: float) -> None:
        """Keep the most of those on course whose bare steps are short enough for all of them."""
        order = [
            ((bank_s + (steps - 1.0) * tpot_s) / steps, number, request)
            for bank_s, tpot_s, steps, number, request in self._with_steps_left(now_s)
        ]
        order.sort(reverse=True)
        kept = ctx = 0
        for place, (sustain_s, _, request) in enumerate(order):
            ctx += request.num_computed + self._step - request.joined
            if _DECODE_MARGIN * float(self._batch_time.decode_s(place + 1, ctx)) <= sustain_s:
                kept = place + 1
        for _, _, request in order[kept:]:
            self._lost[request.req_id] = request
            self._hold(request, now_s)

    def _with_steps_left(self, now_s: float) -> list[tuple[float, float, float, int, FastRequest]]:
        """Of each decode on course its slack, target, expected steps to come, number, itself."""
        decodes = [
            (base_s + tpot_s * (self._step + 1) - now_s, tpot_s, number, request)
            for tpot_s, heap in self._dues.items()
            for base_s, number, request in heap
            if request.is_decoding
        ]
        if not decodes:
            return []
        done = [request.num_done + self._step - request.joined for *_, request in decodes]
        quantiles = np.concatenate([request.quantiles for *_, request in decodes])
        left = remaining_mean(quantiles.reshape(-1, NUM_LEVELS), np.array(done), None)
        return [
            (bank_s, tpot_s, max(1.0, steps), number, request)
            for (bank_s, tpot_s, number, request), steps in zip(decodes, left.tolist(), strict=True)
        ]

    def _lent_s(self, now_s: float, most: int) -> float:
        """The shortest step in which all prompts are on time, if decodes can catch up; else 0.

        A decode can if it does with later steps halfway between bare ones and its target.
        """
        bare_s = float(self._batch_time.decode_s(self._num_decodes, self._ctx))
        longest_s = self._step_s(most)
        token_s = (longest_s - bare_s) / most
        tokens = sum(request.num_prompt - request.num_computed for request in self._prefills)
        share = 0.0
        for deadline_s, _, request in self._on_time:
            tokens += request.num_prompt
            share = max(share, tokens * token_s / max(deadline_s - now_s, 1e-9))
        if not bare_s < (1.0 - share) * longest_s:
            return 0.0
        need_s = bare_s / (1.0 - share)
        for bank_s, tpot_s, steps, _, _ in self._with_steps_left(now_s):
            gain_s = 0.5 * max(0.0, tpot_s * (1.0 - _SAFETY) - bare_s)
            if need_s >= bank_s + (steps - 1.0) * gain_s:
                return 0.0
        return need_s

    def _are_all_on_time(self, now_s: float, token_s: float) -> bool:
        """True if no prompt that waits has to be given up, with so much time for a token."""
        tokens = sum(request.num_prompt - request.num_computed for request in self._prefills)
        for deadline_s, _, request in self._on_time:
            tokens += request.num_prompt
            if now_s + tokens * token_s > deadline_s > -math.inf:
                return False
        return True

    def _hold(self, request: FastRequest, now_s: float) -> None:
        steps = self._step - request.joined
        request.num_done += steps
        request.num_computed += steps
        request.last_s = now_s
        request.is_decoding = False
        self._num_decodes -= 1
        self._ctx -= request.num_computed
        self._held_kv += request.num_computed
        self._held[request.req_id] = request

    def _resume(self, now_s: float, limit_s: float) -> None:
        """Those that were held go on as long as steps stay within the limit."""
        while self._held:
            req_id, request = next(iter(self._held.items()))
            ctx = self._ctx + request.num_computed
            if float(self._batch_time.decode_s(self._num_decodes + 1, ctx)) > limit_s:
                return
            del self._held[req_id]
            self._held_kv -= request.num_computed
            self._num_decodes += 1
            self._ctx = ctx
            request.is_decoding, request.joined = True, self._step
            request.ends = self._step + request.output_len - request.num_done
            heapq.heappush(self._ends, (request.ends, next(self._sequence), request))

    # Steps.

    def _begin(self, now_s: float) -> None:
        self._keep_on_course(now_s)
        super()._begin(now_s)
        if self._held and math.isinf(self.next_s):
            # Nobody else has anything to do.
            self._resume(now_s, math.inf)
            super()._begin(now_s)

    def _make_room(self, now_s: float) -> None:
        """Those that are lost go first."""
        while self._held and self._used() + self._num_decodes > self._capacity:
            request = next(reversed(self._held.values()))
            self._release(request)
            request.num_prompt = request.prompt_len + request.num_done
            request.num_computed = 0
            self._push_back(request)
        super()._make_room(now_s)

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
        if request.req_id in self._lost:
            return True
        if slack_s >= 0.0:
            return False
        step_s = float(self._batch_time.decode_s(self._num_decodes, self._ctx))
        left = request.ends - self._step
        if slack_s + left * (request.slo.tpot_s - step_s) >= 0.0:
            return False
        self._lost[request.req_id] = request
        return True

    def _room(self, now_s: float) -> int:
        """The largest chunk whose step ends within the slack."""
        most = super()._room(now_s)
        if not (self._prefills or self._on_time or self._late):
            return most
        slack_s = self._slack_s(now_s) * (1.0 - _SAFETY)
        room = self._tokens_within(slack_s, most)
        if self._on_time and not (self._lost or self._late):
            token_s = self._step_s(room) / room if room else math.inf
            if not self._are_all_on_time(now_s, token_s):
                lent_s = self._lent_s(now_s, most)
                if lent_s:
                    # The next whole tile: a little less would not be in time.
                    room = max(room, min(most, self._tokens_within(lent_s, most) + _TILE))
        if self._on_time and room:
            self._sort_out(now_s, self._step_s(room) / room)
        return room if room >= min(_TILE, self._wanted()) else 0

    def _tokens_within(self, limit_s: float, most: int) -> int:
        """Prompt tokens of a step that takes no longer."""
        tiles = -(-most // _TILE)
        if math.isfinite(limit_s):
            low, high = 0, tiles
            while low < high:
                middle = (low + high + 1) // 2
                if self._step_s(min(most, middle * _TILE)) > limit_s:
                    high = middle - 1
                else:
                    low = middle
            tiles = low
        return min(most, tiles * _TILE)

    def _step_s(self, tokens: int) -> float:
        return self._batch_time.step_s(
            self._num_decodes, self._ctx, tokens, float(tokens * tokens), 0.0
        )

    def _wanted(self) -> int:
        """Tokens of the prompt that is next."""
        if self._prefills:
            return self._prefills[0].num_prompt - self._prefills[0].num_computed
        head = self._on_time[0][2] if self._on_time else self._late[0]
        return head.num_prompt

    def _num_steps(self, now_s: float) -> int:
        steps = super()._num_steps(now_s)
        # Who is on course changes as contexts grow.
        return min(steps, 8) if self._held or self._lost else steps

    def _quiet_steps(self, now_s: float) -> int:
        """Decode steps until the bank holds a chunk."""
        return 2
