"""Split-phase serving in virtual time: a prefill pool, a transfer of KV, a decode pool.

Prompts wait for nothing in the decode pool, so the pools run one after the other: the first
serves every request up to its first token; what comes out, after the time that the KV takes over
the link, is what the second one gets, whose instances compute no prompts. Left out: that a link is
shared, and that a prefill instance holds KV until it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sola_sched.config.slo import SloTarget
from sola_sched.simulator.cluster.engine import ClusterRequest
from sola_sched.simulator.cluster.records import ClusterRecord
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.profile import StepProfile
from sola_sched.simulator.steps.time import DecodeOnly

#: What a prompt may be in the decode pool: its KV comes with it, so no budget cuts it.
WHOLE_PROMPT = 1 << 16
#: Router of the decode pool: no prompt waits there, the number of decodes is what counts.
DECODE_ROUTER = "shortest-queue"
#: A request may wait for the decode pool as long as this many of its tokens may take.
_WAIT_TOKENS = 10.0


def decode_profile(profile: StepProfile) -> StepProfile:
    """The profile of an instance of the decode pool."""
    return replace(profile, step_time=DecodeOnly(profile.step_time))  # type: ignore[arg-type]


def prefill_requests(requests: Sequence[ClusterRequest]) -> list[ClusterRequest]:
    """The requests up to their first token."""
    return [
        replace(each, request=replace(each.request, output_len=1, max_tokens=1))
        for each in requests
    ]


def decode_requests(
    requests: Sequence[ClusterRequest],
    records: Sequence[ClusterRecord],
    profile: StepProfile,
) -> list[ClusterRequest]:
    """What is left of them after their first tokens.

    Args:
        requests: All.
        records: What the prefill pool did to them, in the same order.
        profile: Of the instances: KV of a token and the link.
    """
    assert profile.kv_bytes_per_token is not None
    assert profile.pcie_bytes_per_s is not None
    token_s = profile.kv_bytes_per_token / profile.pcie_bytes_per_s
    left = []
    for each, record in zip(requests, records, strict=True):
        asked = each.request
        if not record.completed or asked.output_len == 1:
            continue
        num_prompt = asked.num_prompt_tokens
        request = VirtualRequest(
            asked.req_id,
            record.first_token_s + token_s * num_prompt,
            asked.output_len - 1,
            prompt_len=num_prompt + 1,
            max_tokens=None if asked.max_tokens is None else max(1, asked.max_tokens - 1),
        )
        wait_s = _WAIT_TOKENS * each.slo.tpot_s
        left.append(replace(each, request=request, slo=SloTarget(wait_s, each.slo.tpot_s)))
    return left


def whole(
    requests: Sequence[ClusterRequest],
    first: Sequence[ClusterRecord],
    rest: Sequence[ClusterRecord],
    start_s: float = 0.0,
) -> list[ClusterRecord]:
    """One record for each request, of what both pools did to it.

    Args:
        start_s: By which the second pool's times are later.
    """
    after = {record.req_id: record for record in rest}
    records = []
    for each, record in zip(requests, first, strict=True):
        then = after.get(record.req_id)
        last_s, num_tokens = record.last_token_s, record.num_output_tokens
        completed = record.completed and (each.request.output_len == 1 or then is not None)
        error = record.error
        if then is not None:
            last_s, num_tokens = then.last_token_s - start_s, num_tokens + then.num_output_tokens
            completed, error = then.completed, then.error
            if math.isnan(last_s):
                last_s = record.last_token_s
        records.append(
            replace(
                record, slo=each.slo, last_token_s=last_s, num_output_tokens=num_tokens,
                completed=completed, error=error,
            )
        )  # fmt: skip
    return records
