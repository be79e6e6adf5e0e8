"""A gateway, a router and many engines in one event loop."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sola_sched.cluster.reports import Reports
from sola_sched.cluster.unknown import unknown_view
from sola_sched.cluster.view import InstanceView, Refusal, RoutedRequest, Router
from sola_sched.errors import ConfigError
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.engine import (
    ClusterEngine,
    ClusterRequest,
    Ended,
    Progress,
)
from sola_sched.simulator.cluster.faults import Death, Fault, Join, Links, Slowdown, Stall
from sola_sched.simulator.cluster.lengths import Predict, RecentLengths
from sola_sched.simulator.cluster.records import ClusterRecord, ClusterRun
from sola_sched.simulator.cluster.scaling import Scaling
from sola_sched.simulator.request import VirtualRequest

# Order of what happens at the same time: an engine's step sees all that has come by then.
_FAULT, _GATEWAY, _ENGINE = range(3)
#: A request that no instance can take is offered again after so long, seconds.
_RETRY_S = 0.25
#: Before an arrival, instances that are all idle report again for so long.
_IDLE_S = 10.0
_Z99 = 2.3263


@dataclass(eq=False, slots=True)
class _Stream:
    """A request at the gateway, and its attempt on an instance."""

    spec: ClusterRequest
    record: ClusterRecord
    length: LengthPrediction
    engine_id: str = ""
    instance: int = -1
    num_attempts: int = 0
    avoid: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class _Member:
    engine: ClusterEngine
    streams: dict[str, _Stream] = field(default_factory=dict)
    is_dead: bool = False
    stalled_from_s: float = 0.0
    stalled_until_s: float = 0.0
    since_s: float = 0.0
    until_s: float = math.inf
    is_drained: bool = False


class VirtualCluster:
    """Serves requests with many engines behind one gateway, in virtual time.

    Each request goes to the instance that the router names, after a delay; routers see reports
    that are as old as the links make them, plus what the gateway has sent since. If an instance
    dies, or delivers nothing for too long, its requests go elsewhere with the tokens they have as
    part of their prompts: no token is delivered twice, and every request is answered exactly once.

    Args:
        engines: In the order of their positions.
        router: Decides where requests go.
        links: Delays; the defaults are those measured with Ray Serve.
        faults: What goes wrong, and instances that join.
        scaling: Adds and drains instances; None keeps those given.
        predict: Length predictions that the gateway has; None for those of outputs that ended.
        seed: Of the delays.
        start_s: Time at which all begins, none before any engine's clock.
        has_reports: Whether engines report their load; if not, routers know what was sent to them.
        on_done: Called with each request's record when it ends.
    """

    def __init__(
        self,
        engines: Sequence[ClusterEngine],
        router: Router,
        *,
        links: Links | None = None,
        faults: Sequence[Fault] = (),
        scaling: Scaling | None = None,
        predict: Predict | None = None,
        seed: int = 0,
        start_s: float = 0.0,
        has_reports: bool = True,
        on_done: Callable[[ClusterRecord], None] | None = None,
    ) -> None:
        self._router = router
        self._links = links if links is not None else Links()
        self._predict = predict
        self._lengths = RecentLengths()
        self._rng = np.random.default_rng([seed, 21])
        self._on_done = on_done
        self._has_reports = has_reports
        self._now_s = start_s
        self._events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self._members: list[_Member] = []
        self._reports = Reports(delivery_s=self._links.send_delay_s, silent_s=self._links.silent_s)
        self._report_ages_s: list[float] = []
        self._num_retries = self._num_open = 0
        self._arrivals_s: list[float] = []
        self._scaling, self._num_arrivals, self._num_starting = scaling, 0, 0
        for engine in engines:
            self._join(engine)
        for fault in faults:
            self._at(fault.at_s, _FAULT, self._happen, fault)
        if scaling is not None:
            self._at(start_s + scaling.period_s, _FAULT, self._scale, scaling)

    def run(self, requests: Sequence[ClusterRequest]) -> ClusterRun:
        """Serve the requests until each of them is answered.

        Raises:
            ConfigError: There are no requests, or one arrives at no time after the start.
            ValueError: A fault names an instance that is not there.
        """
        if not requests:
            raise ConfigError("'requests' must hold at least one (got none); the trace is empty.")
        for spec in requests:
            at_s = spec.request.arrival_s
            if not self._now_s <= at_s < math.inf:
                raise ConfigError(
                    f"'arrival_s' of {spec.request.req_id!r} must be finite and >= "
                    f"{self._now_s:g}, the start of the cluster (got {at_s!r}); correct the trace."
                )
        self._arrivals_s = sorted(spec.request.arrival_s for spec in requests)
        streams = [self._stream(spec) for spec in requests]
        for stream in streams:
            self._at(stream.record.arrival_s, _GATEWAY, self._route, stream)
        self._num_open = len(streams)
        while self._num_open:
            self._now_s, _, _, call, args = heapq.heappop(self._events)
            call(*args)
        return ClusterRun(
            records=[stream.record for stream in streams],
            num_retries=self._num_retries,
            num_ignored_reports=self._reports.num_ignored,
            report_ages_s=self._report_ages_s,
            duration_s=self._now_s,
            instance_s=sum(min(m.until_s, self._now_s) - m.since_s for m in self._members),
        )

    def _stream(self, spec: ClusterRequest) -> _Stream:
        asked = spec.request
        record = ClusterRecord(
            req_id=asked.req_id,
            arrival_s=asked.arrival_s,
            num_prompt_tokens=asked.num_prompt_tokens,
            slo=spec.slo,
            slo_class=spec.slo_class,
        )
        return _Stream(spec, record, self._lengths.predict())

    def _at(self, time_s: float, rank: int, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time_s, rank, next(self._sequence), call, args))

    def _delay_s(self, median_s: float, p99_s: float) -> float:
        if not median_s:
            return 0.0
        sigma = math.log(max(1.0, p99_s / median_s)) / _Z99
        return median_s * math.exp(sigma * float(self._rng.standard_normal()))

    # The gateway.

    def _route(self, stream: _Stream) -> None:
        if not stream.num_attempts:
            self._num_arrivals += 1
            given = stream.spec.length or (self._predict and self._predict(stream.spec))
            stream.length = given or self._lengths.predict()
        routed = self._routed(stream)
        choice = self._router.choose(routed, self._reports.views, self._now_s)
        if isinstance(choice, Refusal):
            waited_s = self._now_s - stream.record.arrival_s
            if choice.is_temporary and waited_s < self._links.hold_s:
                self._at(self._now_s + _RETRY_S, _GATEWAY, self._route, stream)
            else:
                self._end(stream, choice.reason)
            return
        self._report_ages_s.append(self._now_s - self._reports.views[choice].reported_s)
        self._reports.sent(choice, routed, self._now_s)
        stream.instance = choice
        stream.engine_id = f"{stream.record.req_id}~{stream.num_attempts}"
        if not stream.num_attempts:
            stream.engine_id = stream.record.req_id
        else:
            self._num_retries += 1
        stream.num_attempts += 1
        stream.record.instances.append(choice)
        delay_s = self._delay_s(self._links.send_delay_s, self._links.send_delay_p99_s)
        self._at(self._now_s + delay_s, _GATEWAY, self._deliver, stream)

    def _routed(self, stream: _Stream) -> RoutedRequest:
        done = stream.record.num_output_tokens
        length = stream.length
        if done:
            length = LengthPrediction.exactly(length.remaining(done), length.source)
        return RoutedRequest(
            req_id=stream.record.req_id,
            prompt_tokens=stream.record.num_prompt_tokens + done,
            length=length,
            slo=stream.spec.slo,
            arrival_s=stream.record.arrival_s,
            avoid=stream.avoid,
        )

    def _deliver(self, stream: _Stream) -> None:
        member = self._members[stream.instance]
        if member.is_dead:
            self._at(self._now_s + self._links.failure_s, _GATEWAY, self._fail, stream)
            return
        member.streams[stream.engine_id] = stream
        request = _attempt(stream, self._now_s)
        member.engine.add(request, stream.spec.slo, stream.length, self._now_s)
        self._wake(stream.instance)

    def _fail(self, stream: _Stream) -> None:
        """The attempt is over without its end; the next one avoids the instance."""
        self._leave(stream)
        stream.avoid |= {stream.instance}
        self._route(stream)

    def _leave(self, stream: _Stream) -> None:
        self._router.ended(stream.record.req_id, stream.instance)
        self._reports.ended(stream.instance, stream.record.req_id)

    def _end(self, stream: _Stream, error: str = "") -> None:
        record = stream.record
        assert not record.completed, f"{record.req_id} was answered twice"
        assert not record.error, f"{record.req_id} was answered twice"
        record.completed, record.error = not error, error
        if not error:
            self._lengths.observe(record.num_output_tokens)
        self._num_open -= 1
        if self._on_done is not None:
            self._on_done(record)

    def _take_report(self, instance: int, view: InstanceView) -> None:
        self._reports.report(instance, view, self._now_s)

    # The instances.

    def _wake(self, instance: int) -> None:
        time_s = self._members[instance].engine.next_s
        if math.isfinite(time_s):
            self._at(max(time_s, self._now_s), _ENGINE, self._advance, instance, time_s)

    def _advance(self, instance: int, due_s: float) -> None:
        member = self._members[instance]
        if member.is_dead or member.engine.next_s != due_s:
            return
        if self._now_s < member.stalled_until_s:
            self._at(member.stalled_until_s, _ENGINE, self._advance, instance, due_s)
            return
        for ended in member.engine.advance(self._now_s):
            self._ended(member, ended)
        self._wake(instance)

    def _ended(self, member: _Member, ended: Ended) -> None:
        stream = member.streams.pop(ended.req_id)
        _take(stream.record, ended.progress)
        self._leave(stream)
        wanted = stream.spec.request.output_len
        if ended.is_whole and stream.record.num_output_tokens == wanted:
            self._end(stream)
        else:
            self._end(stream, f"ended by the engine after {stream.record.num_output_tokens} tokens")
        if member.is_drained and not member.streams:
            member.until_s = self._now_s

    def _report(self, instance: int) -> None:
        member = self._members[instance]
        if member.is_dead:
            return
        if self._now_s >= member.stalled_until_s:
            view = member.engine.view(self._now_s)
            delay_s = self._delay_s(self._links.report_delay_s, self._links.report_delay_p99_s)
            self._at(self._now_s + delay_s, _GATEWAY, self._take_report, instance, view)
        self._at(self._next_report_s(), _GATEWAY, self._report, instance)

    def _next_report_s(self) -> float:
        """A period later; reports of a long time in which nobody is served are left out."""
        period_s = self._links.report_period_s
        next_s = self._now_s + period_s
        num_arrived = bisect.bisect_right(self._arrivals_s, self._now_s)
        if num_arrived == len(self._arrivals_s) - self._num_open < len(self._arrivals_s):
            idle_s = self._arrivals_s[num_arrived] - self._now_s - _IDLE_S
            next_s += max(0.0, math.floor(idle_s / period_s)) * period_s
        return next_s

    def _scale(self, scaling: Scaling) -> None:
        self._at(self._now_s + scaling.period_s, _FAULT, self._scale, scaling)
        offered = [i for i, m in enumerate(self._members) if not (m.is_dead or m.is_drained)]
        views = [self._reports.views[i] for i in offered]
        wanted = max(1, scaling.decide(self._num_arrivals, views, self._now_s))
        self._num_arrivals = 0
        for _ in range(wanted - len(offered) - self._num_starting):
            self._num_starting += 1
            self._at(self._now_s + scaling.startup_s, _FAULT, self._start, self._now_s)
        for i in offered[wanted:]:
            member = self._members[i]
            member.is_drained = True
            if not member.streams:
                member.until_s = self._now_s
            self._reports.drain(i)

    def _start(self, since_s: float) -> None:
        assert self._scaling is not None
        self._num_starting -= 1
        self._join(self._scaling.make(), since_s)

    def _join(self, engine: ClusterEngine, since_s: float | None = None) -> None:
        self._members.append(_Member(engine, since_s=self._now_s if since_s is None else since_s))
        now_s = self._now_s
        view = engine.view(now_s)
        if not self._has_reports:  # what does not fit the engine itself refuses
            longest = min(view.max_model_len, view.kv_capacity_tokens)
            view = replace(unknown_view(now_s), max_model_len=longest)
        instance = self._reports.join(view, now_s)
        if not self._has_reports:
            return
        phase_s = float(self._rng.uniform(0.0, self._links.report_period_s))
        self._at(self._now_s + phase_s, _GATEWAY, self._report, instance)

    def _happen(self, fault: Fault) -> None:
        if isinstance(fault, Join):
            self._join(fault.engine)
            return
        if not 0 <= fault.instance < len(self._members):
            raise ValueError(
                f"'instance' of a fault must be below {len(self._members)}, the number of "
                f"instances at {fault.at_s:g} s (got {fault.instance})."
            )
        member = self._members[fault.instance]
        if isinstance(fault, Slowdown):
            member.engine.slow_down(fault.factor)
        elif isinstance(fault, Stall):
            if self._now_s >= member.stalled_until_s:
                member.stalled_from_s = self._now_s
            member.stalled_until_s = max(member.stalled_until_s, fault.at_s + fault.for_s)
            silent_s = fault.at_s + self._links.silent_s + self._links.report_period_s
            self._at(silent_s, _GATEWAY, lambda: self._reports.expire(self._now_s))
            self._at(fault.at_s + self._links.stall_s, _GATEWAY, self._give_up, member)
        elif not member.is_dead:
            self._die(member, fault)

    def _die(self, member: _Member, fault: Death) -> None:
        member.is_dead, member.until_s = True, self._now_s
        for stream in member.streams.values():
            self._take_tokens(member, stream)
            self._at(self._now_s + self._links.failure_s, _GATEWAY, self._fail, stream)
        member.streams.clear()
        noticed_s = self._now_s + self._links.notice_s
        self._at(noticed_s, _GATEWAY, self._reports.died, fault.instance)

    def _take_tokens(self, member: _Member, stream: _Stream) -> None:
        """Book what an attempt has delivered that does not go on; a stall delivers nothing."""
        is_stalled = self._now_s < member.stalled_until_s
        alive_s = member.stalled_from_s if is_stalled else self._now_s
        _take(stream.record, member.engine.progress(stream.engine_id, alive_s))

    def _give_up(self, member: _Member) -> None:
        """Take the streams of an instance elsewhere that has been silent for too long."""
        if member.is_dead or self._now_s >= member.stalled_until_s:
            return
        streams, member.streams = list(member.streams.values()), {}
        for stream in streams:
            self._take_tokens(member, stream)
            member.engine.remove(stream.engine_id, self._now_s)
            self._fail(stream)


def _take(record: ClusterRecord, progress: Progress) -> None:
    """Book what one attempt has delivered."""
    if not progress.num_tokens:
        return
    if not record.num_output_tokens:
        record.first_token_s = progress.first_s
    record.last_token_s = progress.last_s
    record.num_output_tokens += progress.num_tokens


def _attempt(stream: _Stream, now_s: float) -> VirtualRequest:
    """The request as an engine gets it: what was delivered is part of the prompt."""
    asked, done = stream.spec.request, stream.record.num_output_tokens
    request = replace(asked, req_id=stream.engine_id, arrival_s=now_s)
    if not done:
        return request
    prompt_ids = asked.prompt_token_ids
    if prompt_ids is not None:
        # Which tokens they are matters to prefix caches only, and they are new to all of them.
        prompt_ids = (*prompt_ids, *(1 + (done + i) % 100 for i in range(done)))
    return replace(
        request,
        output_len=asked.output_len - done,
        prompt_len=None if asked.prompt_len is None else asked.prompt_len + done,
        prompt_token_ids=prompt_ids,
        max_tokens=None if asked.max_tokens is None else asked.max_tokens - done,
    )
