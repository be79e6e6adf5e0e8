"""Rejecting requests that a plan gives up: they end with an error before any work is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from sola_sched.reports.refusals import Refusal

if TYPE_CHECKING:
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin


class Rejecting:
    """Ends waiting requests, and answers them with the output of the next step.

    Args:
        scheduler: Whose requests they are.

    Attributes:
        is_rejecting: vLLM is ending a request because it is rejected.
        unanswered: Those whose clients have not been told.
    """

    def __init__(self, scheduler: SolaSchedulerMixin) -> None:
        self._scheduler = scheduler
        self.is_rejecting = False
        self.unanswered: list[Request] = []

    def reject(self, requests: Iterable[Request]) -> None:
        """End those that wait."""
        scheduler, table = self._scheduler, self._scheduler.sola_monitor.table
        for request in list(requests):
            if request in scheduler.waiting:
                refusal = Refusal.of_row(table, table.row_of[request.request_id])
                request.stop_reason = refusal.to_stop_reason()
                self.unanswered.append(request)  # before anything can fail: it must be answered
                self.is_rejecting = True
                try:
                    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR)
                finally:
                    self.is_rejecting = False

    def answer(self, outputs: Any) -> None:
        """Add the answers to a step's outputs: each stream ends with finish reason "error"."""
        while self.unanswered:
            request = self.unanswered[0]
            if request.is_finished():  # else it could not be rejected, and goes on
                answer = EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=request.stop_reason,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
                group = outputs.setdefault(request.client_index, EngineCoreOutputs())
                group.outputs.append(answer)
            del self.unanswered[0]
