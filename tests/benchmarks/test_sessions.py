"""Prompts that share beginnings: how they are drawn."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sessions.workloads import Talk, conversations, recorded, shared_ratio
from sola_sched.simulator.request import VirtualRequest
from sola_sched.workloads.datasets import ModelLimits
from sola_sched.workloads.workload import RequestSpec, Workload

LIMITS = ModelLimits(max_model_len=4096, vocab_size=1000)
TALK = Talk(system_tokens=100, mean_turns=4.0, mean_think_s=5.0, longest=3000)


def talked(num_requests: int = 300, seed: int = 0) -> Workload:
    return conversations(TALK, LIMITS, None, num_requests, 2.0, seed)


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    requests = talked().requests
    by_id = {request.req_id: request for request in requests}
    system = requests[0].prompt_token_ids[:100]
    for request in requests:
        said = system
        if request.after is not None:
            before = by_id[request.after]
            engine = VirtualRequest(before.req_id, 0.0, before.output_tokens, prompt_len=1)
            answer = [engine.output_token(i, 1000) for i in range(before.output_tokens - 1)]
            said = (*before.prompt_token_ids, *answer)
        assert request.prompt_token_ids[: len(said)] == said
        assert len(request.prompt_token_ids) > len(said)
        assert len(request.prompt_token_ids) + request.output_tokens <= 3000


def test_conversations_begin_at_the_rate_and_have_turns() -> None:
    requests = talked(1000).requests
    starts = [request.arrival_s for request in requests if request.after is None]
    assert len(requests) == 1000
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(len(starts) / 2.0)
    assert 2.0 < 1000 / len(starts) <= 4.5
    assert talked(1000) == talked(1000) != talked(1000, seed=1)


def test_recorded_prefixes_are_kept_at_another_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    blocks = [[1, 2], [1, 3], [4, 5], [1, 2]]
    with gzip.open(path, "wt") as out:
        for i, ids in enumerate(blocks):
            row = {"timestamp": 1000 * i, "input_length": 1024, "output_length": 8, "hash_ids": ids}
            out.write(json.dumps(row) + "\n")

    first, second = (recorded(path, LIMITS, 2, 4.0, seed) for seed in (0, 1))

    one, two = first.requests
    assert one.prompt_token_ids[:512] == two.prompt_token_ids[:512]
    assert one.prompt_token_ids[512:] != two.prompt_token_ids[512:]
    assert [r.arrival_s for r in second.requests] == [0.0, 0.5]
    assert second.requests[1].prompt_token_ids == one.prompt_token_ids


def test_what_an_endless_cache_would_have() -> None:
    prompts = [tuple(range(64)), (*range(32), *range(100, 132)), tuple(range(64))]
    requests = tuple(RequestSpec(str(i), prompt, 1) for i, prompt in enumerate(prompts))
    assert shared_ratio(Workload(requests)) == pytest.approx((0 + 32 + 64) / 192)
