"""A group of GPUs that several services share, in virtual time, without schedulers inside.

As in `simulator.cluster.fast`, steps between two events are summed up in closed form. What is new
is whose steps they are: a turn rule ranks the services at each event. Memory is one pool of bytes
for the KV of all services (the unified KV cache of SeaLLM, section 4.4); weights of all of them
stay on the GPUs. What it leaves out: blocks (each request wastes half of one), cached prefixes,
and what changing from one model to the other costs (measured by the paper as below 8 % of a step).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from sola_sched.cluster.sharing.queue import Habits, ServiceQueue, SharedRequest
from sola_sched.cluster.sharing.turns import TurnRule
from sola_sched.errors import InfeasibleError
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.sharing.group_engine import GroupEngine

_HALF_BLOCK = 8


@dataclass(frozen=True)
class Served:
    """A service on a group.

    Attributes:
        steps: Its step times there.
        kv_bytes: KV of a token on each GPU.
        habits: What is known of its requests.
        max_num_seqs, max_num_batched_tokens: Of its engine; None for what the group has.
    """

    steps: BatchTime
    kv_bytes: float
    habits: Habits
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


class _Line:
    """A service's queue with the sums that step times are made of."""

    def __init__(self, name: str, served: Served) -> None:
        self.queue = ServiceQueue(name, served.habits)
        self.steps, self.kv_bytes = served.steps, served.kv_bytes
        self.slots, self.budget = served.max_num_seqs, served.max_num_batched_tokens
        self.prefills: list[SharedRequest] = []
        self.ends: list[tuple[int, int, SharedRequest]] = []
        self.num_decodes = self.ctx = 0
        self.lines: dict[int, tuple[float, float]] = {}

    @property
    def used_bytes(self) -> float:
        """KV of its requests, prompts under way counted whole."""
        prompts = sum(request.num_prompt for request in self.prefills)
        return self.kv_bytes * (self.ctx + prompts + _HALF_BLOCK * len(self.queue.running))

    def decode_coefficients(self) -> tuple[float, float]:
        """c1, c2 so that the next i decode steps take c1 i + c2 i^2 seconds."""
        line = self.lines.get(self.num_decodes)
        if line is None:
            line = self.lines[self.num_decodes] = self.steps.decode_line(self.num_decodes)
        c2 = 0.5 * line[1] * self.num_decodes
        return line[0] + line[1] * self.ctx - c2, c2


@dataclass(slots=True)
class _Turn:
    """Steps of one service that are under way."""

    line: _Line
    c1: float
    c2: float
    chunks: list[tuple[SharedRequest, int]]


