"""Answers of Serve, gateways and engines that are broken, late or something else's."""

from __future__ import annotations

import json
import time

import pytest
from raw_answers import answering, http

from sola_sched.adaptive_placement import observe, serve_api
from sola_sched.adaptive_placement.observe import Observed, Observer, counts
from sola_sched.adaptive_placement.serve_api import ServeApi
from sola_sched.errors import DeploymentError


@pytest.mark.parametrize("status", ["404 Not Found", "503 Service Unavailable"])
@pytest.mark.parametrize("is_left_open", [False, True])
def test_error_whose_text_does_not_come_is_known_by_its_status(
    monkeypatch, status, is_left_open
) -> None:
    monkeypatch.setattr(serve_api, "_LIMIT_S", 0.2)

    with (
        answering(http(b"The GCS", status, 100), is_left_open=is_left_open) as address,
        pytest.raises(DeploymentError, match=rf"\(HTTP {status[:3]}: its text has not come"),
    ):
        ServeApi(address).deploy([])


@pytest.mark.parametrize(
    "answer", [b"", b"what?\r\n\r\n", http(b'{"appl', length=100)], ids=["none", "line", "half"]
)
def test_serve_that_breaks_off_is_not_reached(answer) -> None:
    with answering(answer) as address, pytest.raises(DeploymentError, match="must be reached"):
        ServeApi(address).details()


@pytest.mark.parametrize("address", ["http://a..b:8265", "http://[x]:8265", "http://x:port"])
def test_address_that_can_be_none_is_not_reached(address) -> None:
    with pytest.raises(DeploymentError, match="must be reached"):
        ServeApi(address).details()


def test_application_of_others_without_a_name_has_the_one_that_serve_gave_it() -> None:
    config = {"import_path": "their.app:app"}
    said = {"applications": {"default": {"status": "RUNNING", "deployed_app_config": config}}}

    with answering(http(json.dumps(said).encode())) as address:
        assert ServeApi(address).deployed() == [config | {"name": "default"}]


def test_application_that_has_failed_without_a_word_is_named() -> None:
    silent = {"status": "UNHEALTHY", "message": None, "deployments": {"one": {"message": None}}}

    with (
        answering(http(json.dumps({"applications": {"a": silent}}).encode())) as address,
        pytest.raises(DeploymentError, match="application 'a' must start"),
    ):
        ServeApi(address).wait(["a"], (), 1.0)


ONE_REQUEST = b'vllm:request_prompt_tokens_count{engine="0"} 1\n'


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"what?\r\n\r\n",
        http(ONE_REQUEST, length=1000),
        http(b"\xff\xfe"),
        http(b"vllm:request_prompt_tokens_count NaN\n"),
        http(b"vllm:request_prompt_tokens_count +Inf\n"),
        http(b"vllm:request_prompt_tokens_count -1\n"),
    ],
    ids=["none", "line", "half", "bytes", "nan", "inf", "negative"],
)
def test_engine_whose_counters_do_not_come_whole_does_not_answer(answer) -> None:
    with answering(http(ONE_REQUEST)) as good, answering(answer) as bad:
        replicas = json.dumps([{"url": bad}, {"url": good}]).encode()
        with answering(http(replicas)) as gateway:
            assert Observer().since_last({"chat": gateway}) == {}


def test_engine_that_sends_its_counters_bit_by_bit_holds_nobody(monkeypatch) -> None:
    monkeypatch.setattr(observe, "LIMIT_S", 0.5)
    bits = answering(http(ONE_REQUEST * 100), pause_s=0.1)
    with answering(http(ONE_REQUEST)) as good, bits as slow:
        replicas = json.dumps([{"url": slow}, {"url": good}]).encode()
        with answering(http(replicas)) as gateway:
            began_s = time.monotonic()

            assert Observer().since_last({"chat": gateway}) == {}
            assert time.monotonic() - began_s < 5.0


def test_count_of_no_outcome_is_none_of_ours() -> None:
    assert counts(ONE_REQUEST.decode() + "sola_requests_total 3\n") == {"requests": 1.0}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        http(b'[{"url": "http', length=1000),
        http(b"<html>"),
        http(b"\xff\xfe"),
        http(b"7"),
        http(b'{"url": "http://127.0.0.1:9"}'),
        http(b"[{}]"),
        http(b"[null]"),
        http(b"[" * 200_000),
    ],
    ids=["none", "half", "html", "bytes", "number", "object", "keyless", "null", "deep"],
)
def test_gateway_whose_replicas_do_not_come_whole_does_not_answer(answer) -> None:
    with (
        answering(http(ONE_REQUEST)) as engine,
        answering(http(json.dumps([{"url": engine}]).encode())) as good,
        answering(answer) as bad,
    ):
        found = Observer().since_last({"bad": bad, "good": good})

    assert found == {"good": Observed(1.0)}
