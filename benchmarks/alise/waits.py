"""How good estimated waits are.

Of each request that waits when waits are estimated, one estimate drawn at random is compared with
the time until it got a slot; those of no wait at all are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from alise.setups import Run, make_workload, scheduler_of
from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.config.slo import SloTarget

_ALISE = "sola:policy=alise,sim.predictor="
_RUNS = (
    Run("opt-13b-v100", "alpaca", 18.0, 120.0, f"{_ALISE}oracle"),
    Run("opt-13b-v100", "alpaca", 18.0, 120.0, f"{_ALISE}none"),
    Run("llama-3-8b-h100", "sharegpt", 12.0, 90.0, f"{_ALISE}oracle"),
    Run("llama-3-8b-h100", "sharegpt", 12.0, 90.0, f"{_ALISE}none"),
    Run("llama-3-8b-h100", "sharegpt", 12.0, 90.0, "sola:sim.predictor=oracle"),
)
_SLO = SloTarget(2.0, 0.1)


class Watch:
    """Notes estimates and starts around the `schedule()` of a scheduler."""

    def __init__(self, scheduler: Any, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.noted: dict[str, tuple[float, float]] = {}  # request to time and estimate
        self.seen: dict[str, int] = {}
        self.pairs: list[tuple[float, float]] = []  # estimate, wait
        self._last: dict[str, float] = {}
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            now_s = scheduler.sola_clock()
            for name in output.num_scheduled_tokens:
                if name in self.noted:
                    at_s, estimate_s = self.noted.pop(name)
                    self.pairs.append((estimate_s, now_s - at_s))
            if scheduler._planning.num_plans % 16 == 1:
                self._note(scheduler, now_s)
            return output

        scheduler.schedule = watched

    def _note(self, scheduler: Any, now_s: float) -> None:
        table = scheduler.sola_monitor.table
        for request in scheduler.waiting:
            name = request.request_id
            estimate_s = float(table.ewt_s[table.row_of[name]])
            if not estimate_s > 0.0:
                continue
            self.seen[name] = self.seen.get(name, 0) + 1
            if self.rng.random() < 1.0 / self.seen[name]:
                self.noted[name] = now_s, estimate_s


def watch(run: Run, data: Path | None) -> list[str]:
    """One line of the table."""
    from harness import sweep
    from sola_sched.bench.backends import environment
    from sola_sched.bench.backends import simulation as sim_backend
    from sola_sched.bench.backends.base import parse_scheduler

    environment.prepare(None, is_random=True)
    backend = sweep.make_backend(run.profile)
    workload = make_workload(run, backend.limits, data)
    watches: list[Watch] = []
    build = sim_backend.SimBackend._engine

    def engine(self: Any, *args: Any) -> Any:
        made = build(self, *args)
        watches.append(Watch(made.scheduler))
        return made

    sim_backend.SimBackend._engine = engine  # type: ignore[method-assign, assignment]
    try:
        backend.run(workload, parse_scheduler(scheduler_of(run)), _SLO)
    finally:
        sim_backend.SimBackend._engine = build  # type: ignore[method-assign]
    estimate, wait = np.array(watches[0].pairs).T
    ratio = np.log(estimate / np.maximum(wait, 1e-3))
    return [
        f"{run.profile}, {run.dataset}, {run.rate_per_s:g}/s",
        run.scheduler,
        str(len(wait)),
        f"{np.median(wait):.3g}",
        f"{np.median(estimate):.3g}",
        f"{np.exp(np.median(ratio)):.2f}",
        f"{np.exp(np.median(np.abs(ratio))):.2f}",
        f"{spearmanr(estimate, wait).statistic:.2f}",
    ]


def waits(setup: Setup) -> Outcome:
    """Estimated against real waits."""
    head = ["setup", "scheduler", "waits", "median wait, s", "median estimate, s",
            "estimate / wait", "off by a factor of", "rank correlation"]  # fmt: skip
    return Outcome([], markdown(head, [watch(run, setup.data) for run in _RUNS]))
