"""Streaming sessions whose KV is taken while the last token of their turn is in flight.

A request that is preempted still gets the tokens that were in flight. If one of them ends the turn
of a session, vLLM keeps of its history what is computed, which is nothing then, and takes the
session out of all queues. Here it keeps its history, and its place: it waits for its next input,
or with it, and what was computed is computed again, or comes back from the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import Request

from sola_sched.vllm_adapter.versions import Seams

if TYPE_CHECKING:
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin


class Sessions:
    """Keeps sessions whole. It touches none but those that are preempted amid a turn.

    Args:
        scheduler: Whose sessions they are.
        seams: Of the same scheduler.

    Attributes:
        without_kv: By name, sessions between two turns that have no KV: what they count as
            computed is what they keep, and will have to compute.
        to_place: Those that vLLM takes out of all queues, until `place`.
    """

    def __init__(self, scheduler: SolaSchedulerMixin, seams: Seams) -> None:
        self._scheduler, self._seams = scheduler, seams
        self.without_kv: dict[str, Request] = {}
        self.to_place: list[Request] = []

    def stopped(self, session: Request) -> None:
        """A preempted session gets the last token of a turn. Call before vLLM handles that."""
        self.to_place.append(session)
        self.without_kv[session.request_id] = session
        # As if it had run on: all its tokens but the last one, which vLLM leaves out anyway.
        session.num_computed_tokens = session.num_tokens - 1
        session.drop_stale_output = True  # what else is in flight is not of its next turn
        self._seams.take_out(session)

    def continued(self, session: Request, was_parked: bool) -> None:
        """vLLM has given a session its next input; whether it had waited for that."""
        if self.without_kv.pop(session.request_id, None) is not session:
            return
        session.num_computed_tokens = 0
        # The model's worker has not seen this input: it must get it as a new request's.
        session.num_preemptions = 0
        if was_parked:  # behind all that wait, and not among those that hold KV
            self._seams.take_out(session)
            self._scheduler._enqueue_waiting_request(session)

    def ended(self, request: Request) -> None:
        """A request has ended."""
        self.without_kv.pop(request.request_id, None)

    def place(self) -> None:
        """Give those that vLLM took out a place again. Call after each update."""
        requests = self._scheduler.requests
        for session in self.to_place:
            is_live = requests.get(session.request_id) is session and not session.is_finished()
            if is_live and not self._seams.is_waiting(session):
                self._scheduler._enqueue_waiting_request(session)
        self.to_place.clear()
