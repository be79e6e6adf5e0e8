from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from bench_runs import SLO, make_workload

pytest.importorskip("aiohttp")

from aiohttp import web

from sola_sched.bench.backends.base import SchedulerSpec
from sola_sched.bench.backends.openai import OpenAIBackend, ServerOptions
from sola_sched.bench.cli import main
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError
from sola_sched.workloads.workload import RequestSpec, Workload

SERVER = SchedulerSpec("server", "server")


class FakeServer:
    """Streams the wanted number of tokens, in pairs if ``merges``; remembers every body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.merges = False
        self.reports_usage = True
        self.num_in_flight = self.max_in_flight = 0
        self.fail_status: int | None = None
        self.drop_after: int | None = None
        self.raw: bytes | None = None
        self.models: str | None = None
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        if self.models is not None:
            return web.Response(text=self.models, content_type="application/json")
        return web.json_response({"data": [{"id": "fake", "max_model_len": 512}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.fail_status:
            return web.Response(status=self.fail_status, text="out of luck")
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.raw is not None:
            await response.write(self.raw)
            return response
        step, sent = (2 if self.merges else 1), 0
        while sent < min(body["max_tokens"], self.drop_after or 10**9):
            await asyncio.sleep(0.002)
            sent = min(sent + step, body["max_tokens"])
            event: dict[str, Any] = {"choices": [{"text": "x" * step}]}
            if self.reports_usage:
                event["usage"] = {"completion_tokens": sent, "prompt_tokens": len(body["prompt"])}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        self.num_in_flight -= 1
        await response.write(b": ping\n\ndata: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.mark.parametrize(("merges", "reports_usage"), [(False, True), (False, False), (True, True)])
def test_tokens_are_counted_however_they_are_streamed(
    server: FakeServer, merges: bool, reports_usage: bool
) -> None:
    server.merges, server.reports_usage = merges, reports_usage
    backend = OpenAIBackend(ServerOptions(server.url, num_warmups=1))
    done: list[str] = []

    outcome = backend.run(
        make_workload(5, rate=200.0, output_tokens=7), SERVER, SLO,
        on_done=lambda r: done.append(r.req_id),
    )  # fmt: skip

    assert backend.model_id == "fake"
    assert all(r.completed and r.num_output_tokens == 7 for r in outcome.records)
    assert all(r.token_times_s[0] > (r.sent_s or 0) >= r.arrival_s for r in outcome.records)
    assert sorted(done) == ["0", "1", "2", "3", "4"]
    assert outcome.duration_s >= max(r.token_times_s[-1] for r in outcome.records)


def test_own_targets_are_sent_as_flat_keys(server: FakeServer) -> None:
    own = RequestSpec("a", (3, 4), 2, slo=SloTarget(ttft_s=0.5))
    workload = Workload((own, RequestSpec("b", (3, 4), 2)))
    backend = OpenAIBackend(
        ServerOptions(server.url, num_warmups=0, extra_body={"vllm_xargs": {"mine": 1}, "top_k": 1})
    )

    backend.run(workload, SERVER, SLO)

    by_own = sorted(server.bodies, key=lambda body: "ttft_slo_ms" in body["vllm_xargs"])
    assert by_own[0]["vllm_xargs"] == {"mine": 1}
    assert by_own[1]["vllm_xargs"] == {
        "mine": 1, "ttft_slo_ms": 500, "tpot_slo_ms": "none", "e2e_slo_ms": "none",
    }  # fmt: skip
    assert by_own[0]["top_k"] == 1
    assert by_own[0]["ignore_eos"] is True


def test_targets_of_the_run_are_sent_on_request(server: FakeServer) -> None:
    backend = OpenAIBackend(ServerOptions(server.url, num_warmups=0, send_slo=True))

    backend.run(make_workload(1, rate=100.0), SERVER, SLO)

    assert server.bodies[0]["vllm_xargs"] == {
        "ttft_slo_ms": 500, "tpot_slo_ms": 100, "e2e_slo_ms": "none",
    }  # fmt: skip


def test_prompts_differ_between_runs_so_that_no_prefix_cache_helps(server: FakeServer) -> None:
    backend = OpenAIBackend(ServerOptions(server.url, num_warmups=1))
    workload = make_workload(1, rate=100.0)

    backend.run(workload, SERVER, SLO)
    backend.run(workload, SERVER, SLO)

    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len({prompt[0] for prompt in prompts}) == 4
    assert len({prompt[1:] for prompt in prompts}) == 1


def test_concurrency_is_limited_and_the_wait_counts(server: FakeServer) -> None:
    backend = OpenAIBackend(ServerOptions(server.url, num_warmups=0))

    outcome = backend.run(
        make_workload(6, rate=1e6, output_tokens=10), SERVER, SLO, max_concurrency=2
    )

    assert server.max_in_flight == 2
    ttfts = sorted(r.ttft_s for r in outcome.records)
    assert ttfts[-1] > ttfts[0] + 0.03  # two rounds of ten tokens before it


def test_failures_are_recorded_not_dropped(server: FakeServer) -> None:
    backend = OpenAIBackend(ServerOptions(server.url, num_warmups=0))
    workload = make_workload(2, rate=1000.0, output_tokens=5)

    server.drop_after = 3
    cut = backend.run(workload, SERVER, SLO).records
    server.fail_status = 503
    failed = backend.run(workload, SERVER, SLO).records

    assert {r.error for r in cut} == {"ended after 3 of 5 tokens"}
    assert {r.error for r in failed} == {"HTTP 503 Service Unavailable: out of luck"}
    assert not any(r.attains(SLO) for r in cut + failed)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"data: 7\n\n", "an event must be an object (got 7)"),
        (b"data: [null]\n\n", "an event must be an object"),
        (b"data: {\n\n", "JSONDecodeError"),
        (b"data: \xff\n\n", "UnicodeDecodeError"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "RecursionError"),
        (b"data: " + b"x" * (1 << 20) + b"\n\n", ""),
        (b'data: {"usage": 3}\n\n', "'usage' must be an object"),
        (b'data: {"usage": {"completion_tokens": 1e300}}\n\n', "'usage' must count tokens"),
        (b'data: {"usage": {"prompt_tokens": "9"}}\n\n', "'usage' must count tokens"),
    ],
    ids=["number", "list", "half", "bytes", "deep", "long", "usage", "huge", "text"],
)
def test_a_stream_that_is_none_is_a_failed_request(
    server: FakeServer, line: bytes, said: str
) -> None:
    server.raw = line
    backend = OpenAIBackend(ServerOptions(server.url, num_warmups=1))

    outcome = backend.run(make_workload(3), SERVER, SLO)

    assert [record.completed for record in outcome.records] == [False] * 3
    assert all(record.error and said in record.error for record in outcome.records)


@pytest.mark.parametrize(
    "answer", ["7", "[]", "{}", '{"data": 3}', '{"data": [3]}', '{"data": [{}]}', "[" * 100_000]
)
def test_a_server_that_lists_no_models_is_told_in_a_line(server: FakeServer, answer: str) -> None:
    server.models = answer
    with pytest.raises(ConfigError, match=r"needs a server that answers http.*/v1/models"):
        OpenAIBackend(ServerOptions(server.url))


def test_headers_and_key_are_sent(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    backend = OpenAIBackend(ServerOptions(server.url, num_warmups=0, headers={"x-team": "a"}))

    backend.run(make_workload(1, rate=100.0), SERVER, SLO)

    assert server.headers[0]["x-team"] == "a"
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_unknown_model_is_explained(server: FakeServer) -> None:
    with pytest.raises(ConfigError, match=r"must be served at .* \(got 'other'; it serves fake\)"):
        OpenAIBackend(ServerOptions(server.url, model="other"))


def test_command_line_against_a_server(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    code = main(
        ["--backend", "openai", "--base-url", server.url, "--dataset-name", "random",
         "--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "6",
         "--request-rate", "100", "--label", "ours", "--result-dir", str(tmp_path),
         "--result-filename", "r.json", "--disable-tqdm"]
    )  # fmt: skip

    assert code == 0, capsys.readouterr()
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["backend"], saved["label"], saved["model_id"]) == ("openai", "ours", "fake")
    assert saved["completed"] == 6
    assert "10 x the single-request latency" in saved["slo"]["source"]
