"""Traffic for a scheduler: a constant number of requests, so when one ends the next arrives."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sola_sched.simulator.engine import VirtualEngine
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.profile import load_step_profile

#: Steps of this model are the shortest that are realistic.
PROFILE = "llama-3-8b-h100"
#: This policy has no targets: the state is kept, and vLLM plans as ever.
OBSERVE = "observe"
#: Tokens of a step.
_CHUNK = 8192


@dataclass(frozen=True)
class Kind:
    """Traffic: log-normal lengths and the targets that are usual for it.

    Attributes:
        prompt, output: Mean and standard deviation of the logarithm of the tokens.
        ttft_s, tpot_s: Targets, seconds.
    """

    prompt: tuple[float, float]
    output: tuple[float, float]
    ttft_s: float
    tpot_s: float


#: Means as in ShareGPT, of completions with their file, and of documents.
KINDS = {
    "chat": Kind((220.0, 1.1), (260.0, 0.9), 2.0, 0.1),
    "code": Kind((1200.0, 0.6), (120.0, 0.6), 2.0, 0.1),
    "long": Kind((5000.0, 0.4), (500.0, 0.6), 10.0, 0.2),
}
_MAX_PROMPT, _MAX_OUTPUT = 7000, 1000


@dataclass(frozen=True)
class Load:
    """What is served: `num_running` slots, and so many requests more that wait for one.

    Prefixes are cached, as by vLLM without an option; no two requests share one.
    """

    policy: str = "attain"
    kind: str = "chat"
    is_async: bool = True
    num_running: int = 256
    num_waiting: int = 0


class ClosedLoop(VirtualEngine):
    """Serves a constant number of requests.

    Attributes:
        times_ns: Of each step that was delivered, CPU and wall time in `schedule()` and
            `update_from_output()`.
        num_running: Requests in each of these steps.
        parts_ns: Of each of these steps, wall time by part; empty unless the scheduler is one of
            `parts`.
    """

    def __init__(self, scheduler_cls: type[Any], load: Load, seed: int) -> None:
        kind, profile = KINDS[load.kind], load_step_profile(PROFILE)
        options: dict[str, Any] = {"log_interval_s": 0}
        if load.policy == OBSERVE:
            options |= {"ttft_s": None, "tpot_s": None}
        else:
            options |= {"policy": load.policy, "ttft_s": kind.ttft_s, "tpot_s": kind.tpot_s}
        per_request = (_MAX_PROMPT + _MAX_OUTPUT) // profile.block_size + 1
        super().__init__(
            scheduler_cls,
            model=profile.model_config(),
            num_blocks=2 * load.num_running * per_request,  # memory decides nothing here
            block_size=profile.block_size,
            max_model_len=profile.max_model_len or _MAX_PROMPT + _MAX_OUTPUT,
            max_num_seqs=load.num_running,
            max_num_batched_tokens=_CHUNK,
            async_scheduling=load.is_async,
            enable_prefix_caching=True,
            additional_config={"sola_sched": options},
            step_time=profile.step_time,
        )
        self.times_ns: list[tuple[int, int]] = []
        self.num_running: list[int] = []
        self.parts_ns: list[dict[str, int]] = []
        self._stopwatch = getattr(self.scheduler, "stopwatch", None)
        self._spent_ns = [0, 0]
        self._requests_to_come = requests(kind, random.Random(seed))
        self.on_finish = lambda _: self._next(1.0)
        for name in ("schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))
        left = random.Random(seed + 1)
        for _ in range(load.num_running + load.num_waiting):  # as if they had run for a while
            self._next(left.random())

    def advance(self) -> None:
        """Run until one step with tokens is delivered."""
        self._spent_ns = [0, 0]
        if self._stopwatch is not None:
            self._stopwatch.ns.clear()
        trace = None
        while trace is None or not trace.output.total_num_scheduled_tokens:
            trace = self.step()
        self.times_ns.append((self._spent_ns[0], self._spent_ns[1]))
        self.num_running.append(len(trace.output.num_scheduled_tokens))
        if self._stopwatch is not None:
            self.parts_ns.append(dict(self._stopwatch.ns))

    def forget(self) -> None:
        """Begin again with what is measured."""
        for measured in (self.times_ns, self.num_running, self.parts_ns):
            measured.clear()

    def _next(self, share_left: float) -> None:
        request = next(self._requests_to_come)
        output_len = max(1, math.ceil(share_left * request.output_len))
        self.add(replace(request, arrival_s=self.clock.now, output_len=output_len))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            result = call(*args)
            self._spent_ns[0] += time.thread_time_ns() - cpu_ns
            self._spent_ns[1] += time.perf_counter_ns() - start_ns
            return result

        return timed


def requests(kind: Kind, rng: random.Random) -> Iterator[VirtualRequest]:
    """Requests without an end; who takes them says when they arrive."""

    def tokens(mean: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    for number in itertools.count():
        prompt_len, output_len = (
            tokens(*kind.prompt, _MAX_PROMPT),
            tokens(*kind.output, _MAX_OUTPUT),
        )
        yield VirtualRequest(f"r{number}", 0.0, output_len, prompt_len, max_tokens=_MAX_OUTPUT)
