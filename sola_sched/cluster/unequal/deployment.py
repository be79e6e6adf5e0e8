"""Which tensor parallel degree each machine of an unequal cluster should have.

Source: Y. Xiong et al., *High-Throughput LLM inference on Heterogeneous Clusters*, section 3. With
t of a machine's u GPUs (memory d each) in an instance, phi of the memory usable, delta held by the
engine, and Phi parameters of b bytes:

    KVSize = t d phi - delta - Phi b                                            (Eq. 1)
    KVSize >= KV of one request of the longest prompt and output               (Eq. 2)

Algorithm 1 estimates the throughput: requests are taken in order into static batches as large as
the memory allows, the times of the batches (Eq. 3, 4) are summed, tokens are divided by that, and
the machine has u / t instances. All degrees that divide u are tried on each machine. Machines add
up, so the best of each is the best of the cluster.

Departures: engines refill a batch as requests end, and static batches, which last as long as their
longest request, rank degrees wrongly (docs/results/cluster-deployment.md). So the search goes by
`estimate_refilled`, with Algorithm 1 beside it. delta is held on each GPU (the paper's text; its
Eq. 1 has it once). KV of a token is given, as models with grouped heads have less than the paper's
2 l h. Algorithm 1 as printed returns t tokens / time; its text says u / t, which is used.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sola_sched.cluster.performance.static_batch_time import StaticBatchTime
from sola_sched.errors import ConfigError, InfeasibleError

#: How often the slots are filled, and the most of them, for `estimate_refilled`.
_TURNS = 16
_MOST_RUNNING = 4096


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Sizes of the model to deploy.

    Attributes:
        weight_bytes: Phi b, of all weights.
        kv_bytes_per_token: Of all layers.
        longest_tokens: I_max + O_max.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    longest_tokens: int

    def __post_init__(self) -> None:
        _require_positive(self, ("weight_bytes", "kv_bytes_per_token", "longest_tokens"))


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with GPUs of one kind.

    Attributes:
        name: Shown in results.
        num_gpus: u.
        memory_bytes: d, of one GPU.
        usable_ratio: phi, in (0, 1].
        engine_bytes: delta, on each GPU, >= 0.
        price_per_hour: Of the whole machine, >= 0; 0 if it does not matter.
    """

    name: str
    num_gpus: int
    memory_bytes: float
    usable_ratio: float = 0.9
    engine_bytes: float = 2e9
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(self, ("num_gpus", "memory_bytes", "usable_ratio"))
        for name in ("engine_bytes", "price_per_hour"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ConfigError(
                    f"'{name}' of machine {self.name!r} must be finite and >= 0 (got {value!r})."
                )
        if self.usable_ratio > 1.0:
            raise ConfigError(
                f"'usable_ratio' of machine {self.name!r} must be <= 1 (got {self.usable_ratio!r})."
            )

    def degrees(self) -> list[int]:
        """Tensor parallel degrees that leave no GPU unused."""
        return [t for t in range(1, self.num_gpus + 1) if self.num_gpus % t == 0]


@dataclass(frozen=True, slots=True)
class Deployment:
    """Instances on one machine.

    Attributes:
        machine: The machine.
        tensor_parallel: t.
        num_instances: u / t.
        kv_bytes: KVSize of one instance.
        tokens_per_s: Estimated throughput of the machine, prompt and output tokens.
    """

    machine: Machine
    tensor_parallel: int
    num_instances: int
    kv_bytes: float
    tokens_per_s: float


def kv_bytes_of(machine: Machine, tensor_parallel: int, model: ServedModel) -> float:
    """Eq. 1: memory for KV of one instance; negative where the weights do not fit."""
    per_gpu = machine.memory_bytes * machine.usable_ratio - machine.engine_bytes
    return tensor_parallel * per_gpu - model.weight_bytes


class Estimate(Protocol):
    """`estimate_refilled` or `estimate_throughput`."""

    def __call__(
        self,
        batch_time: StaticBatchTime,
        kv_bytes: float,
        kv_bytes_per_token: float,
        requests: Sequence[tuple[int, int]],
        *,
        num_instances: int = 1,
        max_requests: int | None = None,
    ) -> float:
        """Tokens per second of the instances."""


def estimate_refilled(
    batch_time: StaticBatchTime,
    kv_bytes: float,
    kv_bytes_per_token: float,
    requests: Sequence[tuple[int, int]],
    *,
    num_instances: int = 1,
    max_requests: int | None = None,
) -> float:
    """Tokens per second of instances that refill their batches as requests end.

    One instance serves the requests in order, over and over, with nothing but this: who waits
    starts once there are a slot and memory for its prompt; where memory ends, the youngest goes
    back to the head of the queue and is computed again. Decode steps take Eq. 4, each prompt what
    one more takes in a batch (Eq. 3). All start together, so slots are filled several times; at
    most 4,096 run at once.

    Args and errors: as of `estimate_throughput`.
    """
    _require_fitting(requests, kv_bytes, kv_bytes_per_token)
    memory = kv_bytes / kv_bytes_per_token
    slots = min(max_requests or _MOST_RUNNING, _MOST_RUNNING)
    tokens_once = sum(map(sum, requests))
    repeats = math.ceil(_TURNS * max(1.0, min(slots / len(requests), memory / tokens_once)))
    queue = deque(list(requests) * repeats)
    # Of each that runs: tokens when it started, the step before that, output to come. The youngest
    # is the last.
    running: dict[int, tuple[int, int, int]] = {}
    ends: list[tuple[int, int]] = []
    numbers = itertools.count()
    step, held, seconds = 0, 0, 0.0
    while queue:
        while queue and len(running) < slots:
            tokens, left = queue[0]
            if running and held + tokens + len(running) + 1 > memory:
                break
            queue.popleft()
            number = next(numbers)
            running[number] = (tokens, step, left)
            heapq.heappush(ends, (step + left, number))
            held += tokens
            seconds += batch_time.batch_prefill_s(2, tokens) - batch_time.batch_prefill_s(1, tokens)
        batch = len(running)
        while ends[0][1] not in running:
            heapq.heappop(ends)
        steps = min(ends[0][0] - step, max(1, int((memory - held) / batch)))
        seconds += steps * batch_time.decode_s(batch, held + batch * (steps + 1) / 2)
        step, held = step + steps, held + batch * steps
        while ends and ends[0][0] <= step:
            ended = running.pop(heapq.heappop(ends)[1], None)
            held -= ended[0] + ended[2] if ended else 0
        while len(running) > 1 and held + len(running) > memory:
            tokens, since, left = running.pop(next(reversed(running)))
            queue.appendleft((tokens + step - since, left - (step - since)))
            held -= tokens + step - since
    to_come = sum(since + left - step for _, since, left in running.values())
    return num_instances * (repeats * tokens_once - to_come) / seconds


def estimate_throughput(
    batch_time: StaticBatchTime,
    kv_bytes: float,
    kv_bytes_per_token: float,
    requests: Sequence[tuple[int, int]],
    *,
    num_instances: int = 1,
    max_requests: int | None = None,
) -> float:
    """Algorithm 1: tokens per second of instances that serve static batches.

    Args:
        batch_time: p1 to p8 of an instance.
        kv_bytes: KVSize of an instance.
        kv_bytes_per_token: Of the model.
        requests: Prompt and output tokens of a sample.
        num_instances: u / t.
        max_requests: Slots of an instance; None for no limit, as in the paper.

    Raises:
        ConfigError: There are no requests.
        InfeasibleError: One of them does not fit in the memory alone.
    """
    _require_fitting(requests, kv_bytes, kv_bytes_per_token)
    total_s, begin = 0.0, 0
    while begin < len(requests):
        end, sum_in, longest_in, longest_out = begin, 0, 0, 0
        for tokens_in, tokens_out in requests[begin : begin + (max_requests or len(requests))]:
            count, longest = end + 1 - begin, max(longest_out, tokens_out)
            if (sum_in + tokens_in + count * longest) * kv_bytes_per_token > kv_bytes:
                break
            end, sum_in, longest_out = end + 1, sum_in + tokens_in, longest
            longest_in = max(longest_in, tokens_in)
        total_s += float(batch_time.batch_s(end - begin, longest_in, longest_out))
        begin = end
    num_tokens = sum(tokens_in + tokens_out for tokens_in, tokens_out in requests)
    return num_instances * num_tokens / total_s


def machine_deployments(
    machine: Machine,
    model: ServedModel,
    batch_times: Mapping[int, StaticBatchTime],
    requests: Sequence[tuple[int, int]],
    *,
    max_requests: int | None = None,
    estimate: Estimate = estimate_refilled,
) -> list[Deployment]:
    """Every degree that meets Eq. 2 and has p1 to p8, most throughput first.

    Raises:
        InfeasibleError: None does; the message has the memory of the largest.
    """
    needed = model.longest_tokens * model.kv_bytes_per_token
    found = []
    for t in machine.degrees():
        kv_bytes = kv_bytes_of(machine, t, model)
        if kv_bytes < needed or t not in batch_times:
            continue
        number = machine.num_gpus // t
        tokens_per_s = estimate(
            batch_times[t], kv_bytes, model.kv_bytes_per_token, requests,
            num_instances=number, max_requests=max_requests,
        )  # fmt: skip
        found.append(Deployment(machine, t, number, kv_bytes, tokens_per_s))
    if not found:
        most = kv_bytes_of(machine, machine.num_gpus, model)
        raise InfeasibleError(
            f"On {machine.name} KV of one request of {model.longest_tokens} tokens must fit beside "
            f"the weights (Eq. 2): needs {needed / 1e9:.2f} GB, and all {machine.num_gpus} GPUs "
            f"together leave {most / 1e9:.2f} GB, {(needed - most) / 1e9:.2f} GB too little; or "
            f"no step times are known (got degrees {sorted(batch_times)})."
        )
    return sorted(found, key=lambda deployment: -deployment.tokens_per_s)


def search_deployment(
    machines: Sequence[Machine],
    model: ServedModel,
    batch_times: Mapping[str, Mapping[int, StaticBatchTime]],
    requests: Sequence[tuple[int, int]],
    *,
    max_requests: int | None = None,
    estimate: Estimate = estimate_refilled,
) -> list[Deployment]:
    """The deployment with the most throughput on each machine.

    Args:
        machines: The cluster.
        model: What to deploy.
        batch_times: By machine name and degree.
        requests: Prompt and output tokens of a sample of the workload.
        max_requests: Slots of an instance; None for no limit.
        estimate: By which degrees are compared.

    Raises:
        InfeasibleError: The model fits on a machine with no degree.
    """
    return [
        machine_deployments(
            machine, model, batch_times.get(machine.name, {}), requests,
            max_requests=max_requests, estimate=estimate,
        )[0]
        for machine in machines
    ]  # fmt: skip


def _require_fitting(
    requests: Sequence[tuple[int, int]], kv_bytes: float, kv_bytes_per_token: float
) -> None:
    if not requests:
        raise ConfigError("'requests' must hold lengths of past requests (got none).")
    longest = max(requests, key=sum)
    needed = sum(longest) * kv_bytes_per_token
    if needed > kv_bytes:
        raise InfeasibleError(
            f"A request of {longest[0]} + {longest[1]} tokens must fit in the KV memory of an "
            f"instance (needs {needed / 1e9:.2f} GB of {kv_bytes / 1e9:.2f} GB); take more GPUs "
            "per instance."
        )


def _require_positive(thing: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(thing, name)
        if not 0.0 < value < math.inf:
            raise ConfigError(
                f"'{type(thing).__name__}.{name}' must be finite and > 0 (got {value!r})."
            )
