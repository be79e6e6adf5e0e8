"""Streaming sessions whose KV is taken while the last token of their turn is in flight.

A request that is preempted still gets the tokens that were in flight. If one of them ends the turn
of a session, vLLM keeps of its history what is computed, which is nothing then, and takes the
session out of all queues. Here it keeps its history, and its place: it waits for its next input,
or with it, and what was computed is computed again, or comes back from the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from sola_sched.vllm_adapter.versions import WAITS_FOR_INPUT, Seams

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    _Host: type[Any] = AsyncScheduler
else:
    _Host = object


class SessionsMixin(_Host):
    """Keeps sessions whole. Goes behind the mix-in that books what they do."""

    _seams: Seams

    def _start_sessions(self) -> None:
        """Call once, before the first request."""
        #: By name, sessions between two turns that have no KV: what they count as computed is
        #: what they keep, and will have to compute.
        self._without_kv: dict[str, Request] = {}
        self._to_place: list[Request] = []  # those that vLLM takes out of all queues

    def _handle_stopped_request(self, request: Request) -> bool:
        # One that has a token has computed some: it was preempted since the step was scheduled.
        if request.resumable and not request.num_computed_tokens:
            self._keep_displaced(request)
        return bool(super()._handle_stopped_request(request))

    def _keep_displaced(self, session: Request) -> None:
        self._to_place.append(session)
        self._without_kv[session.request_id] = session
        # As if it had run on: all its tokens but the last one, which vLLM leaves out anyway.
        session.num_computed_tokens = session.num_tokens - 1
        session.drop_stale_output = True  # what else is in flight is not of its next turn
        self._seams.take_out(session)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        is_displaced = self._without_kv.pop(session.request_id, None) is session
        is_parked = session.status.name == WAITS_FOR_INPUT
        super()._update_request_as_session(session, update)
        if not is_displaced:
            return
        session.num_computed_tokens = 0
        # The model's worker has not seen this input: it must get it as a new request's.
        session.num_preemptions = 0
        if is_parked:  # behind all that wait, and not among those that hold KV
            self._seams.take_out(session)
            self._enqueue_waiting_request(session)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._without_kv.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _place_sessions(self) -> None:
        """Give those that vLLM took out a place again. Call after each update."""
        for session in self._to_place:
            is_live = self.requests.get(session.request_id) is session and not session.is_finished()
            if is_live and not self._seams.is_waiting(session):
                self._enqueue_waiting_request(session)
        self._to_place.clear()
