"""Targets in HTTP headers become free arguments of the request; what the body says wins."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from fake_replica import FakeReplica
from gateway_clients import gateway_before
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.config.slo import SloTarget, request_target
from sola_sched.errors import SloError
from sola_sched.serving.slo_headers import with_slo_headers
from sola_sched.serving.slo_middleware import SloHeaders


@pytest.mark.parametrize(
    ("headers", "xargs"),
    [
        ({"x-slo-ttft-ms": "200"}, {"ttft_slo_ms": 200.0}),
        ({"x-slo-tpot-ms": "12.5"}, {"tpot_slo_ms": 12.5}),
        ({"x-llm-d-slo-ttft-ms": "200"}, {"ttft_slo_ms": 200.0}),
        ({"x-slo-e2e-ms": "60000"}, {"e2e_slo_ms": 60000.0}),
        ({"x-slo-ttft-ms": "200", "x-llm-d-slo-ttft-ms": "200.0"}, {"ttft_slo_ms": 200.0}),
        ({"x-gateway-inference-objective": "chat"}, {"slo_class": "chat"}),
        (
            {"x-slo-ttft-ms": "9", "x-gateway-inference-objective": "chat"},
            {"ttft_slo_ms": 9.0, "slo_class": "chat"},
        ),
    ],
)
def test_headers_become_keys(headers: dict[str, str], xargs: dict[str, Any]) -> None:
    body = {"prompt": "p"}

    assert with_slo_headers(body, headers) == {"prompt": "p", "vllm_xargs": xargs}
    assert body == {"prompt": "p"}


def test_without_any_of_them_the_body_stays_as_it_is() -> None:
    assert with_slo_headers({"prompt": "p"}, {"x-other": "1"}) == {"prompt": "p"}


@pytest.mark.parametrize(
    ("own", "merged"),
    [
        ({"ttft_slo_ms": 50}, {"ttft_slo_ms": 50, "tpot_slo_ms": 30.0}),
        ({"ttft_slo_ms": None}, {"ttft_slo_ms": 200.0, "tpot_slo_ms": 30.0}),
        ({"other": 1}, {"ttft_slo_ms": 200.0, "tpot_slo_ms": 30.0, "other": 1}),
        # A class says all targets.
        ({"slo_class": "batch"}, {"slo_class": "batch"}),
    ],
)
def test_the_body_wins(own: dict[str, Any], merged: dict[str, Any]) -> None:
    headers = {"x-slo-ttft-ms": "200", "x-slo-tpot-ms": "30"}

    assert with_slo_headers({"vllm_xargs": own}, headers)["vllm_xargs"] == merged


@pytest.mark.parametrize("value", ["", "fast", "0", "-1", "nan", "inf", "1e400", "200ms"])
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
def test_a_header_that_is_no_time_is_refused_with_the_rule(name: str, value: str) -> None:
    with pytest.raises(SloError, match=rf"'{name}' must be a finite number of milliseconds > 0"):
        with_slo_headers({}, {name: value})


def test_two_headers_that_disagree_are_refused() -> None:
    with pytest.raises(SloError, match=r"must agree \(got 200 and 300"):
        with_slo_headers({}, {"x-slo-ttft-ms": "200", "x-llm-d-slo-ttft-ms": "300"})


def test_arguments_that_are_no_object_are_refused() -> None:
    with pytest.raises(SloError, match="'vllm_xargs' must be an object"):
        with_slo_headers({"vllm_xargs": [1]}, {"x-slo-ttft-ms": "200"})


@given(st.floats(min_value=1e-3, max_value=1e9), st.floats(min_value=1e-3, max_value=1e9))
def test_the_scheduler_reads_what_the_headers_say(ttft_ms: float, tpot_ms: float) -> None:
    headers = {"x-slo-ttft-ms": repr(ttft_ms), "x-slo-tpot-ms": repr(tpot_ms)}

    xargs = with_slo_headers({}, headers)["vllm_xargs"]

    target = request_target(xargs, SloTarget(), {})
    assert (target.ttft_s, target.tpot_s) == (ttft_ms / 1e3, tpot_ms / 1e3)


def test_the_gateway_passes_targets_on_in_the_body_and_refuses_wrong_ones() -> None:
    fake = FakeReplica()

    async def whole() -> None:
        async with gateway_before(fake) as client:
            body = {"prompt": "p", "max_tokens": 1}
            assert (await client.post(body, X_SLO_TTFT_MS="250")).status == 200
            assert fake.bodies[0]["vllm_xargs"] == {"ttft_slo_ms": 250.0}
            assert "x-slo-ttft-ms" not in fake.headers[0]

            refused = await client.post(body, X_SLO_TTFT_MS="soon")
            assert refused.status == 400
            assert "'x-slo-ttft-ms' must be a finite number" in refused.json["error"]["message"]
            assert len(fake.bodies) == 1

    asyncio.run(whole())


async def _through_middleware(
    body: bytes, headers: dict[str, str], method: str = "POST", path: str = "/v1/completions"
) -> tuple[list[Any], list[dict[str, Any]]]:
    """What the application gets, and what is answered."""
    seen: list[Any] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        seen.append((dict(scope["headers"]), message["body"]))

    parts = iter(
        [
            {"type": "http.request", "body": body[:7], "more_body": True},
            {"type": "http.request", "body": body[7:], "more_body": False},
        ]
    )

    async def receive() -> dict[str, Any]:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(k.encode(), v.encode()) for k, v in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    await SloHeaders(app)(scope, receive, send)
    return seen, sent


def test_a_server_without_gateway_reads_the_headers_by_its_middleware() -> None:
    body = json.dumps({"prompt": "p"}).encode()
    headers = {"X-SLO-TTFT-MS": "250", "content-length": str(len(body)), "other": "1"}

    ((passed, data),), sent = asyncio.run(_through_middleware(body, headers))

    assert json.loads(data) == {"prompt": "p", "vllm_xargs": {"ttft_slo_ms": 250.0}}
    assert passed[b"content-length"] == str(len(data)).encode()
    assert (passed[b"other"], sent) == (b"1", [])


def test_the_middleware_writes_where_the_path_has_its_arguments() -> None:
    body = b'{"token_ids": [1], "sampling_params": {"n": 1}}'

    ((_, data),), _ = asyncio.run(
        _through_middleware(body, {"x-slo-ttft-ms": "250"}, path="/inference/v1/generate")
    )

    assert json.loads(data)["sampling_params"] == {"n": 1, "extra_args": {"ttft_slo_ms": 250.0}}


def test_the_middleware_refuses_a_wrong_header() -> None:
    seen, sent = asyncio.run(_through_middleware(b'{"prompt": 1}', {"x-slo-ttft-ms": "soon"}))

    assert seen == []
    assert sent[0]["status"] == 400
    assert "'x-slo-ttft-ms' must be" in json.loads(sent[1]["body"])["error"]["message"]


@pytest.mark.parametrize(
    ("body", "headers"),
    [(b'{"prompt": "p"}', {}), (b"not json at all", {"x-slo-ttft-ms": "250"}),
     (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {"x-slo-ttft-ms": "250"}),
     (b'{"prompt":' + b"9" * 5000 + b"}", {"x-slo-ttft-ms": "250"})],
)  # fmt: skip
def test_the_middleware_leaves_other_bodies_as_they_are(
    body: bytes, headers: dict[str, str]
) -> None:
    ((_, data),), sent = asyncio.run(_through_middleware(body, headers))

    assert data in (body, body[:7])  # untouched, in one piece or as it came
    assert sent == []
