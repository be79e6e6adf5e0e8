"""What became of each request as a span of OpenTelemetry, in the trace that its client began.

vLLM makes and ends its own span `llm_request` in one call, in the server's process. So this is a
span beside it, made in the engine core, where vLLM has set up the exporter if it was started with
`--otlp-traces-endpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sola_sched.core.fates import Fates, shown_id
from sola_sched.cost.model import CostModel
from sola_sched.reports.fates import fates_of, is_late
from sola_sched.reports.reasons import why

SPAN = "sola_sched.request"
#: Of a fate: points in time, which are the span's begin, its end and its events.
EVENTS = {
    "started_s": "started",
    "first_token_s": "first token",
    "lost_s": "judged late",
    "last_token_s": "last token",
}
_TARGETS = ("ttft_s", "tpot_s", "e2e_s")
_LEFT_OUT = {"arrival_s", "ended_s", *EVENTS, *_TARGETS}


class RequestSpans:
    """Makes a span of each request that has ended.

    Args:
        tracer: Makes them; by default the one of this process.
    """

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._tracer = trace.get_tracer("sola_sched") if tracer is None else tracer
        self._propagator = TraceContextTextMapPropagator()
        self._headers: dict[str, Mapping[str, str]] = {}
        self._num_seen = 0

    def ended(self, req_id: str, trace_headers: Mapping[str, str] | None) -> None:
        """A request ends; its fate is known by the next `send`."""
        if trace_headers:
            self._headers[shown_id(req_id)] = trace_headers

    def send(self, fates: Fates, cost: CostModel, now_s: float, wall_s: float) -> None:
        """Make the spans of those that have ended since the last call.

        Args:
            fates, cost: Of the engine.
            now_s: On the clock of the fates.
            wall_s: The same moment, in seconds since 1970.
        """
        if fates.num_ended == self._num_seen:
            return
        ended = fates.since(self._num_seen, cost)
        self._num_seen = fates.num_ended
        headers, self._headers = self._headers, {}
        for fate in fates_of(ended):
            self._make(fate, headers.get(fate["request_id"]), wall_s - now_s)

    def _make(
        self, fate: dict[str, Any], headers: Mapping[str, str] | None, offset_s: float
    ) -> None:
        def at_ns(time_s: float) -> int:
            return int((time_s + offset_s) * 1e9)

        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(headers) if headers else None,
            attributes=attributes_of(fate),
            start_time=at_ns(fate["arrival_s"]),
        )
        for name, event in EVENTS.items():
            if fate[name] is not None:
                span.add_event(event, timestamp=at_ns(fate[name]))
        span.end(at_ns(fate["ended_s"]))


def attributes_of(fate: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a span: what there is of a fate, and of one that was late why.

    Args:
        fate: As in `reports.fates.fate_of`.
    """
    attributes = {
        f"sola.{name}": value
        for name, value in fate.items()
        if name not in _LEFT_OUT and value is not None
    }
    for name in _TARGETS:
        if fate[name] is not None:
            attributes[f"sola.target.{name}"] = fate[name]
    if is_late(fate):
        attributes["sola.why"] = why(fate)
    return attributes
