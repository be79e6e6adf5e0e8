"""A fast model of an engine: no scheduler inside, steps summed up between events.

Between an arrival, an end and a prompt, all that an engine does is one decode step after the
other, each a little longer than the one before. Their sum has a closed form, so what is paid for
is the event, not the step. What it leaves out: blocks (each request is taken to waste half a
block), cached prefixes, the extra step that a request which ends by itself takes in an asynchronous
pipeline, and the planner of `sola_sched` (see `fast_slo`). Its error against real schedulers is
measured by `python benchmarks/run.py cluster-fast`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sola_sched.cluster.view import InstanceView
from sola_sched.config.slo import SloTarget
from sola_sched.prediction.length import FloatArray, LengthPrediction
from sola_sched.simulator.cluster.engine import Ended, Progress
from sola_sched.simulator.cluster.rows import Row, running_columns, waiting_columns
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.request import VirtualRequest


@dataclass(eq=False, slots=True)
class FastRequest:
    """A request on a fast engine.

    Attributes:
        prompt_len: Its prompt.
        num_prompt: Tokens to compute before the next token: the prompt, after a preemption with
            the output.
        num_computed: Of them, computed.
        num_done: Tokens delivered before it last began to decode, that token included.
        joined: Number of the step that delivered that token.
        ends: Number of the step that delivers its last.
    """

    req_id: str
    output_len: int
    slo: SloTarget
    quantiles: FloatArray
    arrival_s: float
    prompt_len: int
    num_prompt: int
    num_computed: int = 0
    num_done: int = 0
    joined: int = 0
    ends: int = 0
    is_decoding: bool = False
    first_s: float = math.nan
    last_s: float = math.nan


class FastInstance:
    """First come, first served, with chunked prompts, as vLLM does it. See `ClusterEngine`.

    Args:
        batch_time: Step times.
        kv_capacity_tokens: Tokens of KV.
        max_num_seqs: Most requests that run.
        max_num_batched_tokens: Tokens of a step.
        max_model_len: Longest prompt + output.
        num_gpus: GPUs that share a step.
        block_size: Tokens of a block.
        is_async: A step is scheduled while the one before runs, so that what arrives during a step
            waits for the next one too.
    """

    #: See `InstanceView`.
    serves_lost_last = False

    def __init__(
        self,
        batch_time: BatchTime,
        *,
        kv_capacity_tokens: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
        num_gpus: int = 1,
        block_size: int = 16,
        is_async: bool = True,
    ) -> None:
        self.next_s = math.inf
        self._batch_time = batch_time
        self._empty = InstanceView(
            model=batch_time,
            kv_capacity_tokens=kv_capacity_tokens,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_gpus=num_gpus,
            serves_lost_last=self.serves_lost_last,
        )
        self._capacity, self._slots = kv_capacity_tokens, max_num_seqs
        self._budget, self._half_block = max_num_batched_tokens, block_size / 2
        self._is_async = is_async
        self._lines: dict[int, tuple[float, float]] = {}
        self._sequence = itertools.count()
        self._queue: deque[FastRequest] = deque()
        self._running: dict[str, FastRequest] = {}  # in order of admission
        self._prefills: list[FastRequest] = []
        self._ends: list[tuple[int, int, FastRequest]] = []  # of decodes; others are stale
        self._step = 0  # steps so far
        self._num_decodes = self._ctx = self._prefill_kv = 0
        # The steps under way: k of them, the first i of which take c1 i + c2 i^2 seconds.
        self._start_s = 0.0
        self._k = 0
        self._c1 = self._c2 = 0.0
        self._chunks: list[tuple[FastRequest, int]] = []
        self._known_until_s = math.inf  # arrivals up to here may be scheduled in the next step

    def add(
        self, request: VirtualRequest, slo: SloTarget, length: LengthPrediction, now_s: float
    ) -> None:
        """See `ClusterEngine.add`."""
        self._push(
            FastRequest(
                request.req_id,
                request.output_len,
                slo,
                length.quantiles,
                request.arrival_s,
                prompt_len=request.num_prompt_tokens,
                num_prompt=request.num_prompt_tokens,
            )
        )
        if math.isinf(self.next_s):
            self.next_s, self._known_until_s = now_s, math.inf
        elif self._k > 1 and len(self._running) < self._slots:
            # The first step that ends after now is the last, or under async scheduling the next.
            steps = math.ceil(self._steps_in(now_s - self._start_s) - 1e-9)
            self._k = min(self._k, max(1, steps) + self._is_async)
            self.next_s = self._boundary_s(self._k)

    def advance(self, now_s: float) -> Sequence[Ended]:
        """See `ClusterEngine.advance`."""
        ended = self._finish(now_s) if self._k else ()
        self._begin(now_s)
        return ended

    def progress(self, req_id: str, now_s: float) -> Progress:
        """See `ClusterEngine.progress`."""
        request = self._running.get(req_id)
        if request is None:
            request = next((r for r in self._waiting() if r.req_id == req_id), None)
        if request is None or math.isnan(request.first_s):
            return Progress(0, 0.0, 0.0)
        steps = self._steps_done(now_s)
        last_s = self._boundary_s(steps) if steps else max(request.last_s, request.first_s)
        if not request.is_decoding:
            return Progress(request.num_done, request.first_s, last_s)
        done = request.num_done + self._step + steps - request.joined
        if not steps and self._step > request.joined:
            last_s = self._start_s
        return Progress(done, request.first_s, last_s)

    def remove(self, req_id: str, now_s: float) -> None:
        """See `ClusterEngine.remove`."""
        request = self._running.get(req_id)
        if request is not None:
            self._release(request)
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not request]
            return
        for waiting in self._waiting():
            if waiting.req_id == req_id:
                self._forget(waiting)
                return

    def view(self, now_s: float) -> InstanceView:
        """See `ClusterEngine.view`."""
        steps = self._steps_done(now_s)
        step = self._step + steps
        used = self._used() + steps * self._num_decodes
        running = [self._row(request, step) for request in self._running.values()]
        waiting = [self._row(request, step) for request in self._waiting()]
        if self._empty.serves_lost_last:
            waiting.sort(key=lambda row: row.arrival_s)
        return self._empty.but(
            reported_s=now_s,
            kv_used_tokens=min(int(used), self._capacity),
            **waiting_columns(waiting, now_s),
            **running_columns(running, now_s, self._batch_time),
        )

    def slow_down(self, factor: float) -> None:
        """See `ClusterEngine.slow_down`."""
        self._batch_time = replace(self._batch_time, factor=factor)
        self._lines.clear()

    # The queue; another policy orders it otherwise.

    def _push(self, request: FastRequest) -> None:
        self._queue.append(request)

    def _push_back(self, request: FastRequest) -> None:
        self._queue.appendleft(request)

    def _peek(self, now_s: float) -> FastRequest | None:
        return self._queue[0] if self._queue else None

    def _pop(self) -> FastRequest:
        return self._queue.popleft()

    def _forget(self, request: FastRequest) -> None:
        self._queue.remove(request)

    def _waiting(self) -> Iterable[FastRequest]:
        return self._queue

    def _room(self, now_s: float) -> int:
        """Prompt tokens of the step that begins now."""
        return self._budget - self._num_decodes

    def _joined(self, request: FastRequest) -> None:
        """A request has begun to decode."""

    def _quiet_steps(self, now_s: float) -> int:
        """Decode steps after which `_room` may be another one, although nothing happens."""
        return 1 << 30

    # Steps.

    def _finish(self, now_s: float) -> list[Ended]:
        """The steps under way are done."""
        last_start_s = self._boundary_s(self._k - 1)
        self._known_until_s = last_start_s if self._is_async else math.inf
        self._step += self._k
        self._ctx += self._k * self._num_decodes
        self._k = 0
        ended = []
        for request, tokens in self._chunks:
            request.num_computed += tokens
            self._prefill_kv += tokens
            if request.num_computed == request.num_prompt and self._begins_to_decode(
                request, now_s
            ):
                ended.append(self._end(request, now_s))
        self._chunks = []
        ends = self._ends
        while ends and ends[0][0] <= self._step:
            end, _, request = heapq.heappop(ends)
            if request.is_decoding and request.ends == end:
                ended.append(self._end(request, now_s))
        return ended

    def _begins_to_decode(self, request: FastRequest, now_s: float) -> bool:
        """Book the token at the end of a prompt; True if it is the last one."""
        self._prefills.remove(request)
        self._prefill_kv -= request.num_computed
        self._num_decodes += 1
        self._ctx += request.num_computed
        request.is_decoding = True
        request.num_done += 1
        request.last_s = now_s
        if math.isnan(request.first_s):
            request.first_s = now_s
        request.joined = self._step
        request.ends = self._step + request.output_len - request.num_done
        if request.ends == self._step:
            return True
        heapq.heappush(self._ends, (request.ends, next(self._sequence), request))
        self._joined(request)
        return False

    def _end(self, request: FastRequest, now_s: float) -> Ended:
        self._release(request)
        return Ended(request.req_id, Progress(request.output_len, request.first_s, now_s), True)

    def _release(self, request: FastRequest) -> None:
        """Take slot and KV."""
        del self._running[request.req_id]
        if request.is_decoding:
            self._num_decodes -= 1
            self._ctx -= request.num_computed + self._step - request.joined
            request.is_decoding = False
        else:
            self._prefills.remove(request)
            self._prefill_kv -= request.num_computed

    def _begin(self, now_s: float) -> None:
        """Decide on the next steps."""
        self._make_room(now_s)
        chunks = self._schedule_prompts(now_s)
        num_decodes, ctx = self._num_decodes, self._ctx
        self._start_s, self._chunks = now_s, chunks
        if chunks:
            tokens = sum(n for _, n in chunks)
            squares = float(sum(n * n for _, n in chunks))
            pairs = float(sum(n * request.num_computed for request, n in chunks))
            self._k, self._c2 = 1, 0.0
            self._c1 = self._batch_time.step_s(num_decodes, ctx, tokens, squares, pairs)
        elif num_decodes:
            self._k = self._num_steps(now_s)
            line = self._lines.get(num_decodes)
            if line is None:
                line = self._lines[num_decodes] = self._batch_time.decode_line(num_decodes)
            self._c2 = 0.5 * line[1] * num_decodes
            self._c1 = line[0] + line[1] * ctx - self._c2
        elif self._known_until_s < math.inf and self._peek(now_s) is not None:
            # Nothing is under way that what has come would have to wait for.
            self._known_until_s = math.inf
            self._begin(now_s)
            return
        else:
            self.next_s = math.inf
            return
        self.next_s = self._boundary_s(self._k)

    def _num_steps(self, now_s: float) -> int:
        """Decode steps until something changes by itself."""
        ends = self._ends
        while not (ends[0][2].is_decoding and ends[0][2].ends == ends[0][0]):
            heapq.heappop(ends)
        steps = ends[0][0] - self._step
        room = (self._capacity - self._used()) / self._num_decodes
        steps = min(steps, max(1, int(room)))
        if self._prefills:
            # There was no room for the rest of a prompt; perhaps there is in the next step.
            return min(steps, self._quiet_steps(now_s))
        head = self._peek(now_s)
        if head is not None and len(self._running) < self._slots:
            # It could not be scheduled in this step; perhaps in the next.
            is_new = head.arrival_s > self._known_until_s
            steps = 1 if is_new else min(steps, self._quiet_steps(now_s))
        return steps

    def _schedule_prompts(self, now_s: float) -> list[tuple[FastRequest, int]]:
        return self._chunks_in(self._room(now_s), now_s)

    def _chunks_in(self, room: int, now_s: float) -> list[tuple[FastRequest, int]]:
        """Chunks of at most so many tokens: those that have begun, then the head of the queue."""
        chunks = []
        for request in self._prefills:
            tokens = min(room, request.num_prompt - request.num_computed)
            if tokens > 0:
                chunks.append((request, tokens))
                room -= tokens
        while room > 0:
            head = self._peek(now_s)
            if head is None or not self._finds_room(head):
                break
            self._start(self._pop())
            tokens = min(room, head.num_prompt)
            chunks.append((head, tokens))
            room -= tokens
        return chunks

    def _finds_room(self, request: FastRequest) -> bool:
        """Whether one that waits may start now."""
        return (
            len(self._running) < self._slots
            and request.arrival_s <= self._known_until_s
            and self._used() + self._promised() + request.num_prompt <= self._capacity
        )

    def _start(self, request: FastRequest) -> None:
        """Of one that has left the queue."""
        self._running[request.req_id] = request
        self._prefills.append(request)

    def _make_room(self, now_s: float) -> None:
        """Preempt the youngest until each decode has room for a token."""
        while self._used() + self._num_decodes > self._capacity and len(self._running) > 1:
            victim = next(reversed(self._running.values()))
            if victim.is_decoding:
                victim.num_done += self._step - victim.joined
                victim.last_s = now_s
            self._release(victim)
            victim.num_prompt, victim.num_computed = victim.prompt_len + victim.num_done, 0
            self._push_back(victim)

    def _used(self) -> float:
        return self._ctx + self._prefill_kv + self._half_block * len(self._running)

    def _promised(self) -> int:
        """KV that the prompts under way will take yet."""
        return sum(request.num_prompt - request.num_computed for request in self._prefills)

    def _boundary_s(self, steps: int) -> float:
        return self._start_s + steps * (self._c1 + steps * self._c2)

    def _steps_done(self, now_s: float) -> int:
        """Of the steps under way, those that have been delivered."""
        return min(self._k - 1, int(self._steps_in(now_s - self._start_s))) if self._k else 0

    def _steps_in(self, seconds: float) -> float:
        """Steps, as a real number, that take so long."""
        if seconds <= 0.0:
            return 0.0
        c1, c2 = self._c1, self._c2
        if c2 < 1e-15:
            return seconds / c1
        return (math.sqrt(c1 * c1 + 4.0 * c2 * seconds) - c1) / (2.0 * c2)

    def _row(self, request: FastRequest, step: int) -> Row:
        decoded = step - request.joined if request.is_decoding else 0
        return Row(
            num_prompt=request.num_prompt,
            num_computed=request.num_computed + decoded,
            num_outputs=request.num_done + decoded,
            quantiles=request.quantiles,
            slo=request.slo,
            arrival_s=request.arrival_s,
            first_s=request.first_s,
        )
