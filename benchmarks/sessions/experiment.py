"""Shared beginnings with vLLM's prefix caching on: ours against stock vLLM at its best chunk."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from harness import sweep
from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sessions.workloads import Talk, conversations, recorded, shared_ratio
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.workloads.datasets import ModelLimits
from sola_sched.workloads.workload import Workload

_STOCK = ("stock:512", "stock:2048", "stock:8192")
_OURS = ("sola",)
_SLO = SloTarget(ttft_s=2.0, tpot_s=0.1)
_TALKS = "conversations"
_TRACES = {
    "mooncake conversation": "mooncake_conversation.jsonl.gz",
    "mooncake synthetic": "mooncake_synthetic.jsonl.gz",
}
#: Per second: conversations that begin, requests of a trace.
_RATES = {_TALKS: (4.0, 8.0), "mooncake conversation": (12.0, 14.0),
          "mooncake synthetic": (8.0, 9.0)}  # fmt: skip
#: Conversations need time until many go on at once: factor on the requests.
_STRETCH = {_TALKS: 2}
_SMALL = "llama-3-8b-a100-measured"
_PROFILES = {_TALKS: "llama-3-70b-a100-measured"} | dict.fromkeys(_TRACES, _SMALL)
_SCRIPTS = tuple(Path(__file__).with_name(name) for name in ("experiment.py", "workloads.py"))


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        load: Key of `_RATES`.
        rate_per_s: See there.
        scheduler: ``stock:CHUNK`` or one of ours; all with prefix caching.
    """

    load: str
    rate_per_s: float
    scheduler: str
    num_requests: int
    seed: int


def sessions(setup: Setup) -> Outcome:
    """Attained % by workload and rule."""
    known = [_TALKS, *(_TRACES if setup.data else ())]
    setup.check_only(known)
    cases = [
        Case(load, rate, scheduler, _STRETCH.get(load, 1) * setup.num_requests, seed)
        for load in setup.only or known
        for rate in _RATES[load]
        for scheduler in (*_STOCK, *_OURS)
        for seed in setup.seeds
    ]
    rows = setup.rows_of(cases, _key, partial(_run, data=setup.data), "sessions")
    lines = [
        _line(load, rate, group, rows)
        for load in setup.only or known
        for rate in _RATES[load]
        for group in (_STOCK, _OURS)
    ]
    head = ["load", "per second", "shared %", "rule", "all %", "each seed", "TTFT p99, s",
            "goodput/s"]  # fmt: skip
    talk = Talk()
    about = [
        f"- {_SLO}; {_SMALL}, *{_TALKS}* {_PROFILES[_TALKS]}; {setup.num_requests} requests a run, "
        "twice as many of conversations; *shared*: prompt tokens that an endless cache would have.",
        f"- *{_TALKS}*: they begin at this rate, share {talk.system_tokens} tokens, have "
        f"{talk.mean_turns:g} turns in the mean, and go on {talk.mean_think_s:g} s in the mean "
        "after each answer; a prompt is all that was said before.",
        "- The traces have their recorded order and gaps, stretched to the rate, with all lengths "
        "scaled to the model's context.",
    ]
    return Outcome(rows, "\n".join([markdown(head, lines, 4), "", *about]))


def _run(case: Case, data: Path | None) -> Row:
    """One run, in this process."""
    environment.prepare(None, is_random=True)
    backend = sweep.make_backend(_PROFILES[case.load])
    spec = parse_scheduler(case.scheduler)
    spec.engine_args["enable_prefix_caching"] = True
    workload = _workload(case, backend.limits, data)
    outcome = backend.run(workload, spec, _SLO)
    flags = metrics.attained(outcome.records, _SLO)
    done = [record.ttft_s for record in outcome.records if record.completed]
    return asdict(case) | {
        "attainment": metrics.attainment_ratio(flags),
        "goodput_per_s": metrics.goodput_per_s(flags, outcome.duration_s),
        "p99_ttft_s": float(np.percentile(done, 99)) if done else math.nan,
        "shared_ratio": shared_ratio(workload),
        "num_completed": len(done),
    }


def _workload(case: Case, limits: ModelLimits, data: Path | None) -> Workload:
    if case.load == _TALKS:
        return conversations(Talk(), limits, data, case.num_requests, case.rate_per_s, case.seed)
    assert data is not None
    path = data / _TRACES[case.load]
    return recorded(path, limits, case.num_requests, case.rate_per_s, case.seed)


def _key(case: Case) -> str:
    return sweep.make_key(asdict(case), case.scheduler, _PROFILES[case.load], scripts=_SCRIPTS)


def _line(load: str, rate: float, group: tuple[str, ...], rows: list[Row]) -> list[str]:
    """The best of a group, by its mean over the seeds."""
    of = {
        name: [
            row
            for row in rows
            if (row["load"], row["rate_per_s"], row["scheduler"]) == (load, rate, name)
        ]
        for name in group
    }
    best = max(group, key=lambda name: _mean(of[name], "attainment"))
    runs = of[best]
    return [
        load,
        f"{rate:g}",
        f"{100 * _mean(runs, 'shared_ratio'):.0f}",
        best,
        f"{100 * _mean(runs, 'attainment'):.1f}",
        ", ".join(f"{100 * row['attainment']:.1f}" for row in runs),
        f"{_mean(runs, 'p99_ttft_s'):.2f}",
        f"{_mean(runs, 'goodput_per_s'):.2f}",
    ]


def _mean(rows: list[Row], column: str) -> float:
    return float(np.mean([row[column] for row in rows]))
