"""SLO-aware scheduling for vLLM: `vllm serve MODEL --scheduler-cls sola_sched.Scheduler`.

Importing this package imports neither vLLM nor torch; the names below load on first use.

One word for one thing, in names as in sentences; a policy's own terms are in the head of its
package:

- *step*: one pass of the model over a batch of requests.
- *plan*: what a policy decides of one step.
- *prefill*: the part of a request that computes its prompt.
- *decode*: the part of a request that makes its output, a token a step.
- *chunk*: the prompt tokens that one step computes.
- *slot*: a place among the requests that run at once (`--max-num-seqs`).
- *block*: a piece of the accelerator's memory for keys and values (KV) of some tokens.
- *waiting*: without a slot. *Running*: with one.
- *held*: running, but left out of one step; it keeps its slot and its KV.
- *shown*: of those waiting, what a plan lets the engine see for one step.
- *parked*: waiting for something that no plan can give, such as its next input.
- *preempted*: deprived of slot and KV; it waits again.
- *swapped*: preempted, with its KV kept in host memory as a *copy*.
- *rejected*: ended with an error before any work was done for it.
- *in flight*: scheduled, and its outcome not known yet.
- *target*: a time that a request is to meet: TTFT, TPOT, or that of its whole answer.
- *lost*: unable to meet a target any more, whatever is done.
- *class*: requests of one name that have targets in common.
- *share*: the part of the engine's time that is guaranteed to a class.
- *turn*: the time in which one of several engines has their common GPU.
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
    "EngineLimits": "sola_sched.core.state",
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
    from sola_sched.core.state import EngineLimits, StepPlan, StepState
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
