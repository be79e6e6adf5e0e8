"""What each mechanism of `attain` is worth: left out, on loads it was tuned on and on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness import sweep
from harness.markdown import markdown
from harness.points import SYNTHETIC, Point
from harness.resumable import Row
from harness.setup import Outcome, Setup
from simulation.setups import DATASETS
from sola_sched.simulator.steps.profile import load_step_profile

_CHAT, _ARTICLES = DATASETS["sharegpt"], DATASETS["arxiv"]
_AZURE, _CODE, _ALPACA = DATASETS["azure-conv"], DATASETS["azure-code"], "alpaca.jsonl.gz"
_PROMPTS = DATASETS["sharegpt-prompts"]
_COMPUTED, _MEASURED = "llama-3-8b-a100", "llama-3-8b-a100-measured"


@dataclass(frozen=True)
class Load:
    """What a mechanism is tried on.

    Attributes:
        about: In words.
        point: Everything but the scheduler and the seed.
        kv_share: Share of the profile's KV memory.
    """

    about: str
    point: Point
    kv_share: float = 1.0


def _point(
    profile: str, dataset: str, rate_per_s: float, ttft_s: float, tpot_s: float, **more: Any
) -> Point:
    return Point(
        profile, dataset, rate_per_s, ttft_s, tpot_s, "sola", **{"num_requests": 300} | more
    )


TUNED = {
    "articles": Load("arXiv, computed steps", _point(_COMPUTED, _ARTICLES, 3.71, 2.26, 0.106)),
    "little KV": Load(
        "chat, measured A100, a third of the KV memory",
        _point(_MEASURED, _CHAT, 4.91, 1.42, 0.118), kv_share=1 / 3,
    ),
    "slots": Load(
        "SOLA's Llama3-8B at 1.3 times stock's rate: slots are short",
        _point(_COMPUTED, _PROMPTS, 21.6, 0.4, 0.15, outputs_from=_CHAT, num_requests=1000),
    ),
    "5 x": Load(
        "SOLA's Llama3-8B, 5 times a single request's latency, 1.3 times stock's rate",
        _point(_COMPUTED, _PROMPTS, 17.2, 0.0906, 0.0518, outputs_from=_CHAT),
    ),
    "short prompts": Load(
        "Alpaca on an H100, far past what it can serve",
        _point("llama-3-8b-h100", _ALPACA, 650.0, 0.08, 0.08, num_requests=3000),
    ),
}  # fmt: skip
HELD_OUT = {
    "chat, measured": Load("chat, measured A100", _point(_MEASURED, _CHAT, 4.91, 1.42, 0.118)),
    "H100": Load(
        "azure-conv, measured H100", _point("llama-3-8b-h100-measured", _AZURE, 36.9, 0.263, 0.0663)
    ),
    "code": Load(
        "azure-code by its recorded arrivals, 70B, measured",
        _point("llama-3-70b-a100-measured", _CODE, 2.0, 4.0, 0.277, arrivals="recorded"),
    ),
    "V100": Load("Alpaca on OPT-13B: KV is short", _point("opt-13b-v100", _ALPACA, 14.0, 2.0, 0.2)),
    "tight TPOT": Load(
        "chat, measured A100, TPOT near a bare step, past what it can serve",
        _point(_MEASURED, _CHAT, 4.91, 1.42, 0.018),
    ),
    "low load": Load(
        "chat, measured A100, TPOT near a bare step", _point(_MEASURED, _CHAT, 1.5, 0.6, 0.02)
    ),
}
LOADS = TUNED | HELD_OUT

#: Class of `simulation.ablations` by mechanism.
PARTS = {
    "the predicted peak of memory": "WithoutPeakMemory",
    "1.1 instead of 0.97 of the memory": "WithPlannedMemory97",
    "held decodes": "WithoutHeldDecodes",
    "a limit to the steps of the lost": "WithoutLimitForLost",
    "on time a step early": "WithoutLead",
    "lent time": "WithoutLending",
    "lent time where somebody is lost": "WithoutLendingPastLost",
    "a step ends before its first deadline": "WithoutFirstDeadline",
    "catching up halfway": "WithoutCatchingUp",
    "too slow decodes are lost": "WithoutTooSlow",
    "others of the lost beside the oldest": "WithoutOthersLost",
    "chunks in multiples": "WithoutTiles",
    "margins for errors of the model": "WithoutMargins",
}
_SIMPLE = ("spf:1024",)
"""The simplest rule: the shortest prompt first, in chunks of fixed size."""


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        load: Key of `LOADS`.
        scheduler: As on the command line of `sola_sched.bench`.
    """

    load: str
    scheduler: str
    num_requests: int
    seed: int


def mechanisms(setup: Setup) -> Outcome:
    """Points of attainment lost without each mechanism, by load."""
    setup.check_only(list(LOADS))
    names = [name for name in LOADS if not setup.only or name in setup.only]
    names = names[-1:] if setup.is_quick or setup.data is None else names
    rules = {"": "sola"} | {
        part: _part(PARTS[part]) for part in list(PARTS)[: 2 if setup.is_quick else None]
    }
    simple = () if setup.is_quick else _SIMPLE
    cases = [
        Case(name, scheduler, setup.num_requests, seed)
        for name in names
        for scheduler in (*rules.values(), *simple)
        for seed in setup.seeds
    ]
    rows = setup.rows_of(cases, _key, partial(_run, data=setup.data), "mechanisms")
    share = {
        (name, scheduler): 100 * float(np.mean([
            row["attainment"] for row in rows
            if row["load"] == name and row["scheduler"] == scheduler
        ]))
        for name in names
        for scheduler in (*rules.values(), *simple)
    }  # fmt: skip
    lines = [["**attained, %**", *(f"{share[name, 'sola']:.1f}" for name in names), "", ""]]
    for label, scheduler in [*list(rules.items())[1:], *((name, name) for name in simple)]:
        lost = {name: share[name, scheduler] - share[name, "sola"] for name in names}
        means = [
            _mean([lost[name] for name in group if name in lost]) for group in (TUNED, HELD_OUT)
        ]
        lines.append([label, *(f"{lost[name]:+.1f}" for name in names), *means])
    about = [f"- *{name}*: {LOADS[name].about}." for name in names]
    head = ["without", *names, "mean, tuned", "mean, held out"]
    return Outcome(rows, "\n".join([markdown(head, lines, 1), "", *about]))


def _part(name: str) -> str:
    return f"stock:8192,engine.scheduler_cls=simulation.ablations.{name}"


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):+.1f}" if values else "-"


def _run(case: Case, data: Path | None) -> Row:
    return asdict(case) | {"attainment": sweep.run_point(_point_of(case, data), data)["attainment"]}


def _point_of(case: Case, data: Path | None) -> Point:
    load, scheduler = LOADS[case.load], case.scheduler
    point = load.point
    if data is None:
        point = replace(point, dataset=SYNTHETIC, outputs_from="")
    if load.kv_share < 1.0:
        num_blocks = load_step_profile(point.profile).num_blocks
        assert num_blocks is not None
        separator = "," if ":" in scheduler else ":"
        scheduler += f"{separator}engine.num_gpu_blocks_override={int(load.kv_share * num_blocks)}"
    num_requests = round(case.num_requests / 300 * point.num_requests)
    return replace(point, scheduler=scheduler, seed=case.seed, num_requests=num_requests)


def _key(case: Case) -> str:
    profile = LOADS[case.load].point.profile
    return sweep.make_key(asdict(case), case.scheduler, profile, scripts=[Path(__file__)])
