"""Traffic for a scheduler: a constant number of requests, so when one ends the next arrives."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sola_sched.config.slo import CLASS_KEY
from sola_sched.simulator.engine import VirtualEngine
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin

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
#: What there is beside plain traffic, in which no two requests share a prefix and memory is ample.
SITUATIONS = {
    "plain": "nothing",
    "memory": "more than half of the KV memory in use, and some 150 classes of output lengths",
    "swap": "KV memory is short, and displaced KV is swapped; vLLM computes it again",
    "prefixes": "every eighth prompt begins with 100,000 cached tokens",
    "priorities": "three priorities, at random",
    "classes": "three SLO classes, two of which have a share of the time",
}
#: Share of the KV memory that those who run hold at first; more, once long outputs have gathered.
_USED = {"memory": 0.6, "swap": 1.05}
_PREFIX, _WITH_PREFIX = 100_000, 8
_CLASSES = ("a", "b", "c")
#: KV of Llama-3-8B, and of the link over which it is swapped: PCIe 4.0 x16.
_KV_BYTES_PER_TOKEN, _LINK_BYTES_PER_S = 131_072, 25e9


@dataclass(frozen=True)
class Load:
    """What is served: `num_running` requests, and so many more that wait for a slot.

    Attributes:
        policy, kind, is_async: Of the engine, and of the traffic (`KINDS`).
        num_running, num_waiting: Requests.
        num_free_slots: Slots beyond those; with any, nobody waits for one.
        situation: One of `SITUATIONS`.
    """

    policy: str = "attain"
    kind: str = "chat"
    is_async: bool = True
    num_running: int = 256
    num_waiting: int = 0
    num_free_slots: int = 0
    situation: str = "plain"


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
            targets = {"ttft_s": kind.ttft_s, "tpot_s": kind.tpot_s}
            options |= {"policy": load.policy, **targets, **_classes(load.situation, targets)}
        max_model_len = profile.max_model_len or _MAX_PROMPT + _MAX_OUTPUT
        if load.situation == "prefixes":
            max_model_len += _PREFIX
        is_ours = issubclass(scheduler_cls, SolaSchedulerMixin)
        super().__init__(
            scheduler_cls,
            model=profile.model_config(),
            num_blocks=_num_blocks(load, kind, profile.block_size),
            block_size=profile.block_size,
            max_model_len=max_model_len,
            max_num_seqs=load.num_running + load.num_free_slots,
            max_num_batched_tokens=_CHUNK,
            async_scheduling=load.is_async,
            enable_prefix_caching=True,
            scheduling_policy="priority" if load.situation == "priorities" else "fcfs",
            additional_config={"sola_sched": options},
            step_time=profile.step_time,
            swap_link=_link() if is_ours and load.situation == "swap" else None,
        )
        self.times_ns: list[tuple[int, int]] = []
        self.num_running: list[int] = []
        self.parts_ns: list[dict[str, int]] = []
        self._stopwatch = getattr(self.scheduler, "stopwatch", None)
        self._spent_ns = [0, 0]
        self._requests_to_come = requests(kind, random.Random(seed), load.situation)
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


def _classes(situation: str, targets: dict[str, float]) -> dict[str, Any]:
    """Options of the SLO classes."""
    if situation not in ("memory", "swap", "classes"):
        return {}
    shares = (0.4, 0.2, None) if situation == "classes" else (None, None, None)
    return {
        "classes": {
            name: targets | ({} if share is None else {"share": share})
            for name, share in zip(_CLASSES, shares, strict=True)
        }
    }


def _link() -> Any:
    from sola_sched.simulator.swap_link import LinkSpeed  # not with every vLLM

    return LinkSpeed(_KV_BYTES_PER_TOKEN, _LINK_BYTES_PER_S)


def _num_blocks(load: Load, kind: Kind, block_size: int) -> int:
    """KV blocks; without a share of them that is in use, so many that memory decides nothing."""
    if load.situation not in _USED:
        per_request = (_MAX_PROMPT + _MAX_OUTPUT) // block_size + 1
        prefix = _PREFIX // block_size + 1 if load.situation == "prefixes" else 0
        return 2 * load.num_running * per_request + prefix
    some = list(itertools.islice(requests(kind, random.Random(0)), 2000))
    mean = sum(r.num_prompt_tokens + 0.5 * r.output_len for r in some) / len(some)
    return math.ceil(load.num_running * mean / block_size / _USED[load.situation])


def requests(kind: Kind, rng: random.Random, situation: str = "plain") -> Iterator[VirtualRequest]:
    """Requests without an end; who takes them says when they arrive."""
    prefix = [1 + place % 50_000 for place in range(_PREFIX if situation == "prefixes" else 0)]

    def tokens(mean: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    for number in itertools.count():
        prompt_len, output_len = (
            tokens(*kind.prompt, _MAX_PROMPT),
            tokens(*kind.output, _MAX_OUTPUT),
        )
        request = VirtualRequest(f"r{number}", 0.0, output_len, prompt_len, max_tokens=_MAX_OUTPUT)
        if situation in ("memory", "swap"):
            limit = min(_MAX_OUTPUT, max(output_len, 2 ** rng.randrange(10)))
            request = replace(request, max_tokens=limit)
        if situation in ("memory", "swap", "classes"):
            request = replace(request, extra_args={CLASS_KEY: rng.choice(_CLASSES)})
        if situation == "priorities":
            request = replace(request, priority=rng.randrange(3))
        if situation == "prefixes" and number % _WITH_PREFIX == 0:
            own = [1 + rng.randrange(50_000) for _ in range(prompt_len)]
            request = replace(request, prompt_len=None, prompt_token_ids=[*prefix, *own])
        yield request
