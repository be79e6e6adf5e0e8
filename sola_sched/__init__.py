"""SLO-aware scheduling for vLLM: `vllm serve MODEL --scheduler-cls sola_sched.Scheduler`.

Importing this package imports neither vLLM nor torch; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "CostModel": "sola_sched.cost.model",
    "LengthPrediction": "sola_sched.prediction.length",
    "Scheduler": "sola_sched.vllm_adapter.scheduler",
    "PolicyTraits": "sola_sched.config.policies",
    "SolaConfig": "sola_sched.config.sola_config",
    "SolaSchedulerMixin": "sola_sched.vllm_adapter.scheduler",
    "SloTarget": "sola_sched.config.slo",
    "StateMonitor": "sola_sched.core.monitor",
    "StepPlan": "sola_sched.core.state",
    "StepState": "sola_sched.core.state",
    "make_planner": "sola_sched.planner",
}
__all__ = ["__version__", *sorted(_EXPORTS)]

if TYPE_CHECKING:
    from sola_sched.config.policies import PolicyTraits
    from sola_sched.config.slo import SloTarget
    from sola_sched.config.sola_config import SolaConfig
    from sola_sched.core.monitor import StateMonitor
    from sola_sched.core.state import StepPlan, StepState
    from sola_sched.cost.model import CostModel
    from sola_sched.planner import make_planner
    from sola_sched.prediction.length import LengthPrediction
    from sola_sched.vllm_adapter.scheduler import Scheduler, SolaSchedulerMixin


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'sola_sched' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