class SharedEngine(GroupEngine):
    """Serves requests of several services on the same GPUs; see the module.

    Args:
        services: By name.
        rule: Whose step is next.
        kv_bytes: Memory for KV on each GPU.
        max_num_seqs: Most requests of a service that run.
        max_num_batched_tokens: Tokens of a step.
        now_s: Its clock's start.
    """

    def __init__(
        self,
        services: Mapping[str, Served],
        rule: TurnRule,
        *,
        kv_bytes: float,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        now_s: float = 0.0,
    ) -> None:
        self.next_s = math.inf
        self.num_open = 0
        self.busy_s = 0.0
        self._rule, self._capacity = rule, kv_bytes
        self._slots, self._budget = max_num_seqs, max_num_batched_tokens
        self._lines = {name: _Line(name, served) for name, served in services.items()}
        for line in self._lines.values():
            line.queue.served_s = now_s
            line.queue.pace_s = float(line.steps.decode_s(1, 0))
        self._sequence = itertools.count()
        self._turns: list[_Turn] = []
        self._start_s = now_s
        self._k = 0
        self._c1 = self._c2 = 0.0

    def add(self, request: SharedRequest, now_s: float) -> None:
        """A request has come.

        Raises:
            InfeasibleError: Its KV does not fit even alone.
        """
        line = self._lines[request.service]
        need = line.kv_bytes * (request.prompt + request.output + _HALF_BLOCK)
        if need > self._capacity:
            raise InfeasibleError(
                f"a request of {request.service!r} must fit into {self._capacity / 1e9:.1f} GB of "
                f"KV on each GPU (it needs {need / 1e9:.1f} GB: {request.prompt} prompt and "
                f"{request.output} output tokens); place the service on more GPUs."
            )
        if not request.num_prompt:
            request.num_prompt = request.prompt
        if not line.queue.has_work:
            line.queue.served_s = now_s
        line.queue.waiting.append(request)
        self.num_open += 1
        if math.isinf(self.next_s):
            self.next_s = now_s
        elif self._k > 1:
            steps = math.ceil(self._steps_in(now_s - self._start_s) - 1e-9)
            self._k = min(self._k, max(1, steps))
            self.next_s = self._boundary_s(self._k)

    def advance(self) -> list[SharedRequest]:
        """Do what is due at `next_s`; the requests that have ended."""
        now_s = self.next_s
        ended = self._finish(now_s) if self._k else []
        self._begin(now_s)
        return ended

    def withdraw(self, now_s: float) -> list[SharedRequest]:
        """Take every request out, at the end of the step under way; their KV is lost.

        Returns:
            Them, to be added elsewhere; those that end with that step are not among them.
        """
        if self._k > 1:
            steps = math.ceil(self._steps_in(now_s - self._start_s) - 1e-9)
            self._k = min(self._k, max(1, steps))
        if self._k:
            self._finish(self._boundary_s(self._k))
        taken: list[SharedRequest] = []
        for line in self._lines.values():
            for request in list(line.queue.running.values()):
                self._displace(line, request)
            taken += [*line.queue.waiting, *line.queue.late]
            line.queue.waiting.clear()
            line.queue.late.clear()
        self.num_open -= len(taken)
        self._turns, self.next_s = [], math.inf
        return sorted(taken, key=lambda r: (r.arrival_s, r.req_id))

    def check_integrity(self) -> None:
        """Hold the sums against the requests; for tests."""
        for line in self._lines.values():
            queue = line.queue
            decodes = [r for r in queue.running.values() if r.is_decoding]
            ctx = sum(r.num_computed + queue.step - r.joined for r in decodes)
            assert (line.num_decodes, line.ctx) == (len(decodes), ctx), queue.name
            prefills = [r for r in queue.running.values() if not r.is_decoding]
            assert len(line.prefills) == len(prefills), queue.name
        assert self._used() <= self._capacity + 1e-6, (self._used(), self._capacity)

    # Steps.

    def _finish(self, now_s: float) -> list[SharedRequest]:
        """The steps under way are done."""
        k, ended = self._k, []
        for turn in self._turns:
            line, queue = turn.line, turn.line.queue
            took_s = k * (turn.c1 + k * turn.c2)
            queue.clock_s += took_s
            self.busy_s += took_s
            queue.step += k
            queue.served_s = now_s
            line.ctx += k * line.num_decodes
            if not turn.chunks:
                queue.pace_s = turn.c1 + turn.c2
            for request, tokens in turn.chunks:
                request.num_computed += tokens
                if request.num_computed == request.num_prompt:
                    ended += self._begins_to_decode(line, request, now_s)
            ends = line.ends
            while ends and ends[0][0] <= queue.step:
                end, _, request = heapq.heappop(ends)
                if request.is_decoding and request.ends == end:
                    ended.append(self._end(line, request, now_s))
        self._k, self._turns = 0, []
        return ended

    def _begins_to_decode(
        self, line: _Line, request: SharedRequest, now_s: float
    ) -> list[SharedRequest]:
        line.prefills.remove(request)
        line.num_decodes += 1
        line.ctx += request.num_computed
        request.is_decoding = True
        request.num_done += 1
        if math.isnan(request.first_s):
            request.first_s = now_s
        request.joined = line.queue.step
        request.ends = line.queue.step + request.output - request.num_done
        if request.ends == line.queue.step:
            return [self._end(line, request, now_s)]
        heapq.heappush(line.ends, (request.ends, next(self._sequence), request))
        return []

    def _end(self, line: _Line, request: SharedRequest, now_s: float) -> SharedRequest:
        self._release(line, request)
        request.num_done, request.last_s = request.output, now_s
        self.num_open -= 1
        return request

    def _release(self, line: _Line, request: SharedRequest) -> None:
        """Take slot and KV."""
        queue = line.queue
        request.executed_s = queue.executed_s(request)
        del queue.running[request.req_id]
        if request.is_decoding:
            line.num_decodes -= 1
            line.ctx -= request.num_computed + queue.step - request.joined
            request.num_done += queue.step - request.joined
            request.is_decoding = False
        else:
            line.prefills.remove(request)

    def _displace(self, line: _Line, request: SharedRequest) -> None:
        self._release(line, request)
        request.num_prompt, request.num_computed = request.prompt + request.num_done, 0
        request.num_displaced += 1
        line.queue.waiting.appendleft(request)

    def _begin(self, now_s: float) -> None:
        """Decide on the next steps."""
        rule = self._rule
        busy = [line for line in self._lines.values() if line.queue.has_work]
        if not busy:
            self.next_s = math.inf
            return
        for line in busy:
            rule.sort_out(line.queue, now_s)
        if len(busy) > 1:
            busy.sort(key=lambda line: rule.rank(line.queue, now_s))
        for place, line in enumerate(busy):
            self._keep_room(line, busy)
            chunks = self._prompts(line)
            if not chunks and not line.num_decodes:
                # Its first request finds no room: it may take that of services behind it.
                chunks = self._prompts_of_displaced(line, busy[place + 1 :])
            if chunks or line.num_decodes:
                self._turns.append(self._turn(line, chunks))
                if not rule.is_round:
                    break
        assert self._turns, "requests wait and none has room"
        self._start_s = now_s
        self._c1 = sum(turn.c1 for turn in self._turns)
        self._c2 = sum(turn.c2 for turn in self._turns)
        self._k = 1
        if not any(turn.chunks for turn in self._turns):
            self._k = self._num_steps(len(busy) > 1)
        self.next_s = self._boundary_s(self._k)

    def _turn(self, line: _Line, chunks: list[tuple[SharedRequest, int]]) -> _Turn:
        if not chunks:
            return _Turn(line, *line.decode_coefficients(), chunks)
        # A chunk of one token takes what a decode takes.
        ones = [request.num_computed for request, n in chunks if n == 1]
        longer = [(request.num_computed, n) for request, n in chunks if n > 1]
        seconds = line.steps.step_s(
            line.num_decodes + len(ones),
            line.ctx + sum(ones),
            sum(n for _, n in longer),
            float(sum(n * n for _, n in longer)),
            float(sum(n * has for has, n in longer)),
            len(longer),
        )
        return _Turn(line, seconds, 0.0, chunks)

    def _num_steps(self, is_contended: bool) -> int:
        """Decode steps until something changes by itself."""
        steps, growth = 1 << 30, 0.0
        for turn in self._turns:
            line, ends = turn.line, turn.line.ends
            while not (ends[0][2].is_decoding and ends[0][2].ends == ends[0][0]):
                heapq.heappop(ends)
            steps = min(steps, ends[0][0] - line.queue.step)
            growth += line.kv_bytes * line.num_decodes
            if is_contended and not self._rule.is_round:
                until = self._steps_in(self._rule.until_s(line.queue))
                steps = min(steps, math.ceil(until)) if until < steps else steps
        return max(1, min(steps, int((self._capacity - self._used()) / growth)))

    def _prompts(self, line: _Line) -> list[tuple[SharedRequest, int]]:
        """Chunks of the next step; requests that it admits are running from here on."""
        queue = line.queue
        room = (line.budget or self._budget) - line.num_decodes
        chunks = []
        for request in line.prefills:
            tokens = min(room, request.num_prompt - request.num_computed)
            if tokens > 0:
                chunks.append((request, tokens))
                room -= tokens
        slots = line.slots or self._slots
        while room > 0 and len(queue.running) < slots and (queue.waiting or queue.late):
            waiting = queue.waiting or queue.late
            if not self._has_room(line, waiting[0]):
                break
            head = waiting.popleft()
            head.begun_s = queue.clock_s
            queue.running[head.req_id] = head
            line.prefills.append(head)
            tokens = min(room, head.num_prompt)
            chunks.append((head, tokens))
            room -= tokens
        return chunks

    def _prompts_of_displaced(
        self, line: _Line, behind: list[_Line]
    ) -> list[tuple[SharedRequest, int]]:
        """Displace the youngest of services with a worse rank until the first prompt has room.

        A request that was displaced itself displaces nobody, so that two services do not throw
        each other out.
        """
        head = (line.queue.waiting or line.queue.late)[0]
        if head.num_displaced:
            return []
        for other in reversed(behind):
            while other.queue.running and not self._has_room(line, head):
                self._displace(other, next(reversed(other.queue.running.values())))
        return self._prompts(line)

    def _has_room(self, line: _Line, request: SharedRequest) -> bool:
        # The decodes of the step grow by a token each before anything else can be decided.
        need = line.kv_bytes * (request.num_prompt + _HALF_BLOCK + line.num_decodes)
        return self._used() + self._growth() + need <= self._capacity

    def _keep_room(self, line: _Line, busy: list[_Line]) -> None:
        """Displace the youngest of the worst rank until each decode has room for a token."""
        taken = [turn.line for turn in self._turns]
        while self._used() + self._growth() + line.kv_bytes * line.num_decodes > self._capacity:
            victims = [x for x in busy if x.queue.running and x not in taken]
            if not victims or (victims == [line] and len(line.queue.running) == 1):
                break
            self._displace(victims[-1], next(reversed(victims[-1].queue.running.values())))

    def _used(self) -> float:
        """KV that is there, and that the prompts under way will take yet."""
        return sum(line.used_bytes for line in self._lines.values())

    def _growth(self) -> float:
        """What a step of the turns so far adds for its decodes."""
        return sum(turn.line.kv_bytes * turn.line.num_decodes for turn in self._turns)

    def _boundary_s(self, steps: int) -> float:
        return self._start_s + steps * (self._c1 + steps * self._c2)

    def _steps_in(self, seconds: float) -> float:
        """Steps, as a real number, that take so long."""
        if seconds <= 0.0:
            return 0.0
        if math.isinf(seconds):
            return seconds
        c1, c2 = self._c1, self._c2
        if c2 < 1e-15:
            return seconds / c1
        return (math.sqrt(c1 * c1 + 4.0 * c2 * seconds) - c1) / (2.0 * c2)
