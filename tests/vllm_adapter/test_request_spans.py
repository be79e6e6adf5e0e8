"""Spans of OpenTelemetry: a request's fate, in its client's trace."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from virtual_runs import make_small_engine, warm_up

import sola_sched
from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.reports.request_spans import SPAN, RequestSpans

pytestmark = pytest.mark.vllm

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def make_engine() -> tuple[VirtualEngine, InMemorySpanExporter]:
    """One that has been warmed up, and what is exported from then on."""
    engine = make_small_engine(
        sola_sched.Scheduler, {"ttft_s": 0.4, "tpot_s": 0.05}, max_model_len=4096
    )
    warm_up(engine)
    engine.run()
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = RequestSpans(provider.get_tracer("test"))
    monitor = engine.scheduler.sola_monitor
    spans.send(monitor.fates, monitor.cost, 0.0, 0.0)
    exporter.clear()
    engine.scheduler._reporting.spans = spans
    return engine, exporter


def spans_of(engine: VirtualEngine, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    engine.run()
    spans = exporter.get_finished_spans()
    assert {span.name for span in spans} == {SPAN}
    return {str(attributes_of(span)["sola.request_id"]): span for span in spans}


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def test_a_span_is_in_the_trace_of_the_client_and_says_when_what_happened() -> None:
    engine, exporter = make_engine()
    request = VirtualRequest("one", arrival_s=10.0, prompt_len=100, output_len=5)
    engine.add(request)
    engine._requests["one"].trace_headers = HEADERS
    engine.add(VirtualRequest("other", arrival_s=10.0, prompt_len=100, output_len=5))
    spans = spans_of(engine, exporter)

    assert set(spans) == {"one", "other"}
    one, other = spans["one"], spans["other"]
    assert one.context is not None
    assert f"{one.context.trace_id:032x}" == TRACE
    assert one.parent is not None
    assert f"{one.parent.span_id:016x}" == PARENT
    assert other.parent is None
    record = engine.record("one")
    offset_s = engine.scheduler.sola_wall_clock() - engine.scheduler.sola_monitor.clock()
    assert one.start_time == pytest.approx((10.0 + offset_s) * 1e9, abs=1e6)
    times = {event.name: event.timestamp for event in one.events}
    assert list(times) == ["started", "first token", "last token"]
    assert record.first_token_s is not None
    took_s = (times["first token"] - (one.start_time or 0)) / 1e9
    assert took_s == pytest.approx(record.first_token_s - 10.0, abs=0.05)
    attributes = attributes_of(one)
    assert attributes["sola.end"] == "attained"
    assert attributes["sola.num_output"] == 5
    assert attributes["sola.target.ttft_s"] == 0.4
    assert "sola.why" not in attributes
    assert "sola.target.e2e_s" not in attributes


def test_one_that_was_late_says_why_and_when_that_was_found() -> None:
    engine, exporter = make_engine()
    engine.add(VirtualRequest("long", arrival_s=10.0, prompt_len=4000, output_len=4))
    span = spans_of(engine, exporter)["long"]

    attributes = attributes_of(span)
    assert attributes["sola.end"] == "missed"
    assert attributes["sola.missed"] == ("ttft",)
    assert "its first token came" in attributes["sola.why"]
    assert "judged late" in {event.name for event in span.events}


@pytest.mark.injects_failures
def test_a_tracer_that_fails_is_told_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = make_engine()

    class Broken:
        def start_span(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no exporter")

    spans: Any = engine.scheduler._reporting.spans
    spans._tracer = Broken()
    for i in range(20):
        engine.add(VirtualRequest(f"r{i}", 10.0 + i, prompt_len=100, output_len=5))
    engine.run()

    assert all(engine.record(f"r{i}").is_finished for i in range(20))
    assert engine.scheduler.sola_stats()["failures"] == {"tracing": 20}
    assert sum("tracing failed" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.injects_failures
def test_nothing_is_kept_of_requests_whose_fate_nobody_will_know() -> None:
    engine, _ = make_engine()
    guard = engine.scheduler.sola_guard
    while not guard.is_aside:
        guard.failed("a test", RuntimeError("on purpose"))
        guard.restored()
    for i in range(20):
        engine.add(VirtualRequest(f"r{i}", 10.0 + i, prompt_len=100, output_len=5))
        engine._requests[f"r{i}"].trace_headers = HEADERS
    engine.run()

    assert all(engine.record(f"r{i}").is_finished for i in range(20))
    assert not engine.scheduler._reporting.spans._headers


def test_without_an_endpoint_nothing_is_made() -> None:
    engine = make_small_engine(sola_sched.Scheduler, {"ttft_s": 0.4, "tpot_s": 0.05})
    assert engine.scheduler._reporting.spans is None
