"""Keeping the state: what vLLM does with its requests, told to the `StateMonitor`.

The scheduler's hooks call `Booking` before or after vLLM's own methods. Whatever fails in it stops
at the guard.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from sola_sched.core.live import LiveRequest
from sola_sched.core.running_rows import RunningRows
from sola_sched.core.state import DECODE, PREFILL
from sola_sched.vllm_adapter.versions import WAITS_FOR_INPUT, Seams

if TYPE_CHECKING:
    from sola_sched.reports.log import IntervalLog
    from sola_sched.vllm_adapter.requests.arrival_times import ArrivalTimes
    from sola_sched.vllm_adapter.requests.prefix_lookups import PrefixLookups
    from sola_sched.vllm_adapter.requests.targets import Targets
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin

_id_of = operator.attrgetter("request_id")
_tokens_of = operator.attrgetter("new_token_ids")
#: How requests end with a complete answer, and how by an error of the engine.
_BY_ITSELF = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)
_FAILED = (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)


class Booking:
    """Books arrivals, steps and ends.

    Args:
        scheduler: Whose requests they are. Its monitor is told, and its guard where that fails.
        seams: Of the same scheduler.
        arrivals: When requests arrived.
        targets: Their classes and targets.
        lookups: What they find in the prefix cache; None where nothing is cached.
        interval_log: Its first interval begins with the first request.
        honours_priority: Whether vLLM goes by their priorities.

    Attributes:
        rows: Rows of vLLM's `running`.
        num_in_flight: Steps that are scheduled and not yet updated.
        is_updating: vLLM is updating its requests from a step's output.
    """

    def __init__(
        self,
        scheduler: SolaSchedulerMixin,
        seams: Seams,
        *,
        arrivals: ArrivalTimes,
        targets: Targets,
        lookups: PrefixLookups | None,
        interval_log: IntervalLog,
        honours_priority: bool,
    ) -> None:
        self._scheduler, self._seams = scheduler, seams
        self._monitor, self._guard = scheduler.sola_monitor, scheduler.sola_guard
        self._arrivals, self._targets, self._lookups = arrivals, targets, lookups
        self._interval_log, self._honours_priority = interval_log, honours_priority
        self._has_drafts = bool(scheduler.num_spec_tokens)
        self._answered: WeakSet[Request] = WeakSet()  # sessions that wait for their next input
        self._admissions: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._num_admissions = 0
        self.num_in_flight = 0
        self.is_updating = False
        self.forget_rows()

    def forget_rows(self) -> None:
        """Start over with the rows of the monitor's present table."""
        self.rows: RunningRows[Request] = RunningRows(self._monitor.table.row_of)
        # Of the update under way, whose tokens are booked first.
        self._ended: list[tuple[str, RequestStatus]] = []
        self._continued: list[Request] = []

    def as_known(self, request: Request, holds_slot: bool) -> LiveRequest:
        """What vLLM knows of a request, for a state that is built anew."""
        slo_class, slo = self._targets.of(request)
        return LiveRequest(
            req_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=max(1, request.max_tokens),
            slo=slo,
            slo_class=slo_class,
            arrival_s=self._arrivals.of(request),
            priority=request.priority if self._honours_priority else 0,
            holds_slot=holds_slot,
            num_computed=request.num_computed_tokens or self._seams.num_awaited_tokens(request),
            num_tokens=request.num_tokens + request.num_output_placeholders,
            num_output=request.num_output_tokens,
            num_in_flight=request.num_output_placeholders,
            num_preemptions=request.num_preemptions,
        )

    # Requests -------------------------------------------------------------------------------

    def received(self, request: Request) -> None:
        """A request has come, or the next input of a session."""
        session = self._scheduler.requests.get(request.request_id)
        if session is None:
            self._guard.book("booking an arrival", self._arrived, request)
        else:
            note = self._arrivals.note_input
            self._guard.book("booking the next input of a session", note, session, request)

    def _arrived(self, request: Request) -> None:
        slo_class, slo = self._targets.of(request)
        arrival_s = self._arrivals.of(request)
        self._interval_log.begin(arrival_s)
        num_cached = request.num_computed_tokens or self._seams.num_awaited_tokens(request)
        if self._lookups is not None:
            num_cached = max(num_cached, self._lookups.arrived(request))
        self._monitor.add(
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=max(1, request.max_tokens),
            slo=slo,
            slo_class=slo_class,
            arrival_s=arrival_s,
            priority=request.priority if self._honours_priority else 0,
            num_cached_tokens=num_cached,
        )
        predictions = self._scheduler.sola_predictions
        if predictions is not None:
            predictions.submit(request.request_id, request.prompt_token_ids)

    def goes_back(self, request: Request) -> None:
        """A request goes back to wait. Call before vLLM puts it into a queue."""
        self._guard.book("booking a request that goes back to wait", self._gone_back, request)

    def _gone_back(self, request: Request) -> None:
        table = self._monitor.table
        row = table.row_of.get(request.request_id)
        # A streaming session goes back for its next input, which may be there already.
        if request.status.name == WAITS_FOR_INPUT:
            self._answered.add(request)
        if row is not None and table.phase[row] == DECODE:
            self.rows.left(row)
            self._monitor.requeued(row, num_tokens=request.num_tokens, at_front=False)

    def continued(self, session: Request) -> None:
        """vLLM has given a session its next input."""
        self._answered.discard(session)
        self._arrivals.begin_input(session)
        if not self.is_updating:
            self._guard.book("booking the next input of a session", self._goes_on, session)
        elif not self._guard.is_lost:  # the last tokens of its last answer come first
            self._continued.append(session)

    def _goes_on(self, session: Request) -> None:
        """A session has its next input: a request of its own, with times of its own."""
        name, table = session.request_id, self._monitor.table
        predictions = self._scheduler.sola_predictions
        if predictions is not None:
            row = table.row_of[name]
            num_output = int(table.num_output[row])
            is_cut = num_output >= table.max_tokens[row]
            predictions.ended(name, num_output, is_cut=is_cut)
        self._book_end(name, RequestStatus.FINISHED_STOPPED)
        self._arrived(session)

    def preempted(self, request: Request) -> None:
        """vLLM has preempted a request."""
        self._guard.book("booking a preemption", self._preempted, request)

    def _preempted(self, request: Request) -> None:
        row = self._monitor.table.row_of[request.request_id]
        self.rows.left(row)
        self._monitor.requeued(row, num_tokens=request.num_tokens, at_front=True)

    def ended(self, request: Request, *, is_rejected: bool) -> None:
        """A request has ended, in whatever way. Call before vLLM forgets it."""
        self._guard.book("booking the end of a request", self._has_ended, request, is_rejected)

    def _has_ended(self, request: Request, is_rejected: bool) -> None:
        self.rows.left(self._monitor.table.row_of[request.request_id])
        if self._lookups is not None:
            self._lookups.ended(request.request_id)
        status = request.status
        is_cut = status == RequestStatus.FINISHED_LENGTH_CAPPED
        if request in self._answered:  # a session ends: its last answer is whole
            status = RequestStatus.FINISHED_STOPPED
            is_cut = request.num_output_tokens >= request.max_tokens
        if self.is_updating:  # its last tokens come first
            self._ended.append((request.request_id, status))
        else:
            self._book_end(request.request_id, status, is_rejected)
        predictions = self._scheduler.sola_predictions
        if predictions is not None:
            num_output = request.num_output_tokens if status in _BY_ITSELF else 0
            predictions.ended(request.request_id, num_output, is_cut=is_cut)

    def _book_end(self, req_id: str, status: RequestStatus, is_rejected: bool = False) -> None:
        self._monitor.finished(
            req_id,
            by_itself=status in _BY_ITSELF,
            rejected=is_rejected,
            failed=status in _FAILED,
        )

    # Steps ----------------------------------------------------------------------------------

    def scheduled(self, output: Any, num_held: int) -> None:
        """A step has been scheduled, in which so many of `running`, its last ones, were held."""
        self._guard.book("booking a step", self._record, output, num_held)
        self.num_in_flight += 1

    def _record(self, output: Any, num_held: int) -> None:
        self._arrivals.step()
        monitor, rows, running = self._monitor, self.rows, self._scheduler.running
        table = monitor.table
        scheduled = output.num_scheduled_tokens
        num_running = len(running) - num_held
        all_run = len(scheduled) == num_running  # as nearly always: in the order of `running`
        decodes = rows.known
        new = rows.take_new(running, num_running) if all_run else None
        if new is not None and table.num_in_phase[DECODE] == len(running) - len(new):
            prefills = new
        else:
            if all_run:
                of_step = rows.of(running)[:num_running]
            else:
                looked_up = map(table.row_of.__getitem__, scheduled)
                of_step = np.fromiter(looked_up, np.int64, len(scheduled))
            is_decode = table.phase[of_step] == DECODE
            decodes, prefills = of_step[is_decode], of_step[~is_decode].tolist()
        tokens = []
        for row in prefills:
            name = table.req_id[row]
            tokens.append(scheduled[name])
            if table.phase[row] != PREFILL:
                request = self._scheduler.requests[name]
                self._num_admissions += 1
                self._admissions[request] = self._num_admissions
                monitor.admitted(
                    row,
                    num_computed=request.num_computed_tokens - scheduled[name],
                    prefill_target=request.num_tokens,
                )
        monitor.scheduled(decodes, prefills, tokens)

    def admission_of(self, request: Request) -> int:
        """Counts up from one that got a slot to the next; 0 where the step was not booked."""
        return self._admissions.get(request, 0)

    def updated(self, outputs: Any) -> None:
        """vLLM has updated its requests from the output of the oldest step in flight."""
        self._guard.book("booking the outcome of a step", self._learn, outputs)

    def _learn(self, outputs: Any) -> None:
        """Book the tokens and the ends of that step."""
        monitor, num_outputs, are_whole = self._monitor, 0, not self._has_drafts
        for group in outputs.values():
            num_outputs += len(group.outputs)
        for _, status in self._ended:
            are_whole = are_whole and status in _BY_ITSELF
        if are_whole and num_outputs == monitor.num_expected:
            monitor.completed()
        else:
            answers = [out for group in outputs.values() for out in group.outputs]
            answers = [out for out in answers if out.new_token_ids]
            rows = map(monitor.table.row_of.__getitem__, map(_id_of, answers))
            tokens = map(len, map(_tokens_of, answers))
            monitor.completed(
                np.fromiter(rows, np.int64, len(answers)),
                np.fromiter(tokens, np.int64, len(answers)),
            )
        for name, status in self._ended:
            self._book_end(name, status)
        self._ended.clear()
        for session in self._continued:
            self._goes_on(session)
        self._continued.clear()
        scheduler = self._scheduler
        is_sure = scheduler.running and scheduler._pause_state is PauseState.UNPAUSED
        monitor.set_busy(bool(is_sure) or scheduler.has_requests())

    def loads_failed(self) -> None:
        """KV of running requests could not be loaded: they have computed less than before."""
        self._guard.book("booking a failed load", self._set_back)

    def _set_back(self) -> None:
        monitor = self._monitor
        for request in self._scheduler.running:
            num_tokens = request.num_tokens + request.num_output_placeholders
            if num_tokens - request.num_computed_tokens > 1:
                monitor.set_back(
                    monitor.table.row_of[request.request_id],
                    num_computed=request.num_computed_tokens,
                    prefill_target=num_tokens,
                )

    def has_no_requests(self) -> None:
        """What passes until the next step is scheduled is not its time."""
        self._guard.book("booking idle time", self._note_idle)

    def _note_idle(self) -> None:
        self._monitor.set_busy(False)
        running = self._scheduler.running
        if not running:  # those that ended are kept no longer
            self.rows.of(running)


def tells_of_failed_loads(model_runner_output: Any) -> bool:
    """Whether the output of a step says that KV could not be loaded."""
    copies = getattr(model_runner_output, "kv_connector_output", None)
    return bool(getattr(copies, "invalid_block_ids", None))
