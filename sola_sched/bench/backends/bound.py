"""The upper bound of `sola_sched.simulator.bound` for a workload in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sola_sched.bench.backends.base import SchedulerSpec
from sola_sched.config.slo import SloTarget
from sola_sched.workloads.workload import RequestSpec, Workload

if TYPE_CHECKING:
    from sola_sched.bench.backends.simulation import SimBackend
    from sola_sched.simulator.bound.upper import Bound


def workload_bound(
    backend: SimBackend,
    workload: Workload,
    slo: SloTarget,
    schedulers: Sequence[SchedulerSpec] = (),
) -> Bound:
    """Most requests of `workload` that any scheduler attains on this backend.

    Args:
        backend: Step times and engine limits; of limits that a scheduler changes for itself the
            widest counts, so that one bound holds for all.
        workload: Requests with arrival times.
        slo: Targets of requests that have none of their own.
        schedulers: Those compared.
    """
    from sola_sched.simulator.bound.upper import BoundRequest, upper_bound

    own = backend.options.engine_args
    args = [backend._checked(own | s.engine_args) for s in schedulers] or [backend._checked(own)]
    shared = [0] * len(workload.requests)
    if any(a["enable_prefix_caching"] for a in args):
        shared = _num_shared_tokens(workload.requests, min(a["block_size"] for a in args))
    return upper_bound(
        (
            BoundRequest(
                arrival_s=request.arrival_s,
                # A prompt that is cached to its end is computed from its last token on.
                num_prompt_tokens=max(1, len(request.prompt_token_ids) - cached),
                num_output_tokens=request.output_tokens,
                slo=request.slo or slo,
            )
            for request, cached in zip(workload.requests, shared, strict=True)
        ),
        backend.options.profile.step_time,
        max_num_seqs=max(a["max_num_seqs"] for a in args),
        # The null block holds no tokens.
        num_kv_tokens=max((a["num_gpu_blocks_override"] - 1) * a["block_size"] for a in args),
        max_num_batched_tokens=max(a["max_num_batched_tokens"] for a in args),
    )


def _num_shared_tokens(requests: Sequence[RequestSpec], block_size: int) -> list[int]:
    """Tokens in the leading blocks that another prompt has too: at best all of them are cached."""
    counts = Counter(prefix for r in requests for prefix in _prefixes(r, block_size))
    return [
        block_size * sum(counts[prefix] > 1 for prefix in _prefixes(request, block_size))
        for request in requests
    ]


def _prefixes(request: RequestSpec, block_size: int) -> Iterator[int]:
    prefix, tokens = 0, request.prompt_token_ids
    for end in range(block_size, len(tokens) + 1, block_size):
        prefix = hash((prefix, tokens[end - block_size : end]))
        yield prefix
