"""`policy="alise"`: the shortest remaining time first, in preemptive priority levels; no SLOs.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1.
"""

from __future__ import annotations

from sola_sched.config.policies import PolicyTraits
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import BoolArray, IntArray, StepState
from sola_sched.planner.alise_step import AliseStep
from sola_sched.planner.levels import PriorityLevels
from sola_sched.planner.preemptive import PreemptivePlanner


class AlisePlanner(PreemptivePlanner):
    """Serves the requests with the least remaining execution time first.

    Each step:

    1. *Remaining time* of every request, from its predicted length (`StepState.remaining`) and
       the step-time model (`ExecutionTime`); *levels* of doubling length from that, lifted by
       aging (`PriorityLevels`). Within a level what runs goes on, then the shorter goes first.
    2. *Who holds KV?* Requests are admitted in that order while slots and blocks last. One that
       finds none displaces running requests of lower levels, the last ones first, if that
       saves more than it costs to compute their KV again, even if they end as early as one in
       twenty does, and while no more than a tenth of the engine's time goes into that.
    3. *Who takes part?* All decodes: leaving one out of a batch saves little of its step. But those
       of lower classes leave their tokens to prompts of a higher one. Prefills in order of level up
       to the length of the chunk; a started prefill beyond it is held.

    Departures from the paper, which has no chunked prefill and swaps every displaced KV: a chunk is
    kept short, since it delays all decodes, most of which have less to do than the request that
    starts; a running request gives up its KV only when somebody needs the room, and where no
    connector swaps it, it is computed again.

    Args:
        config: `levels`, `aging_s` and `overload` are used. With ``reject``, a request whose
            estimated wait exceeds its TTFT target is refused before it starts.
    """

    traits = PolicyTraits(
        options=("levels", "aging_s", "overload"), goes_by_targets=False, gives_shares=True
    )

    def __init__(self, config: SolaConfig) -> None:
        super().__init__(config)
        self.levels = PriorityLevels(config.levels, config.aging_seconds)

    def _step(self, state: StepState, rows: IntArray, took_part: BoolArray) -> AliseStep:
        return AliseStep(state, rows, self.levels, took_part, self._batch, self._again)
