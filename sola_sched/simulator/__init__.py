"""Virtual-time simulation of a real vLLM scheduler; vLLM loads on first use of the engine.

May import: errors, config, compiled, cost, prediction, core, planner, reports, cluster, kv_swap,
length_predictor, vllm_adapter, colocation.
Third party: numpy, scipy, vllm.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "LLAMA_3_8B_A100": "sola_sched.simulator.steps.time",
    "LLAMA_3_8B_A100_NUM_BLOCKS": "sola_sched.simulator.steps.time",
    "MeasuredStepTime": "sola_sched.simulator.steps.time",
    "RequestRecord": "sola_sched.simulator.request",
    "SchedulerStallError": "sola_sched.simulator.engine",
    "StepProfile": "sola_sched.simulator.steps.profile",
    "StepTimeModel": "sola_sched.simulator.steps.time",
    "StepTrace": "sola_sched.simulator.engine",
    "VirtualClock": "sola_sched.simulator.engine",
    "VirtualEngine": "sola_sched.simulator.engine",
    "VirtualRequest": "sola_sched.simulator.request",
    "load_step_profile": "sola_sched.simulator.steps.profile",
    "profile_names": "sola_sched.simulator.steps.profile",
}
__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from sola_sched.simulator.engine import (
        SchedulerStallError,
        StepTrace,
        VirtualClock,
        VirtualEngine,
    )
    from sola_sched.simulator.request import RequestRecord, VirtualRequest
    from sola_sched.simulator.steps.profile import StepProfile, load_step_profile, profile_names
    from sola_sched.simulator.steps.time import (
        LLAMA_3_8B_A100,
        LLAMA_3_8B_A100_NUM_BLOCKS,
        MeasuredStepTime,
        StepTimeModel,
    )


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'sola_sched.simulator' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
