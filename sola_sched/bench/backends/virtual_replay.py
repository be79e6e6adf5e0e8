"""Hands the requests of a workload to an engine in virtual time, and keeps their records."""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sola_sched.bench.backends.base import OnDone, RunOutcome, extra_args, record_of
from sola_sched.core.metrics import RequestRecord
from sola_sched.simulator.request import RequestRecord as VirtualRecord
from sola_sched.simulator.request import VirtualRequest
from sola_sched.workloads.workload import RequestSpec

if TYPE_CHECKING:
    from sola_sched.simulator.engine import VirtualEngine


class VirtualReplay:
    """The requests of one start after another; records are on the clock of the current start.

    Args:
        engine: Serves them.
        max_concurrency: Requests that the client has in flight at most; None for no limit.
        on_done: Called with each record when its request has ended.
        tells_lengths: Whether the scheduler is told how long each output will be.
    """

    def __init__(
        self,
        engine: VirtualEngine,
        max_concurrency: int | None,
        on_done: OnDone | None,
        tells_lengths: bool,
    ) -> None:
        self._engine = engine
        self._max_in_flight = max_concurrency or math.inf
        self._on_done = on_done
        self._tells_lengths = tells_lengths
        self._start_s = 0.0
        self._max_tokens = 1
        self._pending: deque[tuple[RequestSpec, RequestRecord]] = deque()
        self._live: dict[str, tuple[RequestSpec, RequestRecord]] = {}
        self._followers: dict[str, list[tuple[RequestSpec, RequestRecord]]] = {}

    @property
    def now_s(self) -> float:
        """Time since the start, seconds."""
        return self._engine.clock.now - self._start_s

    def start(
        self, requests: Sequence[RequestSpec], *, on_done: OnDone | None
    ) -> list[RequestRecord]:
        """Begin with these requests; their records are filled while the engine runs."""
        records = [record_of(request) for request in requests]
        self._on_done = on_done
        # A whole second: adding it to arrivals costs no precision that matters.
        self._engine.clock.now = self._start_s = float(math.ceil(self._engine.clock.now))
        self._max_tokens = max((request.output_tokens for request in requests), default=1)
        self._pending.clear()
        self._followers.clear()
        for request, record in zip(requests, records, strict=True):
            if request.after is None:
                self._pending.append((request, record))
            else:
                self._followers.setdefault(request.after, []).append((request, record))
        self._send()
        return records

    def ended(self, ended: VirtualRecord) -> None:
        """A request ended: fill its record, and send the next if the client held some back."""
        request, record = self._live.pop(ended.req_id)
        record.token_times_s = [time_s - self._start_s for time_s in ended.token_times_s]
        if ended.is_finished and record.num_output_tokens == request.output_tokens:
            record.completed = True
        else:
            record.error = (
                f"ended ({ended.finish_reason}) after {record.num_output_tokens} of "
                f"{request.output_tokens} tokens"
            )
        if self._on_done is not None:
            self._on_done(record)
        self._follow(request.req_id)
        self._send()

    def _follow(self, req_id: str) -> None:
        """What waited for the end of a request arrives after its pause."""
        for request, record in self._followers.pop(req_id, ()):
            record.arrival_s = self.now_s + request.arrival_s
            self._pending.append((replace(request, arrival_s=record.arrival_s), record))
            self._pending = deque(sorted(self._pending, key=lambda pair: pair[0].arrival_s))

    def give_up(self, reason: str, outcome: RunOutcome) -> None:
        """End every request that has not ended."""
        sent = {record.req_id: record for record in self._engine.records}
        waiting = [pair for pairs in self._followers.values() for pair in pairs]
        left = [*self._live.values(), *self._pending, *waiting]
        for _, record in left:
            record.error = reason
            if record.req_id in self._live:
                times_s = sent[record.req_id].token_times_s
                record.token_times_s = [time_s - self._start_s for time_s in times_s]
        self._live.clear()
        self._pending.clear()
        self._followers.clear()
        outcome.notes.append(f"{len(left)} of {len(outcome.records)} requests ended: {reason}")

    def _send(self) -> None:
        # Requests go out in order of arrival, so one that is sent before it arrives takes no
        # place from another.
        while self._pending and len(self._live) < self._max_in_flight:
            request, record = self._pending.popleft()
            record.sent_s = max(request.arrival_s, self.now_s)
            args: dict[str, Any] = dict(extra_args(request.slo, request.slo_class) or {})
            if self._tells_lengths:
                args[_oracle_key()] = request.output_tokens
            self._live[request.req_id] = (request, record)
            self._engine.add(
                VirtualRequest(
                    req_id=request.req_id,
                    arrival_s=self._start_s + request.arrival_s,
                    output_len=request.output_tokens,
                    prompt_token_ids=request.prompt_token_ids,
                    max_tokens=self._max_tokens,
                    extra_args=args or None,
                    priority=request.priority,
                )
            )


def _oracle_key() -> str:
    key: str = importlib.import_module("sola_sched.simulator.baselines.rules").ORACLE_KEY
    return key
