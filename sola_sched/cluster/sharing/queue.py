"""What turn rules see: the requests of each service on one group of GPUs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False, slots=True)
class SharedRequest:
    """A request of one service.

    Attributes:
        req_id: Unique.
        service: Name of its service.
        arrival_s: When it came.
        prompt, output: Tokens. Rules may not look at `output`.
        deadline_s: By when its last token is due; inf for never.
        ttft_s, tpot_s: Targets.
        num_prompt: Tokens to compute before the next token: the prompt, after a displacement with
            the output.
        num_computed: Of them, computed.
        num_done: Tokens delivered before it last began to decode, that token included.
        joined: Step of its queue that delivered that token.
        ends: Step of its queue that delivers its last.
        begun_s: Its queue's clock when it was last admitted.
        executed_s: Seconds of the steps it was in, before that.
        num_displaced: How often it lost its KV.
        first_s, last_s: First and last token; NaN without.
    """

    req_id: int
    service: str
    arrival_s: float
    prompt: int
    output: int
    deadline_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    num_prompt: int = 0
    num_computed: int = 0
    num_done: int = 0
    joined: int = 0
    ends: int = 0
    begun_s: float = 0.0
    executed_s: float = 0.0
    num_displaced: int = 0
    is_decoding: bool = False
    first_s: float = math.nan
    last_s: float = math.nan

    @property
    def latency_s(self) -> float:
        """Arrival to last token; NaN until it has ended."""
        return self.last_s - self.arrival_s

    @property
    def is_met(self) -> bool:
        """Whether it has ended within every target."""
        ttft_s = self.first_s - self.arrival_s
        tpot_s = (self.last_s - self.first_s) / max(1, self.output - 1)
        return self.last_s <= self.deadline_s and ttft_s <= self.ttft_s and tpot_s <= self.tpot_s


@dataclass(frozen=True)
class Habits:
    """What is known of a service's requests from its past (SeaLLM's service monitor, section 3).

    Attributes:
        mean_s: Mean execution time of a request alone, L_s of the paper.
        std_s: Its standard deviation, Var_s.
        left: Output tokens that are expected after 0, 1, 2, ... of them; the last for all beyond.
        prefill_token_s: Seconds of a prompt token.
    """

    mean_s: float
    std_s: float
    left: Sequence[float] = (1.0,)
    prefill_token_s: float = 0.0

    def left_after(self, num_done: int) -> float:
        """Output tokens that are expected after `num_done`."""
        return self.left[min(num_done, len(self.left) - 1)]


def expected_left(outputs: Sequence[int]) -> tuple[float, ...]:
    """E[O - l | O > l] of past outputs, for l = 0 to the longest."""
    lengths = np.sort(np.asarray(outputs, dtype=np.float64))
    tails = np.append(np.cumsum(lengths[::-1])[::-1], 0.0)
    done = np.arange(int(lengths[-1]))
    first = np.searchsorted(lengths, done, side="right")
    left = tails[first] / (len(lengths) - first) - done
    return (*left.tolist(), 1.0)


@dataclass(eq=False, slots=True)
class ServiceQueue:
    """One service on a group.

    Attributes:
        name: The service's.
        habits: Its past.
        waiting: In order of arrival, displaced ones first.
        late: Waiting ones that a rule has given up; they come last.
        running: By id, in order of admission.
        clock_s: Seconds of all its steps so far; all that run are in all of its steps.
        step: Number of its steps.
        served_s: End of its last turn; before any, when it last had nothing to do.
        pace_s: Seconds of its last decode step.
    """

    name: str
    habits: Habits
    waiting: deque[SharedRequest] = field(default_factory=deque)
    late: deque[SharedRequest] = field(default_factory=deque)
    running: dict[int, SharedRequest] = field(default_factory=dict)
    clock_s: float = 0.0
    step: int = 0
    served_s: float = 0.0
    pace_s: float = 0.0

    @property
    def has_work(self) -> bool:
        """True if a request has not ended."""
        return bool(self.running or self.waiting or self.late)

    def executed_s(self, request: SharedRequest) -> float:
        """Seconds of the steps that the request has been in."""
        if request.req_id in self.running:
            return request.executed_s + self.clock_s - request.begun_s
        return request.executed_s

    def remaining_s(self, request: SharedRequest) -> float:
        """Seconds that the request is expected to run yet, if its service had all turns."""
        tokens = max(1.0, self.habits.left_after(self.num_done(request)))
        return self._prefill_s(request) + tokens * self.pace_s

    def latest_start_s(self, request: SharedRequest, now_s: float) -> float:
        """When the service must have all turns, at the latest, for all targets of the request.

        Token j after the first is due at ``first + j * TPOT``. One that is behind that and may
        still catch up by the end that is expected has to start by the time that leaves for it.

        Returns:
            Seconds on the clock, in the past if a target is lost; inf without targets.
        """
        starts_s = math.inf
        if request.deadline_s < math.inf:
            starts_s = request.deadline_s - self.remaining_s(request)
        if math.isnan(request.first_s):
            if request.ttft_s < math.inf:
                due_s = request.arrival_s + request.ttft_s
                starts_s = min(starts_s, due_s - self._prefill_s(request) - self.pace_s)
        elif request.first_s > request.arrival_s + request.ttft_s:
            return -math.inf
        elif request.tpot_s < math.inf:
            done = self.num_done(request)
            left = max(1.0, self.habits.left_after(done))
            next_s = request.first_s + request.tpot_s * done - self.pace_s
            by_end_s = next_s + (left - 1.0) * (request.tpot_s - self.pace_s)
            due_s = next_s if next_s >= now_s else by_end_s
            starts_s = min(starts_s, due_s - self._prefill_s(request))
        return starts_s

    def num_done(self, request: SharedRequest) -> int:
        """Tokens that the request has been given."""
        return request.num_done + (self.step - request.joined if request.is_decoding else 0)

    def _prefill_s(self, request: SharedRequest) -> float:
        if request.is_decoding:
            return 0.0
        return (request.num_prompt - request.num_computed) * self.habits.prefill_token_s
