"""`GET /sola/options`, on vLLM's own server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm")

from sola_sched.config.policies import BUILT_IN, PolicyTraits, policy_class
from sola_sched.config.sola_config import SolaConfig
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


class Choosy:
    traits = PolicyTraits()

    def __init__(self, config: SolaConfig) -> None:
        if config.ttft_s is None:
            raise ValueError("this policy needs a TTFT")

    def plan(self, state: Any) -> Any:
        raise AssertionError("the API server must plan nothing")


def test_what_a_policy_of_others_refuses_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("choosy")
    module.Choosy = Choosy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "choosy", module)
    path = tmp_path / "options.json"
    sola = {"ttft_s": 1.0, "policy": "choosy:Choosy"}
    additional = {"sola_sched": {**sola, "options_file": str(path)}}
    options_in_force(additional)

    path.write_text('{"ttft_s": null, "classes": {"new": {"ttft_s": 1.0}}}')

    assert not options_in_force(additional).config.classes
    told = ask()
    assert told["options"] == sola
    assert "this policy needs a TTFT" in told["problem"]
    path.write_text('{"ttft_s": 2.0}')
    told = ask()
    assert (told["options"]["ttft_s"], told["problem"]) == (2.0, None)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_policies_of_this_package_are_not_made_here(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it would be compiled here")

    monkeypatch.setattr(policy_class(policy), "__init__", fail)
    path = tmp_path / "options.json"
    options_in_force({"sola_sched": {"policy": policy, "options_file": str(path)}})
    path.write_text('{"ttft_s": 0.5}')
    assert ask()["problem"] is None


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
