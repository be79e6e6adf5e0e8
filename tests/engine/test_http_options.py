"""Options that change while the real server runs."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from eventually import eventually
from http_server import Server, serving

from sola_sched.top.cli import main as top

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


def test_targets_that_nothing_reads_are_said_once(server: Server) -> None:
    body = {"model": "tiny", "prompt": "to be", "max_tokens": 3, "ttft_slo_ms": 5}
    headers = {"Content-Type": "application/json", "x-slo-ttft-ms": "200"}
    for _ in range(3):
        time.sleep(1.1)  # one body a second is looked at
        request = urllib.request.Request(
            f"{server.url}/v1/completions", data=json.dumps(body).encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200
    log = server.log.read_text()
    assert log.count("nothing reads the header 'x-slo-ttft-ms'") == 1
    assert log.count("nothing reads 'ttft_slo_ms' at the top of a request") == 1


def test_targets_that_can_hardly_be_seconds_are_doubted_before_the_model_loads(
    server: Server,
) -> None:
    log = server.log.read_text()
    assert "'tpot_s' is 10 seconds, which is taken as it is; for 10 milliseconds" in log
    assert log.index("'tpot_s' is 10 seconds") < log.index("Starting to load model")


def test_top_prints_what_the_server_does(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top([server.url, "--once", "--every", "0.1"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^{server.url}: (-|[\d.]+%) in time, ", text)
    assert "    chat: - in time, 0.0 requests/s" in text


def test_top_shows_what_the_server_does(server: Server) -> None:
    pytest.importorskip("textual")
    from textual.widgets import DataTable

    from sola_sched.top.metrics import fetch
    from sola_sched.top.screen import Top

    async def view() -> None:
        app = Top([server.url], 3600.0, fetch)
        async with app.run_test(size=(140, 40)) as pilot:
            await asyncio.to_thread(server.complete, {"ttft_slo_ms": 1e-3})
            await asyncio.to_thread(time.sleep, 1.5)  # until its report has come
            await asyncio.to_thread(server.complete, None)
            await pilot.press("r")
            await pilot.pause()
            servers, classes, late = (
                app.query_one(f"#{name}", DataTable) for name in ("servers", "classes", "late")
            )
            assert str(servers.get_row_at(0)[1]) == "tiny"
            names = {str(classes.get_row_at(place)[1]) for place in range(classes.row_count)}
            assert names >= {"chat", "default"}
            assert "ttft" in str(late.get_row_at(0)[4])

    asyncio.run(view())
