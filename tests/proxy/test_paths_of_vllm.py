"""Every path of vLLM's own server is sorted: on the page about security, and by what passes."""

from __future__ import annotations

import json
import re
import typing
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from gateway_clients import gateway_at
from listeners import ask, post, run, serving, status_of, upstream

from sola_sched.colocation.door import Door
from sola_sched.colocation.sleeping import SleepOptions
from sola_sched.proxy.errors import RefusedError
from sola_sched.proxy.front import HEALTH
from sola_sched.proxy.paths import PASSED, find

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
#: What vLLM has only with a setting that a test cannot give everywhere.
_WITH_A_SETTING = {"/cohere/v2/chat", "/cohere/v2/chat/render", "/start_profile", "/stop_profile"}


def sorted_paths() -> dict[str, str]:
    """The paths of the page's table, each with what becomes of it."""
    table = PAGE.read_text(encoding="utf-8").partition("## The paths of vLLM")[2]
    rows = re.findall(r"^\| (`/[^|]*) \| ([^|]*) \|$", table, flags=re.M)
    return {path: what for paths, what in rows for path in re.findall(r"`([^`]+)`", paths)}


def _names(kind: Any) -> list[str]:
    """The strings of a `Literal`, or of a union of some."""
    return [
        name
        for each in typing.get_args(kind)
        for name in ([each] if isinstance(each, str) else _names(each))
    ]


@pytest.fixture(scope="module")
def routes() -> dict[str, set[str]]:
    """Methods by path, of a server with every task and every developer's path."""
    pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        try:
            from fastapi import FastAPI
            from vllm.entrypoints.launchers.api_server.routers import register_api_routers
            from vllm.tasks import SupportedTask
        except ImportError as error:
            pytest.skip(f"this release of vLLM makes its server elsewhere ({error})")
        app = FastAPI()
        app.state.args = SimpleNamespace(
            enable_fault_tolerance=True, enable_tokenizer_info_endpoint=True, tokens_only=True,
            profiler_config=None, enable_offline_docs=False,
        )  # fmt: skip
        model = SimpleNamespace(
            get_pooling_task=lambda _: "classify", is_cross_encoder=True, pooler_config=None,
            hf_config=SimpleNamespace(num_labels=1),
        )  # fmt: skip
        register_api_routers(app.state.args, app, tuple(_names(SupportedTask)), model)
    found: dict[str, set[str]] = {}
    for route in app.routes:
        path: str = route.path  # type: ignore[attr-defined]
        found.setdefault(path, set()).update(getattr(route, "methods", None) or {"WebSocket"})
    return found


@pytest.mark.vllm
def test_every_path_of_vllm_is_in_the_table_and_no_other(routes: dict[str, set[str]]) -> None:
    listed = sorted_paths().keys()

    assert routes.keys() - listed == set(), "sort these in docs/security.md and proxy/paths.py"
    assert listed - routes.keys() <= _WITH_A_SETTING


@pytest.mark.vllm
def test_what_passes_has_the_methods_that_vllm_has(routes: dict[str, set[str]]) -> None:
    for path in PASSED.keys() & routes.keys():
        assert PASSED[path] in routes[path], path


def test_the_table_says_what_passes() -> None:
    table = sorted_paths()

    assert {path for path, what in table.items() if what.startswith("passed")} == PASSED.keys()
    kinds = {what.partition(":")[0].partition(",")[0] for what in table.values()}
    assert kinds == {"passed", "passed by the gateway; the door answers `/v1/models` by its "
                     "services' names", "its own", "refused"}  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "DELETE"])
def test_refused_paths_are_refused_with_every_method_and_spelling(method: str) -> None:
    refused = [path for path, what in sorted_paths().items() if not what.startswith("passed")]
    refused += ["", "/", "/v1", "/v1/", "/sola/load", "/v1/completions/x", "/V1/completions"]
    for path in refused:
        for spelled in (
            path, f"{path}/", f"{path}//", f"/{path}", f"/v1/..{path}", f"/v1/responses/..{path}",
            f"/v1/responses/x/..{path}", f"/v1/completions/..{path}", f"/v1/./..{path}",
        ):  # fmt: skip
            with pytest.raises(RefusedError) as error:
                find(method, spelled)
            assert error.value.status == HTTPStatus.NOT_FOUND, spelled


def test_what_passes_passes_with_and_without_a_slash_at_its_end() -> None:
    for path, method in PASSED.items():
        asked = path.replace("{response_id}", "resp_1")

        assert find(method, asked).path == find(method, f"{asked}/").path == asked
        assert find("OPTIONS", asked).is_repeatable
        with pytest.raises(RefusedError) as error:
            find("DELETE", asked)
        assert (error.value.status, error.value.headers) == (405, {"Allow": method})


def test_only_a_cancelled_response_is_not_asked_for_twice() -> None:
    stored = find("GET", "/v1/responses/resp_1")
    cancelled = find("POST", "/v1/responses/resp_1/cancel")

    assert (stored.response_id, cancelled.response_id) == ("resp_1", "resp_1")
    assert (stored.is_repeatable, cancelled.is_repeatable) == (True, False)


def test_paths_of_the_operator_pass_as_they_are_written() -> None:
    assert find("POST", "/plugin/run", frozenset(["/plugin/run"])).path == "/plugin/run"
    with pytest.raises(RefusedError):
        find("POST", "/plugin", frozenset(["/plugin/run"]))


def test_health_is_its_own() -> None:
    assert sorted_paths()[HEALTH].startswith("its own")


def _asked(path: str) -> bytes:
    """A request for a path, with the method of those that pass."""
    body = json.dumps({"model": "a", "prompt": "p"}).encode()
    asked = post(path.replace("{response_id}", "resp_1"), body)
    return asked.replace(b"POST", b"GET", 1) if PASSED.get(path) == "GET" else asked


@pytest.mark.parametrize("which", ["gateway", "door"])
def test_what_the_table_says_is_what_reaches_a_server(which: str) -> None:
    reached: set[str] = set()
    table = sorted_paths()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/is_sleeping":  # the door itself asks
            return web.json_response({"is_sleeping": False})
        reached.add(request.path)
        return web.json_response({})

    async def test() -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(upstream(answer))
            if which == "gateway":
                url, _ = await stack.enter_async_context(gateway_at(server))
            else:
                door = Door({"a": server}, SleepOptions())
                url = await stack.enter_async_context(serving(door.app(), door.front))
            for path, what in table.items():
                reached.clear()
                status = status_of(await ask(url, _asked(path)))
                is_own = which == "door" and path == "/v1/models"
                passes = what.startswith("passed") and not is_own
                expected = path.replace("{response_id}", "resp_1")
                assert reached == ({expected} if passes else set()), path
                assert (status == 200) == (passes or is_own), path

    run(test)
