"""Targets that a client sends where nothing reads them are said once, and the request passes."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from sola_sched.front_end import hints_http
from sola_sched.front_end.hints_http import HintsBesideHeaders, HintsMiddleware

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.sola_sched")


def ask(
    middleware: Any, body: Any = None, headers: dict[str, str] | None = None, **scope: Any
) -> bytes:
    """What the application gets of a request's body."""
    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    whole = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": pairs, **scope}
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data}

    async def send(_: Any) -> None:
        raise AssertionError("it answers nothing")

    asyncio.run(middleware(whole, receive, send))
    return middleware.app.body


class App:
    """Keeps the body that it was sent."""

    body = b""

    async def __call__(self, _: Any, receive: Any, __: Any) -> None:
        self.body = (await receive())["body"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(hints_http, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"x-slo-ttft-ms": "200"}, "x-slo-ttft-ms"),
        ({"X-LLM-D-SLO-TPOT-MS": "200"}, "x-llm-d-slo-tpot-ms"),
        ({"x-gateway-inference-objective": "chat"}, "x-gateway-inference-objective"),
    ],
)
def test_a_header_that_nothing_reads_is_said_once(
    headers: dict[str, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    middleware = HintsMiddleware(App())
    for _ in range(3):
        ask(middleware, headers=headers)
    (record,) = caplog.records
    assert f"nothing reads the header '{name}'" in record.getMessage()
    assert hints_http.READS_HEADERS in record.getMessage()


def test_headers_that_a_middleware_reads_are_not(caplog: pytest.LogCaptureFixture) -> None:
    ask(HintsBesideHeaders(App()), headers={"x-slo-ttft-ms": "200"})
    assert not caplog.records


@pytest.mark.parametrize("key", ["ttft_slo_ms", "slo_ttft_ms", "slo_class"])
def test_a_key_at_the_top_of_the_body_is_said_once(
    key: str, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    middleware, body = HintsMiddleware(App()), {"prompt": "a", key: 200}
    for _ in range(3):
        assert json.loads(ask(middleware, body)) == body
        clock.now += 60.0
    (record,) = caplog.records
    assert f"nothing reads '{key}' at the top of a request" in record.getMessage()
    assert '"vllm_xargs": {"' in record.getMessage()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "slo", "vllm_xargs": {"ttft_slo_ms": 200}},
        {"prompt": "slow", "session_id": "slo"},
        {"waited_ms": "slo"},
        b'{"ttft_slo_ms": ',
        b'["ttft_slo_ms"]',
        b'{"ttft_slo_ms": 1, "prompt": "' + b"a" * 70_000 + b'"}',
        b"[" * 20_000 + b"slo",
    ],
)
def test_other_bodies_pass_without_a_word(body: Any, caplog: pytest.LogCaptureFixture) -> None:
    sent = ask(HintsMiddleware(App()), body)
    assert sent == (body if isinstance(body, bytes) else json.dumps(body).encode())
    assert not caplog.records


def test_bodies_are_read_now_and_then(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    middleware = HintsMiddleware(App())
    ask(middleware, {"prompt": "slow"})
    clock.now += 0.5
    ask(middleware, {"slo_class": "a"})
    assert not caplog.records
    clock.now += 1.0
    ask(middleware, {"slo_class": "a"})
    assert len(caplog.records) == 1


def test_clients_cannot_fill_the_log(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    middleware = HintsMiddleware(App())
    ask(middleware, headers={f"x-slo-{number}": "1" for number in range(1000)})
    assert len(caplog.records) == 20


def test_only_posts_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    ask(HintsMiddleware(App()), headers={"x-slo-ttft-ms": "1"}, method="GET")
    ask(HintsMiddleware(App()), type="lifespan")
    assert not caplog.records


@pytest.mark.parametrize(
    ("given", "kind"),
    [([], HintsMiddleware), ([hints_http.READS_HEADERS], HintsBesideHeaders)],
)
def test_which_one_a_server_gets(given: list[str], kind: type[Any]) -> None:
    args = SimpleNamespace(middleware=list(given))
    hints_http.add_middleware(args)
    assert args.middleware == [*given, f"{kind.__module__}.{kind.__qualname__}"]
