"""Keeping the state: what vLLM does with its requests, told to the `StateMonitor`.

A mix-in around vLLM's own methods. Whatever fails here stops at the scheduler's boundary.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from sola_sched.config.slo import CLASS_KEY, DEFAULT_CLASS, SloTarget, history, request_target
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.arrivals import ArrivalClock
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.running_rows import RunningRows
from sola_sched.core.state import DECODE, PREFILL
from sola_sched.errors import SloError
from sola_sched.length_predictor.client import PredictionClient
from sola_sched.reports.log import IntervalLog
from sola_sched.vllm_adapter.guard import Guard
from sola_sched.vllm_adapter.prefix_lookups import PrefixLookups
from sola_sched.vllm_adapter.versions import WAITS_FOR_INPUT, Seams

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    _Host: type[Any] = AsyncScheduler
else:
    _Host = object

logger = init_logger("vllm.sola_sched")

_id_of = operator.attrgetter("request_id")
_tokens_of = operator.attrgetter("new_token_ids")
#: How requests end with a complete answer, and how by an error of the engine.
_BY_ITSELF = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)
_FAILED = (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)


class BookingMixin(_Host):
    """Books arrivals, steps and ends."""

    running: list[Request]
    sola_clock: Callable[[], float]
    sola_wall_clock: Callable[[], float]
    sola_config: SolaConfig
    sola_guard: Guard
    sola_monitor: StateMonitor
    sola_predictions: PredictionClient | None
    _lookups: PrefixLookups
    _seams: Seams
    _counts: dict[str, int]
    _interval_log: IntervalLog
    _honours_priority: bool
    _is_rejecting: bool
    _num_hidden: int
    _tokens_per_decode: int

    def _start_booking(self) -> None:
        """Call once, when the monitor is there."""
        self._forget_rows()
        self._is_updating = False
        self._arrivals = ArrivalClock()
        self._arrived_s: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._inputs_s: WeakKeyDictionary[Request, deque[float]] = WeakKeyDictionary()
        self._answered: WeakSet[Request] = WeakSet()  # sessions that wait for their next input
        self._base_service = self.vllm_config.model_config.served_model_name
        self._strangers: set[str] = set()  # adapters without a class, which the log has named

    def _forget_rows(self) -> None:
        """Start over with the rows of the monitor's present table."""
        self._rows: RunningRows[Request] = RunningRows(self.sola_monitor.table.row_of)
        self._ended: list[tuple[str, RequestStatus]] = []
        self._continued: list[Request] = []

    def add_request(self, request: Request) -> None:
        session = self.requests.get(request.request_id)
        if session is None:
            self._book("booking an arrival", self._arrived, request)
        else:
            self._book("booking the next input of a session", self._received, session, request)
        super().add_request(request)

    def _book(self, doing: str, action: Callable[..., None], *args: Any) -> None:
        """Let the state follow an event of the engine; a state that is lost follows nothing."""
        if self.sola_guard.is_lost:
            return
        try:
            action(*args)
        except Exception as error:
            self.sola_guard.failed(doing, error)

    def _arrival_s(self, request: Request) -> float:
        """Its arrival on our clock, as it was found at its receipt."""
        arrival_s = self._arrived_s.get(request)
        if arrival_s is None:
            arrival_s = self._arrived_s[request] = self._find_arrival_s(request)
        return arrival_s

    def _find_arrival_s(self, request: Request) -> float:
        """When one that is received now arrived, on our clock."""
        now_s = self.sola_clock()
        return now_s - self._wait_s(request, now_s) - _waited_before_s(request)

    def _wait_s(self, request: Request, now_s: float) -> float:
        """How long it has waited until now; its stamp is of another process' wall clock."""
        clock = self._arrivals
        if not self.requests:
            clock.look(now_s)
        wall_s, num_before = self.sola_wall_clock(), clock.num_implausible
        wait_s = clock.wait_s(
            request.arrival_time, now_s=now_s, wall_s=wall_s, front_end=request.client_index
        )
        if num_before == 0 < clock.num_implausible:
            logger.warning(
                "%s: its arrival time must be at most about a second before its receipt (it is "
                "%.3f s by this engine's wall clock): such requests count from their receipt, "
                "later ones by the same difference. Synchronize the clocks of the machines.",
                request.request_id,
                wall_s - request.arrival_time,
            )
        return wait_s

    def _arrived(self, request: Request) -> None:
        slo_class, slo = self._slo_of(request)
        arrival_s = self._arrival_s(request)
        self._interval_log.begin(arrival_s)
        num_cached = request.num_computed_tokens
        if self._seams.caches_prefixes:
            num_cached = max(num_cached, self._lookups.arrived(request))
        self.sola_monitor.add(
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=max(1, request.max_tokens),
            slo=slo,
            slo_class=slo_class,
            arrival_s=arrival_s,
            priority=request.priority if self._honours_priority else 0,
            num_cached_tokens=num_cached,
        )
        if self.sola_predictions is not None:
            self.sola_predictions.submit(request.request_id, request.prompt_token_ids)

    def _slo_of(self, request: Request) -> tuple[str, SloTarget]:
        """Name of its SLO class, and its targets."""
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        service, default = self._service_of(request)
        try:
            target = request_target(extra_args, default, self.sola_config.classes)
        except SloError as error:  # the front end refuses these unless the plug-in is off
            self._counts["num_invalid_slo"] += 1
            if self._counts["num_invalid_slo"] == 1:
                logger.warning("%s: using the default SLO instead. %s", request.request_id, error)
            return service, default
        return (extra_args or {}).get(CLASS_KEY) or service, target

    def _service_of(self, request: Request) -> tuple[str, SloTarget]:
        """The class of its adapter's or model's name, and its targets, whatever it says."""
        classes = self.sola_config.classes
        if request.lora_request is None:
            name = self._base_service
        else:
            name = request.lora_request.lora_name
            if classes and name not in classes and name not in self._strangers:
                self._strangers.add(name)
                logger.info(
                    "sola_sched: adapter %r has no class in 'classes': its requests that name "
                    "none have the default targets and no share",
                    name,
                )
        if name in classes:
            return name, classes[name]
        return DEFAULT_CLASS, self._default_slo

    def _enqueue_waiting_request(self, request: Request) -> None:
        self._book("booking a request that goes back to wait", self._paused, request)
        super()._enqueue_waiting_request(request)

    def _paused(self, request: Request) -> None:
        row = self.sola_monitor.table.row_of.get(request.request_id)
        # A streaming session goes back for its next input, which may be there already.
        if request.status.name == WAITS_FOR_INPUT:
            self._answered.add(request)
        if row is not None and self.sola_monitor.table.phase[row] == DECODE:
            self._rows.left(row)
            self.sola_monitor.requeued(row, num_tokens=request.num_tokens, at_front=False)

    def _received(self, session: Request, following: Request) -> None:
        """The next input of a session has come; it may have to wait for an answer to end."""
        self._inputs_s.setdefault(session, deque()).append(self._find_arrival_s(following))

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        super()._update_request_as_session(session, update)
        self._answered.discard(session)
        inputs_s = self._inputs_s.get(session)
        self._arrived_s[session] = inputs_s.popleft() if inputs_s else self.sola_clock()
        if self._is_updating:  # the last tokens of its last answer are booked after the update
            if not self.sola_guard.is_lost:
                self._continued.append(session)
        else:
            self._book("booking the next input of a session", self._goes_on, session)

    def _goes_on(self, session: Request) -> None:
        """A session has its next input: a request of its own, with times of its own."""
        name, table = session.request_id, self.sola_monitor.table
        if self.sola_predictions is not None:
            row = table.row_of[name]
            num_output = int(table.num_output[row])
            is_cut = num_output >= table.max_tokens[row]
            self.sola_predictions.ended(name, num_output, is_cut=is_cut)
        self._book_end(name, RequestStatus.FINISHED_STOPPED)
        self._arrived(session)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._book("booking a preemption", self._displaced, request)

    def _displaced(self, request: Request) -> None:
        row = self.sola_monitor.table.row_of[request.request_id]
        self._rows.left(row)
        self.sola_monitor.requeued(row, num_tokens=request.num_tokens, at_front=True)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._book("booking the end of a request", self._has_ended, request)
        return super()._free_request(request, *args, **kwargs)

    def _has_ended(self, request: Request) -> None:
        self._rows.left(self.sola_monitor.table.row_of[request.request_id])
        status = request.status
        by_itself = status in _BY_ITSELF
        if request in self._answered:  # a session ends: its last answer is whole
            status = RequestStatus.FINISHED_STOPPED
        if self._is_updating:  # its last tokens are booked after the update
            self._ended.append((request.request_id, status))
        else:
            self._book_end(request.request_id, status)
        if self.sola_predictions is not None:
            self.sola_predictions.ended(
                request.request_id,
                request.num_output_tokens if by_itself else 0,
                is_cut=request.status == RequestStatus.FINISHED_LENGTH_CAPPED,
            )

    def _book_end(self, req_id: str, status: RequestStatus) -> None:
        self.sola_monitor.finished(
            req_id,
            by_itself=status in _BY_ITSELF,
            rejected=self._is_rejecting,
            failed=status in _FAILED,
        )

    def _record(self, output: Any) -> None:
        """Book the step that was just scheduled."""
        self._arrivals.look(self.sola_clock())
        monitor = self.sola_monitor
        table = monitor.table
        scheduled = output.num_scheduled_tokens
        num_running = len(self.running) - self._num_hidden
        all_run = len(scheduled) == num_running  # as nearly always: in the order of `running`
        decodes = self._rows.known
        new = self._rows.take_new(self.running, num_running) if all_run else None
        if new is not None and table.num_in_phase[DECODE] == len(self.running) - len(new):
            prefills = new
        else:
            if all_run:
                rows = self._rows.of(self.running)[:num_running]
            else:
                looked_up = map(table.row_of.__getitem__, scheduled)
                rows = np.fromiter(looked_up, np.int64, len(scheduled))
            is_decode = table.phase[rows] == DECODE
            decodes, prefills = rows[is_decode], rows[~is_decode].tolist()
        tokens = []
        for row in prefills:
            name = table.req_id[row]
            tokens.append(scheduled[name])
            if table.phase[row] != PREFILL:
                request = self.requests[name]
                monitor.admitted(
                    row,
                    num_computed=request.num_computed_tokens - scheduled[name],
                    prefill_target=request.num_tokens,
                )
        monitor.scheduled(decodes, prefills, tokens)

    def _set_back(self) -> None:
        """Follow vLLM where it has lowered what running requests have computed."""
        monitor = self.sola_monitor
        for request in self.running:
            num_tokens = request.num_tokens + request.num_output_placeholders
            if num_tokens - request.num_computed_tokens > 1:
                monitor.set_back(
                    monitor.table.row_of[request.request_id],
                    num_computed=request.num_computed_tokens,
                    prefill_target=num_tokens,
                )

    def _learn(self, outputs: Any) -> None:
        """Book the tokens and the ends of the oldest step in flight."""
        monitor = self.sola_monitor
        if (
            sum(len(group.outputs) for group in outputs.values()) == monitor.num_expected
            and self._tokens_per_decode == 1
            and all(status in _BY_ITSELF for _, status in self._ended)
        ):
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
        self.sola_monitor.set_busy(self.has_requests())


def tells_of_failed_loads(model_runner_output: Any) -> bool:
    copies = getattr(model_runner_output, "kv_connector_output", None)
    return bool(getattr(copies, "invalid_block_ids", None))


def _waited_before_s(request: Request) -> float:
    """How long it has waited elsewhere, as a gateway says."""
    params = request.sampling_params
    try:
        return history(params.extra_args if params is not None else None)[0]
    except SloError:  # the default targets are used then, with a line in the log
        return 0.0
