"""How many tokens a second instances of one tensor parallel degree have, for unequal clusters.

Source: Y. Xiong et al., *High-Throughput LLM inference on Heterogeneous Clusters*, section 3.
Algorithm 1 estimates the throughput of a machine of u GPUs by degree t: requests are taken in order
into static batches as large as the memory allows, the times of the batches (Eq. 3, 4) are summed,
tokens are divided by that, and the machine has u / t instances.

Departures: engines refill a batch as requests end, and static batches, which last as long as their
longest request, rank degrees wrongly (docs/results/cluster-deployment.md); `estimate_refilled` is
beside it. Algorithm 1 as printed returns t tokens / time; its text says u / t, which is used.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from sola_sched.cluster.performance.static_batch_time import StaticBatchTime
from sola_sched.errors import ConfigError, InfeasibleError

#: How often the slots are filled, and the most of them, for `estimate_refilled`.
_TURNS = 16
_MOST_RUNNING = 4096


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
