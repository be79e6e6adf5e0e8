"""SLO-aware scheduling for vLLM: `vllm serve MODEL --scheduler-cls sola_sched.Scheduler`.

Importing this package imports neither vLLM nor torch; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "CostModel": "sola_sched.cost_model",
    "LengthPrediction": "sola_sched.prediction",
    "Scheduler": "sola_sched.scheduler",
    "SolaConfig": "sola_sched.config",
    "SolaSchedulerMixin": "sola_sched.scheduler",
    "SloTarget": "sola_sched.slo",
    "StateMonitor": "sola_sched.monitor",
    "StepPlan": "sola_sched.state",
    "StepState": "sola_sched.state",
    "make_planner": "sola_sched.planner",
}
__all__ = ["__version__", *sorted(_EXPORTS)]

if TYPE_CHECKING:
    from sola_sched.config import SolaConfig
    from sola_sched.cost_model import CostModel
    from sola_sched.monitor import StateMonitor
    from sola_sched.planner import make_planner
    from sola_sched.prediction import LengthPrediction
    from sola_sched.scheduler import Scheduler, SolaSchedulerMixin
    from sola_sched.slo import SloTarget
    from sola_sched.state import StepPlan, StepState


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'sola_sched' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
