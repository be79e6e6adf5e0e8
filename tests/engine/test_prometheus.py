"""A real Prometheus scrapes a real server under load: every panel has data, and an alert fires."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from eventually import eventually
from http_server import Server, serving
from local_ray import free_port

PROMETHEUS = shutil.which("prometheus")
MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed"),
]

CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ["{target}"]}}]
"""


@dataclass(frozen=True)
class Watched:
    """A server under load, the Prometheus that scrapes it, and the server's options file."""

    server: Server
    url: str
    options: Path

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as response:
            return json.loads(response.read())["data"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    options = folder / "options.json"
    sola = {"ttft_s": 0.5, "tpot_s": 0.05, "classes": {"chat": {"ttft_s": 0.2}}}
    with serving(
        tmp_path_factory.mktemp("server"), {**sola, "options_file": str(options)}
    ) as server:
        port = free_port()
        target = server.url.removeprefix("http://")
        (folder / "prometheus.yml").write_text(CONFIG.format(target=target))
        rules = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
        (folder / "alerts.yml").write_text(re.sub(r"for: \d+[mh]", "for: 0s", rules))
        command = [
            *(str(PROMETHEUS), "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
            stop = threading.Event()
            clients = [
                threading.Thread(target=_ask, args=(server, stop, xargs))
                for xargs in (None, {"slo_class": "chat"}, None)
            ]
            for client in clients:
                client.start()
            try:
                wait_until_ready(process, f"http://127.0.0.1:{port}/-/ready", folder / "log")
                yield Watched(server, f"http://127.0.0.1:{port}", options)
            finally:
                stop.set()
                for client in clients:
                    client.join()
                process.terminate()
                process.wait(30)


def _ask(server: Server, stop: threading.Event, xargs: dict[str, Any] | None) -> None:
    while not stop.is_set():
        server.complete(xargs, max_tokens=20)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    def is_ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"Prometheus did not start:\n{log.read_text()[-2000:]}")
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)

    assert eventually(is_ready)


def _panels() -> list[tuple[str, str]]:
    page = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return [
        (panel["title"], target["expr"])
        for panel in page["panels"]
        for target in panel.get("targets", ())
    ]


def test_every_query_of_the_dashboard_has_data(watched: Watched) -> None:
    empty = []
    for title, query in _panels():
        expr = query.replace("$model", ".*").replace("$__rate_interval", "1m")

        def values(expr: str = expr) -> list[float]:
            found = watched.get("query", query=expr)["result"]
            return [value for each in found if math.isfinite(value := float(each["value"][1]))]

        if not eventually(values, 60.0):
            empty.append((title, query))
    assert empty == []


def test_times_are_shown_by_class(watched: Watched) -> None:
    for name in ("sola_ttft_seconds", "sola_tpot_seconds"):
        expr = f"sum by (slo_class) (rate({name}_count[1m])) > 0"

        def classes(expr: str = expr) -> set[str]:
            found = watched.get("query", query=expr)["result"]
            return {each["metric"]["slo_class"] for each in found}

        assert eventually(lambda look=classes: look() == {"default", "chat"})


def test_a_wrong_options_file_fires_its_alert_until_it_is_mended(watched: Watched) -> None:
    def firing() -> set[str]:
        alerts = watched.get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    assert eventually(lambda: watched.get("rules")["groups"])
    assert "SolaOptionsRefused" not in firing()
    watched.options.write_text('{"ttft_s": -1}')
    assert eventually(lambda: "SolaOptionsRefused" in firing())
    watched.options.unlink()
    assert eventually(lambda: "SolaOptionsRefused" not in firing())


def test_rules_that_speak_of_failures_are_quiet(watched: Watched) -> None:
    groups = eventually(lambda: watched.get("rules")["groups"])
    states = {rule["name"]: rule.get("state") for group in groups for rule in group["rules"]}
    for name in ("SolaPlanningFailed", "SolaPlanningAside", "SolaMetricsAbsent"):
        assert states[name] == "inactive"
