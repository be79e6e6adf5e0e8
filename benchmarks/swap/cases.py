"""One run in virtual time, and what is changed around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from harness import sweep
from harness.points import Point, make_workload
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.backends.simulation import SimBackend
from sola_sched.core.state import DECODE, StepPlan
from sola_sched.planner import alise_step
from sola_sched.planner.alise_step import AliseStep


@dataclass(frozen=True)
class Case:
    """A point and what is changed around its run.

    Attributes:
        point: Arrivals, lengths, targets and scheduler.
        name: In tables.
        num_blocks: KV blocks; None for the profile's.
        policy: Words: ``defer`` displaces nobody, ``always`` whoever has more left, both as in the
            paper's comparison; ``alone`` computes prompts whole, in steps without decodes. Empty
            leaves the policy as it is.
    """

    point: Point
    name: str
    num_blocks: int | None = None
    policy: str = ""


@contextlib.contextmanager
def policy_of(words: str) -> Iterator[None]:
    """Change the decisions in which the paper's alternatives, or its engine, differ."""
    changes: dict[str, Sequence[Any]] = {
        "defer": (mock.patch.object(AliseStep, "_gives_way", return_value=False),),
        "always": (mock.patch.object(alise_step, "MIN_GAIN", 0.0),),
        "alone": (
            mock.patch.object(AliseStep, "_left_over", lambda self: self.state.max_num_tokens),
            mock.patch.object(AliseStep, "_most", lambda self: self.state.max_num_tokens),
            mock.patch.object(AliseStep, "plan", _alone(AliseStep.plan)),
        ),
    }
    with contextlib.ExitStack() as stack:
        for word in words.split():
            for change in changes[word]:
                stack.enter_context(change)
        yield


def _alone(plan: Callable[[AliseStep], StepPlan]) -> Callable[[AliseStep], StepPlan]:
    """A step that computes prompts has nothing else; KV that comes from the host is no prompt."""

    def changed(self: AliseStep) -> StepPlan:
        planned, table = plan(self), self.state.table
        if planned.run is None or planned.admit is None:
            return planned
        rows = np.concatenate([planned.run, planned.admit])
        left = table.prefill_target[rows] - table.num_computed[rows]
        computes = (table.phase[rows] != DECODE) & (left > 1)
        if not computes.any():
            return planned
        self.num_settled = 0
        num_run = len(planned.run)
        return replace(
            planned,
            run=planned.run[computes[:num_run]],
            admit=planned.admit[computes[num_run:]],
            token_budget=min(int(left[computes].sum()), self.state.max_num_tokens),
        )

    return changed


def run(case: Case, data: Path | None) -> dict[str, Any]:
    """Serve the case; a row of results, latencies in seconds."""
    environment.prepare(None, is_random=True)
    point = case.point
    backend = sweep.make_backend(point.profile)
    assert isinstance(backend, SimBackend)
    spec = parse_scheduler(point.scheduler)
    if case.num_blocks is not None:
        spec.engine_args["num_gpu_blocks_override"] = case.num_blocks
    engines: list[Any] = []
    build = backend._engine

    def remember(*args: Any) -> Any:
        engines.append(build(*args))
        return engines[-1]

    backend._engine = remember  # type: ignore[method-assign, assignment]
    workload = make_workload(point, backend.limits, data)
    with policy_of(case.policy):
        outcome = backend.run(workload, spec, point.slo)
    assert outcome.scheduler is not None
    ended = [r for r in outcome.records if r.completed]
    normalized = [(r.token_times_s[-1] - r.arrival_s) / len(r.token_times_s) for r in ended]
    met = [_is_met(r.token_times_s, r.arrival_s, point) for r in ended]
    scheduler = engines[-1].scheduler
    stats = scheduler.sola_stats() if hasattr(scheduler, "sola_stats") else {}
    return {
        "name": case.name,
        "num_blocks": case.num_blocks,
        "policy": case.policy,
        **asdict(point),
        "num_ended": len(ended),
        "normalized_s": float(np.mean(normalized)),
        "latency_s": float(np.mean([r.token_times_s[-1] - r.arrival_s for r in ended])),
        "normalized_p50_s": float(np.median(normalized)),
        "normalized_p90_s": float(np.quantile(normalized, 0.9)),
        "attained": sum(met) / len(outcome.records),
        "num_preemptions": outcome.scheduler.num_preemptions,
        "swap": stats.get("swap", {}),
        "notes": outcome.notes,
    }


def _is_met(times_s: Sequence[float], arrival_s: float, point: Point) -> bool:
    decode_s = times_s[-1] - times_s[0]
    return times_s[0] - arrival_s <= point.ttft_s and (
        len(times_s) < 2 or decode_s / (len(times_s) - 1) <= point.tpot_s
    )
