"""The per-step optimization: `make_planner(config).plan(StepState) -> StepPlan`.

May import: errors, config, compiled, cost, core, prediction.
Third party: numpy, scipy.
"""

from __future__ import annotations

from sola_sched.config.policies import is_built_in, policy_class
from sola_sched.config.sola_config import SolaConfig
from sola_sched.planner.alise import AlisePlanner
from sola_sched.planner.attain import AttainPlanner
from sola_sched.planner.base import Planner
from sola_sched.planner.checked import CheckedPlanner
from sola_sched.planner.doubling import DoublingPlanner
from sola_sched.planner.paper import PaperPlanner
from sola_sched.planner.passes import pass_through

__all__ = [
    "AlisePlanner",
    "AttainPlanner",
    "CheckedPlanner",
    "DoublingPlanner",
    "PaperPlanner",
    "Planner",
    "make_planner",
    "pass_through",
]


def make_planner(config: SolaConfig) -> Planner:
    """The planner of `config.policy`; it keeps the little state that spans steps.

    What a policy of others plans is checked at every step; see `CheckedPlanner`.
    """
    planner: Planner = policy_class(config.policy)(config)
    return planner if is_built_in(config.policy) else CheckedPlanner(planner, config.policy)
