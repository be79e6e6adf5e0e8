"""Spans of a real server, as a collector of OpenTelemetry receives them."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("opentelemetry.proto")

from http_server import serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextmanager
def collecting() -> Iterator[tuple[str, list[Any]]]:
    """A collector: where spans are sent to, and those that it has received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_late_request_has_a_span_that_says_why_beside_vllms_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    options = {"ttft_s": 1e-4, "tpot_s": 10.0}  # nobody can meet this
    with (
        collecting() as (endpoint, spans),
        serving(tmp_path, options, "--otlp-traces-endpoint", endpoint) as server,
    ):
        body = {"model": "tiny", "prompt": "to be or not", "max_tokens": 5, "ignore_eos": True}
        headers = {
            "Content-Type": "application/json",
            "traceparent": f"00-{TRACE}-b7ad6b7169203331-01",
        }
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer_id = json.load(response)["id"]
        limit = time.monotonic() + 30
        found: dict[str, Any] = {}
        while len(found) < 2 and time.monotonic() < limit:
            time.sleep(0.1)
            found = {span.name: span for span in list(spans) if span.trace_id.hex() == TRACE}

    assert set(found) == {"llm_request", "sola_sched.request"}, server.log.read_text()[-2000:]
    ours, theirs = found["sola_sched.request"], found["llm_request"]
    attributes = {each.key: each.value for each in ours.attributes}
    assert answer_id in attributes["sola.request_id"].string_value
    assert attributes["sola.end"].string_value == "missed"
    assert [each.string_value for each in attributes["sola.missed"].array_value.values] == ["ttft"]
    assert "its target was" in attributes["sola.why"].string_value
    assert {event.name for event in ours.events} >= {"started", "first token", "last token"}
    assert ours.parent_span_id == theirs.parent_span_id
    assert abs(ours.start_time_unix_nano - theirs.start_time_unix_nano) < 1e9
