"""Options that change while the real server runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from http_server import Server, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS: dict[str, Any] = {"ttft_s": 100.0, "tpot_s": 10.0, "classes": {"chat": {"ttft_s": 50.0}}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options") / "options.json"


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {**OPTIONS, "options_file": str(path)}
    with serving(tmp_path_factory.mktemp("server"), options) as server:
        for _ in range(6):  # until step times are known
            assert server.complete(None)[0] == 200
        yield server


@pytest.fixture(autouse=True)
def _as_at_start(path: Path) -> Iterator[None]:
    yield
    path.unlink(missing_ok=True)


def write(path: Path, options: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(options if isinstance(options, str) else json.dumps(options))
    beside.rename(path)


def in_force(server: Server) -> dict[str, Any]:
    return server.ask("/sola/options").json


def last_fate(server: Server, answer: dict[str, Any]) -> dict[str, Any]:
    """What became of a request, once its report has come."""
    return eventually(lambda: server.ask(f"/sola/requests/{answer['id']}").json["requests"][0])


def eventually(look: Callable[[], Any]) -> Any:
    limit = time.monotonic() + 30
    while True:
        try:
            found = look()
        except KeyError:
            found = None
        if found or time.monotonic() > limit:
            return found
        time.sleep(0.1)


def num_shadow(server: Server) -> float:
    found = re.search(
        r'^sola_steps_unplanned_total\{.*reason="shadow".*\} (\S+)$',
        server.ask("/metrics").text,
        re.M,
    )
    return float(found[1]) if found else 0.0


def test_the_options_in_force_are_told(server: Server, path: Path) -> None:
    assert in_force(server) == {"options": OPTIONS, "options_file": str(path), "problem": None}


def test_targets_and_classes_change_for_the_next_request(server: Server, path: Path) -> None:
    assert server.complete({"slo_class": "batch"})[0] == 400

    write(path, {"ttft_s": 60.0, "classes": {"batch": {"e2e_s": 70.0}}})

    status, of_class = server.complete({"slo_class": "batch"})
    assert status == 200
    assert server.complete({"slo_class": "chat"})[0] == 400
    _, usual = server.complete(None)
    fate = last_fate(server, of_class)
    assert (fate["slo_class"], fate["ttft_s"], fate["e2e_s"]) == ("batch", None, 70.0)
    assert last_fate(server, usual)["ttft_s"] == 60.0
    assert in_force(server)["options"]["ttft_s"] == 60.0
    engine = server.ask("/sola/requests").json["engine"]
    assert engine["options"]["ttft_s"] == 60.0

    path.unlink()
    _, usual = server.complete(None)
    assert last_fate(server, usual)["ttft_s"] == 100.0


def test_a_wrong_file_changes_nothing_and_is_said_once(server: Server, path: Path) -> None:
    write(path, {"ttft_s": 60.0, "overload": "reject"})

    _, answer = server.complete(None)
    server.complete(None)

    assert last_fate(server, answer)["ttft_s"] == 100.0
    told = in_force(server)
    assert told["options"] == OPTIONS
    assert "'overload' cannot change while the server runs" in told["problem"]
    lines = [line for line in server.log.read_text().splitlines() if "'overload' cannot" in line]
    assert len(lines) == 1
    assert "ERROR" in lines[0]


def test_planning_goes_off_and_on(server: Server, path: Path) -> None:
    before = num_shadow(server)
    server.complete(None)
    assert num_shadow(server) == before

    write(path, {"steer": False})
    server.complete(None)

    assert eventually(lambda: num_shadow(server) > before)
    write(path, {"steer": True})
    server.complete(None)
    time.sleep(1.5)  # what has been counted by then has come
    server.complete(None)
    off = num_shadow(server)
    server.complete(None)
    time.sleep(1.5)
    assert num_shadow(server) == off
