"""The per-step optimization: `make_planner(config).plan(StepState) -> StepPlan`."""

from __future__ import annotations

from sola_sched.config import SolaConfig
from sola_sched.planner.attain import AttainPlanner
from sola_sched.planner.base import Planner
from sola_sched.planner.paper import PaperPlanner

__all__ = ["AttainPlanner", "PaperPlanner", "Planner", "make_planner"]


def make_planner(config: SolaConfig) -> Planner:
    """The planner of `config.policy`; it keeps the little state that spans steps."""
    return PaperPlanner(config) if config.policy == "paper" else AttainPlanner(config)
