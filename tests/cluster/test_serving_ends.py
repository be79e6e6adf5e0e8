"""`python -m sola_sched.serving ray` on a cluster that others use too, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray.serve")

from local_ray import local_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ANSWER_S = 6
#: The command with engines that compute nothing.
COMMAND = f"""
from light_engine import LightEngine
from sola_sched.serving import cli as command, ray_app
ray_app.Engine = LightEngine
command._check_options = lambda _: None
command.main(["ray", "m", "--num-replicas", "1", "--port", PORT, "--answer_s={ANSWER_S}",
              "--address", ADDRESS])
"""


class Other:
    """An application of somebody else."""

    def __call__(self) -> str:
        return "here"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster on which another application runs."""
    import ray
    from ray import serve

    with local_ray():
        serve.start(proxy_location="Disabled")
        other = serve.deployment(Other).options(ray_actor_options={"num_cpus": 0})
        serve.run(other.bind(), name="other", route_prefix=None)
        yield ray.get_runtime_context().gcs_address


def _start(address: str, port: int, log: Path) -> subprocess.Popen[str]:
    code = COMMAND.replace("PORT", repr(str(port))).replace("ADDRESS", repr(address))
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=errors, text=True
        )


def test_what_runs_is_answered_and_other_applications_stay(address: str, tmp_path: Path) -> None:
    from ray import serve

    process = _start(address, 0, tmp_path / "log")
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    url = next(line for line in lines if line.startswith("gateway: ")).split()[1]
    assert set(serve.status().applications) == {"other", "sola"}
    answers: list[int] = []

    def ask() -> None:
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({"model": "m", "prompt": "p"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answers.append(answer.status)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(ANSWER_S / 3)

    process.terminate()

    asking.join()
    assert answers == [200]
    assert process.wait(120) == 0
    assert set(serve.status().applications) == {"other"}
    assert serve.get_app_handle("other").remote().result() == "here"


def test_what_cannot_start_is_said_in_a_line_and_leaves_nothing(
    address: str, tmp_path: Path
) -> None:
    import socket

    from ray import serve

    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = _start(address, taken.getsockname()[1], log)
        assert process.wait(300) == 2

    last = log.read_text().strip().splitlines()[-1]
    assert last.startswith("error: Ray Serve must be able to start the application (")
    assert set(serve.status().applications) == {"other"}
