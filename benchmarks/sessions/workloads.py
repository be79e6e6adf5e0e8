"""Prompts that share beginnings: recorded traces, and conversations that wait for answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.points import SYNTHETIC, read_lengths
from sola_sched.simulator.request import VirtualRequest
from sola_sched.workloads.datasets import DatasetOptions, ModelLimits, build
from sola_sched.workloads.workload import (
    RequestSpec,
    Workload,
    arrival_times,
    random_token_ids,
)

_CHAT = "sharegpt_lengths_llama2.csv.gz"
_BLOCK = 16


@dataclass(frozen=True)
class Talk:
    """How conversations go.

    Attributes:
        system_tokens: The beginning that all of them share.
        mean_turns: Of a conversation, geometric.
        mean_think_s: From an answer to the next question, exponential.
        question: Factor on the prompts of the data set, which hold earlier turns.
        longest: A conversation ends before its prompt and answer are longer, tokens.
    """

    system_tokens: int = 1000
    mean_turns: float = 5.0
    mean_think_s: float = 10.0
    question: float = 0.25
    longest: int = 8000


def conversations(
    talk: Talk, limits: ModelLimits, data: Path | None, num_requests: int, rate_per_s: float,
    seed: int,
) -> Workload:  # fmt: skip
    """A closed loop: a turn's prompt is all that was said before, and comes after the answer.

    Args:
        talk: How conversations go.
        limits: Of the model.
        data: Folder of the data sets; None draws lengths from a fit.
        num_requests: Turns in all; the last conversation may be cut short.
        rate_per_s: Conversations that begin per second.
        seed: Of everything that is drawn.
    """
    table = read_lengths(_CHAT if data else SYNTHETIC, limits.max_model_len, data)
    rng = np.random.default_rng([seed, 11])
    system = random_token_ids(np.random.default_rng([seed, 12]), talk.system_tokens,
                              limits.vocab_size)  # fmt: skip
    longest = min(talk.longest, limits.max_model_len)
    turns: list[list[RequestSpec]] = []
    while (left := num_requests - sum(map(len, turns))) > 0:
        said, own = system, list[RequestSpec]()
        for _ in range(min(left, int(rng.geometric(1.0 / talk.mean_turns)))):
            row = rng.integers(len(table.prompt))
            question = random_token_ids(
                rng, max(1, int(talk.question * table.prompt[row])), limits.vocab_size
            )
            output = int(table.output[row])
            if len(said) + len(question) + output > longest:
                if own:
                    break
                room = longest - len(said)
                output = min(output, room // 2)
                question = question[: room - output]
            name = f"{len(turns)}.{len(own)}"
            own.append(
                RequestSpec(
                    name, said + question, output, float(rng.exponential(talk.mean_think_s)),
                    after=own[-1].req_id if own else None,
                )
            )  # fmt: skip
            said += question + _answer(own[-1], limits.vocab_size)
        turns.append(own)
    starts_s = arrival_times(len(turns), rate_per_s, seed=seed)
    requests = [
        RequestSpec(r.req_id, r.prompt_token_ids, r.output_tokens, at, after=r.after)
        if r.after is None
        else r
        for own, at in zip(turns, starts_s.tolist(), strict=True)
        for r in own
    ]
    return Workload(tuple(requests), request_rate=rate_per_s)


def recorded(
    path: Path, limits: ModelLimits, num_requests: int, rate_per_s: float, seed: int
) -> Workload:
    """A trace whose rows tell the blocks of their prompts, in its order, stretched to a rate.

    Each seed has the next `num_requests` rows.
    """
    options = DatasetOptions(
        "mooncake", path, num_prompts=(seed + 1) * num_requests, self_timed=True
    )
    workload = build(options, limits)
    own = workload.requests[-num_requests:]
    first_s = own[0].arrival_s
    requests = tuple(
        RequestSpec(r.req_id, r.prompt_token_ids, r.output_tokens, r.arrival_s - first_s)
        for r in own
    )
    return Workload(requests, notes=workload.notes).stretched_to(rate_per_s)


def shared_ratio(workload: Workload) -> float:
    """Share of the prompt tokens that an endless cache would have, of requests in their order."""
    seen: set[int] = set()
    num_shared = num_all = 0
    for request in workload.requests:
        ids, chain, is_shared = request.prompt_token_ids, 0, True
        for start in range(0, len(ids) - _BLOCK + 1, _BLOCK):
            chain = hash((chain, ids[start : start + _BLOCK]))
            is_shared = is_shared and chain in seen
            num_shared += _BLOCK * is_shared
            seen.add(chain)
        num_all += len(ids)
    return num_shared / max(1, num_all)


def _answer(request: RequestSpec, vocab_size: int) -> tuple[int, ...]:
    """What the engine in virtual time answers, its end-of-text token left out."""
    made = VirtualRequest(request.req_id, 0.0, request.output_tokens, prompt_len=1)
    return tuple(made.output_token(i, vocab_size) for i in range(request.output_tokens - 1))
