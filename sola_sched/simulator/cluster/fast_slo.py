"""The fast model with what `sola_sched` does to requests, in its simplest form.

Kept of the `attain` planner (docs/design.md, "The objective"): prompts in order of their TTFT
deadlines; if not all can be on time, the costliest wait behind the others, and are given up once
they cannot even be on time alone; a step is as long as the decodes on course allow, or, where
somebody would be late, as they can catch up with, if nobody is lost or TPOT is tight and all that
comes can be served; of decodes that steps have become too long for, those that bear the least are
held, so that the others stay on course, and while prompts wait so are those that came too late. The
share of the lost shortens what the others may take, without being served.
Left out: prompts alone, slots and memory as resources to plan, classes.

Which decodes are on course, and how long steps they bear, is in `fast_decodes`.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable
from typing import Any

from sola_sched.config.slo import SloTarget
from sola_sched.core.traffic import RecentTraffic
from sola_sched.planner.attain import AttainTuning
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.engine import Ended
from sola_sched.simulator.cluster.fast import FastInstance, FastRequest
from sola_sched.simulator.cluster.fast_decodes import Decodes
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.request import VirtualRequest

#: Share of each target kept as a margin; the scheduler's default.
_SAFETY = 0.05
#: Share of the time that the lost get; the scheduler's default.
_LOST_SHARE = 0.05
#: Chunks come in whole tiles of so many tokens, small ones in smaller multiples.
_TILE = 128
_TUNING = AttainTuning()


class FastSloInstance(FastInstance):
    """See `FastInstance` and the module."""

    serves_lost_last = True

    def __init__(self, batch_time: BatchTime, **options: Any) -> None:
        super().__init__(batch_time, **options)
        self._numbers = itertools.count()
        self._on_time: list[tuple[float, int, FastRequest]] = []  # by deadline
        # Of the last step: prompts that can be on time, by deadline; whose turn it is.
        self._jobs: list[tuple[float, FastRequest]] = []
        self._turn: list[FastRequest] = []
        self._late: deque[FastRequest] = deque()
        self._decodes = Decodes()
        self._held: dict[str, FastRequest] = {}  # the lost that sit out
        self._held_kv = 0
        self._traffic = RecentTraffic()

    def add(
        self, request: VirtualRequest, slo: SloTarget, length: LengthPrediction, now_s: float
    ) -> None:
        """See `ClusterEngine.add`."""
        self._traffic.came(now_s, request.num_prompt_tokens)
        super().add(request, slo, length, now_s)

    # The queue.

    def _push(self, request: FastRequest) -> None:
        bisect.insort(self._on_time, (self._deadline_s(request), next(self._numbers), request))

    def _deadline_s(self, request: FastRequest) -> float:
        """When its prompt must end, less the margin; -inf if it goes on after a preemption."""
        if not math.isnan(request.first_s):
            return -math.inf
        return request.arrival_s + request.slo.ttft_s * (1.0 - _SAFETY)

    def _push_back(self, request: FastRequest) -> None:
        if request.req_id in self._decodes.lost:
            self._late.appendleft(request)
        else:
            self._push(request)

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

    # The decodes.

    def _joined(self, request: FastRequest) -> None:
        self._decodes.join(request, request.slo.tpot_s * (1.0 - _SAFETY))

    def _release(self, request: FastRequest) -> None:
        if self._held.pop(request.req_id, None) is not None:
            self._held_kv -= request.num_computed
            del self._running[request.req_id]
        else:
            super()._release(request)

    def _end(self, request: FastRequest, now_s: float) -> Ended:
        self._decodes.forget(request.req_id)
        self._traffic.ended(request.output_len)
        return super()._end(request, now_s)

    def remove(self, req_id: str, now_s: float) -> None:
        """See `ClusterEngine.remove`."""
        super().remove(req_id, now_s)
        self._decodes.forget(req_id)

    def _used(self) -> float:
        return super()._used() + self._held_kv

    def _keep_on_course(self, now_s: float) -> None:
        """Hold decodes that steps are too long for, and those that are lost if it helps."""
        bare_s = self._bare_s()
        self._decodes.slack_s(now_s, self._step, bare_s)  # forgets who has ended
        if math.isinf(self._decodes.tightest_s):
            self._resume(now_s, math.inf)
            return
        least_s = self._least_s()
        if bare_s > least_s or self._on_time or self._prefills:
            for request in self._decodes.lost.values():
                if request.is_decoding:
                    self._hold(request, now_s)
            if self._bare_s() > least_s:
                for request in self._decodes.lose_too_slow(now_s, self._step, self._decode_s):
                    self._hold(request, now_s)
        else:
            self._resume(now_s, least_s)

    def _least_s(self) -> float:
        """How long decode steps may take for the tightest target."""
        share = _LOST_SHARE if self._late or self._decodes.lost else 0.0
        return self._decodes.tightest_s * (1.0 - share)

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
            if self._decode_s(self._num_decodes + 1, ctx) > limit_s:
                return
            del self._held[req_id]
            self._held_kv -= request.num_computed
            self._num_decodes += 1
            self._ctx = ctx
            request.is_decoding, request.joined = True, self._step
            request.ends = self._step + request.output_len - request.num_done
            heapq.heappush(self._ends, (request.ends, next(self._sequence), request))

    # The prompts of a step.

    def _schedule_prompts(self, now_s: float) -> list[tuple[FastRequest, int]]:
        room = self._room(now_s)
        chunks = []
        for request in self._turn:
            if room <= 0:
                break
            if request.req_id not in self._running:
                if not self._finds_room(request):
                    continue
                self._forget(request)
                self._start(request)
            tokens = min(room, request.num_prompt - request.num_computed)
            chunks.append((request, tokens))
            room -= tokens
        # Nobody of them has or finds room: the others go on.
        return chunks or self._chunks_in(room, now_s)

    def _room(self, now_s: float) -> int:
        """The largest chunk whose step keeps all on course, and whose turn it is."""
        most = super()._room(now_s)
        self._jobs, self._turn = [], []
        if most <= 0 or not (self._prefills or self._on_time or self._late):
            return most
        is_one_lost = self._judge_prompts(now_s, most)
        longest_s = self._decodes.longest_s(now_s, self._step, self._bare_s())
        room = self._tokens_within(longest_s, most)
        if self._jobs:
            token_s = self._step_s(room) / room if room else math.inf
            if self._share_for(now_s, token_s) > 1.0:
                is_anybody_lost = is_one_lost or self._decodes.lost or self._late
                if not is_anybody_lost or self._is_sustained(now_s):
                    lent_s = self._lent_s(now_s, most)
                    if lent_s:
                        # A little more than fits: a little less would not be in time.
                        enough = self._tokens_within(lent_s, most) + _TUNING.sub_tile
                        room = max(room, min(most, enough))
            if room:
                self._sort_out(now_s, self._step_s(room) / room)
        return room if room >= min(_TUNING.sub_tile, self._wanted()) else 0

    def _judge_prompts(self, now_s: float, most: int) -> bool:
        """Find those that can be on time, begun or not; give up the others that wait.

        A prompt can if it would be, alone beside the decodes, in steps of `most` tokens.

        Returns:
            Whether one that has begun cannot.
        """
        bare_s = self._step_s(0)
        token_s = (self._step_s(most) - bare_s) / most

        def can_be_on_time(deadline_s: float, request: FastRequest) -> bool:
            need_s = bare_s + (request.num_prompt - request.num_computed) * token_s
            late_s = deadline_s + _SAFETY * request.slo.ttft_s
            return deadline_s == -math.inf or now_s + _TUNING.prefill_margin * need_s <= late_s

        begun = [(self._deadline_s(request), request) for request in self._prefills]
        self._jobs = [job for job in begun if can_be_on_time(*job)]
        is_one_lost = len(self._jobs) < len(begun)
        stay = []
        for entry in self._on_time:
            if can_be_on_time(entry[0], entry[2]):
                stay.append(entry)
                self._jobs.append((entry[0], entry[2]))
            else:
                self._late.append(entry[2])
        self._on_time = stay
        self._jobs.sort(key=operator.itemgetter(0))
        return is_one_lost

    def _sort_out(self, now_s: float, token_s: float) -> None:
        """Whose turn it is: the most that can be on time together (Moore and Hodgson), by deadline,
        then the others, the shortest first.

        Args:
            now_s: Now.
            token_s: What a prompt token takes, with the decodes beside it.
        """
        time_s = now_s
        kept: list[tuple[int, int]] = []  # by cost, the largest first
        last = []
        for place, (deadline_s, request) in enumerate(self._jobs):
            left = request.num_prompt - request.num_computed
            heapq.heappush(kept, (-left, place))
            time_s += left * token_s
            if time_s > deadline_s > -math.inf:
                tokens, costliest = heapq.heappop(kept)
                time_s += tokens * token_s
                last.append((-tokens, costliest))
        order = sorted(place for _, place in kept) + [place for _, place in sorted(last)]
        self._turn = [self._jobs[place][1] for place in order]

    def _share_for(self, now_s: float, token_s: float) -> float:
        """The share of the time with which all prompts are on time, if a token takes so long."""
        tokens, share = 0, 0.0
        for deadline_s, request in self._jobs:
            tokens += request.num_prompt - request.num_computed
            if deadline_s > -math.inf:
                share = max(share, tokens * token_s / max(deadline_s - now_s, 1e-9))
        return share

    def _lent_s(self, now_s: float, most: int) -> float:
        """The shortest step in which all prompts are on time, if decodes can catch up; else 0."""
        bare_s = self._bare_s()
        longest_s = self._step_s(most)
        share = self._share_for(now_s, (longest_s - bare_s) / most)
        if not bare_s < (1.0 - share) * longest_s:
            return 0.0
        need_s = bare_s / (1.0 - share)
        can_lend_s = self._decodes.course(now_s, self._step).can_lend_s(bare_s)
        return need_s if need_s < can_lend_s else 0.0

    def _is_sustained(self, now_s: float) -> bool:
        """Whether what comes can be served at the pace of the tightest target, which is tight."""
        constant_s = float(self._batch_time.prefill_s(0.0))
        load = self._traffic.load(
            now_s,
            self._decodes.tightest_s,
            tokens_per_step=1.0,
            decode_s=self._decode_s,
            prefill_s=lambda tokens: float(self._batch_time.prefill_s(tokens)) - constant_s,
        )
        return load is not None and load.total <= 1.0 and load.decodes >= _TUNING.near

    def _wanted(self) -> int:
        """Tokens of the prompt that is next."""
        waiting = self._turn or self._prefills or [entry[2] for entry in self._on_time[:1]]
        head = (waiting or self._late)[0]
        return head.num_prompt - head.num_computed

    def _tokens_within(self, limit_s: float, most: int) -> int:
        """Prompt tokens of a step that takes no longer."""
        if math.isinf(limit_s) or self._step_s(most) <= limit_s:
            return most
        low, high = 0, most // _TUNING.sub_tile
        while low < high:
            middle = (low + high + 1) // 2
            if self._step_s(middle * _TUNING.sub_tile) > limit_s:
                high = middle - 1
            else:
                low = middle
        tokens = low * _TUNING.sub_tile
        return tokens // _TILE * _TILE if tokens >= _TUNING.many_tiles * _TILE else tokens

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

    def _num_steps(self, now_s: float) -> int:
        steps = super()._num_steps(now_s)
        # Who is on course changes as contexts grow.
        return min(steps, 8) if self._held or self._decodes.lost else steps

    def _quiet_steps(self, now_s: float) -> int:
        """Decode steps until the bank holds a chunk."""
        return 2

    def _bare_s(self) -> float:
        """Seconds of a step of the decodes alone."""
        return self._decode_s(self._num_decodes, self._ctx)

    def _decode_s(self, count: float, ctx: float) -> float:
        return float(self._batch_time.decode_s(count, ctx))

    def _step_s(self, tokens: int) -> float:
        return self._batch_time.step_s(
            self._num_decodes, self._ctx, tokens, float(tokens * tokens), 0.0
        )
