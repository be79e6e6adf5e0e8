"""`GET /sola/options`, on vLLM's own server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from sola_sched.front_end import options_http
from sola_sched.front_end.options_http import OptionsMiddleware, options_in_force

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _nobody_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_http, "_in_force", {})


def ask(path: str = "/sola/options", method: str = "GET") -> Any:
    """The body of our answer; "passed" for a request that goes on."""
    sent: list[Any] = []

    async def app(*_: Any) -> None:
        sent.append("passed")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method}
    asyncio.run(OptionsMiddleware(app)(scope, None, send))
    if sent == ["passed"]:
        return "passed"
    start, body = sent
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    return json.loads(body["body"])


def test_what_holds_and_what_is_wrong_is_told_as_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    additional = {"sola_sched": {"ttft_s": 1.0, "options_file": str(path)}}
    options = options_in_force(additional)
    assert ask() == {"options": {"ttft_s": 1.0}, "options_file": str(path), "problem": None}

    path.write_text('{"ttft_s": 0.5}')
    assert ask()["options"] == {"ttft_s": 0.5}
    assert options_in_force(additional) is options

    path.write_text('{"ttft_s": -5}')
    told = ask()
    assert told["options"] == {"ttft_s": 0.5}
    assert "'ttft_s' must be a number" in told["problem"]

    path.unlink()
    assert ask() == {"options": {"ttft_s": 1.0}, "options_file": str(path), "problem": None}


def test_a_request_is_checked_against_what_holds(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    additional = {"sola_sched": {"options_file": str(path)}}
    assert not options_in_force(additional).config.classes
    path.write_text('{"classes": {"chat": {}}}')
    assert list(options_in_force(additional).config.classes) == ["chat"]


def test_without_a_file_the_options_are_told_too() -> None:
    options_in_force({"sola_sched": {"tpot_s": 0.5}})
    assert ask() == {"options": {"tpot_s": 0.5}, "options_file": None, "problem": None}


@pytest.mark.parametrize(
    ("path", "method"), [("/sola/options", "POST"), ("/sola/options/x", "GET"), ("/health", "GET")]
)
def test_other_requests_pass(path: str, method: str) -> None:
    options_in_force(None)
    assert ask(path, method) == "passed"


def test_a_server_that_has_not_started_passes_all() -> None:
    assert ask() == "passed"
