"""The per-step optimization: `make_planner(config).plan(StepState) -> StepPlan`.

May import: errors, config, cost, core.
Third party: numpy, scipy, numba (attain*).
"""

from __future__ import annotations

from collections.abc import Callable

from sola_sched.config.sola_config import SolaConfig
from sola_sched.planner.alise import AlisePlanner
from sola_sched.planner.attain import AttainPlanner
from sola_sched.planner.base import Planner
from sola_sched.planner.doubling import DoublingPlanner
from sola_sched.planner.paper import PaperPlanner
from sola_sched.planner.passes import pass_through

__all__ = [
    "AlisePlanner",
    "AttainPlanner",
    "DoublingPlanner",
    "PaperPlanner",
    "Planner",
    "make_planner",
    "pass_through",
]


_PLANNERS: dict[str, Callable[[SolaConfig], Planner]] = {
    "alise": AlisePlanner,
    "attain": AttainPlanner,
    "doubling": DoublingPlanner,
    "paper": PaperPlanner,
}


def make_planner(config: SolaConfig) -> Planner:
    """The planner of `config.policy`; it keeps the little state that spans steps."""
    return _PLANNERS[config.policy](config)
