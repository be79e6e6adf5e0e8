"""Prefills that a plan has chosen and vLLM puts off: nobody is held for them meanwhile.

vLLM gives a prefill no tokens whose image finds no room in the encoder cache, for instance, or
whose encoder output is on its way. A plan knows nothing of that. If it held the very prefill that
has the room, both would wait for as long as plans are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sola_sched.core.state import PREFILL, IntArray, RequestTable, StepPlan, StepState
from sola_sched.vllm_adapter.versions import Seams

#: Plans until it is tried again whether vLLM gives such a prefill tokens.
RETRY_PLANS = 8


class PutOff:
    """Remembers which prefills got no tokens although their step had some left.

    Args:
        seams: Of vLLM's scheduler.
    """

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._num_plans = 0
        # By name: the plan at which to try again, and the room in the encoder cache until then.
        self._names: dict[str, tuple[int, int]] = {}

    def with_held(self, state: StepState, plan: StepPlan) -> StepPlan:
        """The plan in which running prefills are not held for the sake of one that is put off.

        They come last, so what is left of the step is theirs if vLLM does not put that one off.
        """
        self._num_plans += 1
        if not self._names:
            return plan
        room = self._seams.encoder_room()
        for name, (until, room_then) in list(self._names.items()):
            if self._num_plans >= until or room > room_then:
                del self._names[name]
        if plan.run is None:
            return plan
        waiting = state.waiting if plan.admit is None else plan.admit
        if not self._is_among(np.concatenate([plan.run, waiting]), state.table):
            return plan
        running = state.running
        is_held = (state.table.phase[running] == PREFILL) & ~np.isin(running, plan.run)
        held = running[is_held & ~np.isin(running, plan.preempt)]
        num_tokens = state.max_num_tokens if plan.token_budget is None else plan.token_budget
        num_blocks = -(-num_tokens // state.block_size) + len(plan.run) + len(held)
        if not len(held) or num_blocks > state.num_free_blocks:
            return plan
        return dataclasses.replace(plan, run=np.concatenate([plan.run, held]))

    def _is_among(self, rows: IntArray, table: RequestTable) -> bool:
        put_off = [table.row_of[name] for name in self._names if name in table.row_of]
        return bool(np.isin(put_off, rows).any())

    def scheduled(
        self,
        table: RequestTable,
        plan: StepPlan,
        output: Any,
        *,
        num_left: int,
        offered: Sequence[Any],
    ) -> None:
        """vLLM has scheduled a step in which requests were held.

        Args:
            table: As it was before the step.
            plan: What was carried out.
            output: vLLM's.
            num_left: Tokens that the step had left.
            offered: Waiting requests that vLLM was shown, in order.
        """
        if num_left <= 0 or plan.run is None or getattr(output, "preempted_req_ids", None):
            return
        there = output.num_scheduled_tokens
        prefills = plan.run[table.phase[plan.run] == PREFILL].tolist()
        names = [name for row in prefills if (name := table.req_id[row]) and name not in there]
        # vLLM ends its scan at the first that it cannot start.
        waiting = (request.request_id for request in offered)
        first = next((name for name in waiting if name not in there), None)
        for name in names if first is None else (*names, first):
            self._names[name] = (self._num_plans + RETRY_PLANS, self._seams.encoder_room())
