"""Mixes of several kinds of request on one engine, and how each is drawn.

Targets are absolute, since a server's are. The two published tiers of a provider's price list, 6 s
and 50 ms, and a deadline for the whole answer, are run as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness.points import SYNTHETIC, read_lengths
from sola_sched.config.slo import SloTarget
from sola_sched.workloads.datasets import ModelLimits
from sola_sched.workloads.workload import (
    RequestSpec,
    SloClass,
    Workload,
    arrival_times,
    assign_classes,
    random_token_ids,
)

_CHAT, _ARTICLES = "sharegpt_lengths_llama2.csv.gz", "arxiv_summarization_lengths_llama2.csv.gz"
_SMALL, _LARGE = "llama-3-8b-a100-measured", "llama-3-70b-a100-measured"

TIGHT, MEDIUM, WORK = SloTarget(0.5, 0.05), SloTarget(2.0, 0.1), SloTarget(tpot_s=0.2)


@dataclass(frozen=True)
class Kind:
    """One class of requests.

    Attributes:
        share: Of the requests.
        slo: Targets, and the weight.
        stretch: Factor on the lengths of its prompts and outputs.
        rank: vLLM's priority, smaller first, in mixes with strict ones.
    """

    share: float
    slo: SloTarget
    stretch: float = 1.0
    rank: int = 0


@dataclass(frozen=True)
class Mix:
    """What arrives at one engine.

    Attributes:
        about: In words.
        kinds: By name.
        rate_per_s: Requests per second, all together.
        profile: Step times.
        dataset: Lengths.
        is_strict: Whether the ranks of the kinds are vLLM's priorities.
        stretch: Factor on the number of requests, where deadlines are long.
    """

    about: str
    kinds: dict[str, Kind] = field(hash=False)
    rate_per_s: float
    profile: str = _SMALL
    dataset: str = _CHAT
    is_strict: bool = False
    stretch: int = 1


MIXES = {
    "40/40/20": Mix(
        "40 % tight, 40 % medium, 20 % without TTFT",
        {"tight": Kind(0.4, TIGHT), "medium": Kind(0.4, MEDIUM), "work": Kind(0.2, WORK)},
        6.0,
    ),
    "tiers": Mix(
        "a third each: 6 s and 50 ms; 600 s to the last token; 1,800 s to the last token",
        {
            "interactive": Kind(1 / 3, SloTarget(6.0, 0.05)),
            "600 s": Kind(1 / 3, SloTarget(e2e_s=600.0)),
            "1,800 s": Kind(1 / 3, SloTarget(e2e_s=1800.0)),
        },
        2.0,
        _LARGE,
        _ARTICLES,
        stretch=7,
    ),
    "flood": Mix(
        "three tenants; one sends eight in ten requests, each worth an eighth of the others'",
        {
            "a": Kind(0.1, SloTarget(2.0, 0.1, weight=8.0)),
            "b": Kind(0.1, SloTarget(2.0, 0.1, weight=8.0)),
            "flood": Kind(0.8, MEDIUM),
        },
        6.5,
    ),
    "ten times as long": Mix(
        "one in ten is ten times as long, in and out; the same targets",
        {"short": Kind(0.9, MEDIUM), "long": Kind(0.1, MEDIUM, stretch=10.0)},
        6.0,
    ),
    "10/80/10": Mix(
        "10 % tight, 80 % medium, 10 % without TTFT",
        {"tight": Kind(0.1, TIGHT), "medium": Kind(0.8, MEDIUM), "work": Kind(0.1, WORK)},
        6.0,
    ),
    "deadlines": Mix(
        "half chats, half agents whose whole answer is due in 40 s",
        {"chat": Kind(0.5, MEDIUM), "agent": Kind(0.5, SloTarget(e2e_s=40.0))},
        6.0,
        stretch=2,
    ),
    "strict": Mix(
        "40/40/20 with strict priorities, tight before medium before work",
        {
            "tight": Kind(0.4, TIGHT),
            "medium": Kind(0.4, MEDIUM, rank=1),
            "work": Kind(0.2, WORK, rank=2),
        },
        6.0,
        is_strict=True,
    ),
}


def mixed_workload(
    mix: Mix, limits: ModelLimits, data: Path | None, num_requests: int, seed: int
) -> Workload:
    """The requests of a mix, the same for every scheduler; Poisson arrivals."""
    table = read_lengths(mix.dataset if data else SYNTHETIC, limits.max_model_len, data)
    rng = np.random.default_rng([seed, 6])
    rows = np.resize(rng.permutation(len(table.prompt)), num_requests)
    times_s = arrival_times(num_requests, mix.rate_per_s, seed=seed)
    plain = Workload(tuple(RequestSpec(str(i), (0,), 1, t) for i, t in enumerate(times_s.tolist())))
    classes = [SloClass(name, kind.share, kind.slo) for name, kind in mix.kinds.items()]
    requests = []
    for spec, row in zip(assign_classes(plain, classes, seed).requests, rows, strict=True):
        assert spec.slo_class is not None
        kind = mix.kinds[spec.slo_class]
        output = min(int(kind.stretch * table.output[row]), limits.max_model_len - 1)
        prompt = min(int(kind.stretch * table.prompt[row]), limits.max_model_len - output)
        requests.append(
            RequestSpec(
                spec.req_id, random_token_ids(rng, max(1, prompt), limits.vocab_size),
                max(1, output), spec.arrival_s, spec.slo, spec.slo_class, kind.rank,
            )
        )  # fmt: skip
    return Workload(tuple(requests), request_rate=mix.rate_per_s)


def due_s(request: RequestSpec) -> float:
    """When a request is due as a rule knows it that does not know lengths, seconds.

    Its first token if it has a target for that, or else its last one; after all others without one.
    """
    assert request.slo is not None
    slo = request.slo
    return request.arrival_s + min(slo.ttft_s, slo.e2e_s, 1e6)
