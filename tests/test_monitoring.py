"""The dashboard is what its source makes, rules fire when they should, and all metrics exist."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MONITORING = ROOT / "examples" / "monitoring"
PROMTOOL = shutil.which("promtool")
#: What Prometheus makes of a histogram.
_OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def dashboard() -> Any:
    return json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))


def queries() -> list[str]:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) >= 12
    return [target["expr"] for panel in panels for target in panel["targets"]]


def documented() -> set[str]:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(sola_\w+)` \|", text, re.M))


def test_the_dashboard_is_what_its_source_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    source = runpy.run_path(str(MONITORING / "dashboard.py"))
    assert json.loads(source["build"]()) == dashboard()


def test_engines_of_several_servers_are_told_apart() -> None:
    """Each server's engines are 0, 1, ..."""
    targets = [target for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    of_engines = [each for each in targets if "engine" in each["expr"]]

    assert len(of_engines) == 2
    for each in of_engines:
        assert "by (instance, engine)" in each["expr"]
        assert each["legendFormat"] == "{{instance}} engine {{engine}}"


@pytest.mark.parametrize("source", ["dashboard", "alerts.yml"])
def test_the_metrics_exist(source: str) -> None:
    text = (
        "\n".join(queries())
        if source == "dashboard"
        else (MONITORING / source).read_text(encoding="utf-8")
    )
    named = {_OF_HISTOGRAM.sub("", name) for name in re.findall(r"\bsola_\w+(?=[{\[) ])", text)}
    named -= {"sola_sched"}
    assert len(named) >= 5
    assert named <= documented()


def test_every_metric_is_shown_or_alerted_to() -> None:
    text = "\n".join(queries()) + (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    # Absent with the usual predictor, so a panel would be empty.
    assert {name for name in documented() if name not in text} == {"sola_prediction_error"}


def test_every_alert_is_tested() -> None:
    alerts, tests = (
        (MONITORING / name).read_text(encoding="utf-8")
        for name in ("alerts.yml", "alerts_test.yml")
    )
    names = re.findall(r"- alert: (\w+)", alerts)
    assert len(names) >= 9
    fired = re.findall(r"alertname: (\w+)\n\s+exp_alerts:", tests)
    assert set(names) == set(fired)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool, of Prometheus, is not installed")
@pytest.mark.parametrize(
    "arguments", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")]
)
def test_rules_fire_when_they_should(arguments: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=MONITORING, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
