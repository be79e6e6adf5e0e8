"""The first start on a machine: the policy is compiled while the engine serves in its own order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, step_until, warm_up

import sola_sched
from sola_sched.compiled import kept_code
from sola_sched.simulator import VirtualRequest
from sola_sched.vllm_adapter import first_start

pytestmark = pytest.mark.vllm

COMPILE = [sys.executable, "-P", "-m", "sola_sched.vllm_adapter.first_start"]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    kept_code.folder.cache_clear()
    monkeypatch.delenv("SOLA_SCHED_COMPILES", raising=False)
    yield
    kept_code.folder.cache_clear()


def test_steps_are_in_vllms_order_until_the_policy_has_been_compiled(monkeypatch) -> None:
    num_looks = 0

    def is_compiling() -> bool:
        nonlocal num_looks
        num_looks += 1
        return num_looks < 6

    monkeypatch.setattr(first_start, "is_compiling", is_compiling)
    engine = make_small_engine(sola_sched.Scheduler, {"ttft_s": 1.0, "tpot_s": 0.05})
    assert engine.scheduler.sola_planner is None
    warm_up(engine)
    for number in range(8):
        engine.add(VirtualRequest(f"r{number}", engine.clock.now, prompt_len=200, output_len=40))
        step_until(engine, lambda: False)

    assert all(engine.record(f"r{number}").is_finished for number in range(8))
    assert num_looks == 6
    stats = engine.scheduler.sola_stats()
    assert sum(stats["problems"].values()) > 20, "planned since"
    assert not stats["failures"]


@pytest.mark.injects_failures
def test_a_policy_that_cannot_be_made_ends_nothing(monkeypatch) -> None:
    monkeypatch.setattr(first_start, "is_compiling", lambda: True)
    engine = make_small_engine(sola_sched.Scheduler, {"ttft_s": 1.0, "tpot_s": 0.05})
    num_tries = 0

    def fail() -> None:
        nonlocal num_tries
        num_tries += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine.scheduler, "sola_new_planner", fail)
    for number in range(4):
        engine.add(VirtualRequest(f"r{number}", engine.clock.now, prompt_len=200, output_len=40))
    step_until(engine, lambda: False)

    assert all(engine.record(f"r{number}").is_finished for number in range(4))
    assert num_tries == 1
    assert engine.scheduler.sola_stats()["failures"] == {"making the policy": 1}
    assert engine.scheduler._planning.why_unplanned(sola_sched.StepPlan()) == "failed"


def test_a_process_that_dies_is_followed_by_another_and_at_last_by_this_one(
    monkeypatch, tmp_path: Path, fresh
) -> None:
    """What compiles may be killed while the model is loaded: requests do not wait for it then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SOLA_SCHED_COMPILES", "1")
    monkeypatch.setattr(first_start, "_again", [])
    running: list[bool] = []

    class Process:
        def __init__(self, *args: object, **options: object) -> None:
            running.append(True)
            self.number = len(running) - 1

        def poll(self) -> int | None:
            return None if running[self.number] else -9

    monkeypatch.setattr(subprocess, "Popen", Process)

    assert first_start.is_compiling()
    assert first_start.is_compiling()
    assert running == [True], "it runs"
    running[0] = False
    assert first_start.is_compiling()
    running[1:] = [False]
    assert not first_start.is_compiling(), "twice is enough"
    assert len(running) == 2


def test_where_the_cache_is_read_only_code_is_kept_elsewhere(monkeypatch, tmp_path, fresh) -> None:
    (tmp_path / "home").touch()  # no folder can be made below it, by root either
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert kept_code.folder().parents[1] == tmp_path / f"sola_sched-{os.getuid()}"
    assert not kept_code.is_ready()
    kept_code.set_ready()
    assert kept_code.is_ready()


def test_no_code_is_taken_from_a_folder_that_others_can_write(monkeypatch, tmp_path, fresh) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"sola_sched-{os.getuid()}").mkdir()
    (tmp_path / f"sola_sched-{os.getuid()}").chmod(0o777)

    assert not kept_code.folder().exists()


def test_an_engine_starts_where_nothing_can_be_kept(monkeypatch, tmp_path, fresh) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "home"))
    monkeypatch.setenv("SOLA_SCHED_COMPILES", "1")

    assert not kept_code.is_ready()
    assert not first_start.is_compiling()


def test_nothing_is_started_where_the_policy_has_been_compiled(monkeypatch, fresh) -> None:
    assert kept_code.is_ready(), "the test run compiles it first"
    monkeypatch.setattr(subprocess, "Popen", None)

    first_start.start()

    assert not first_start.is_compiling()


@pytest.mark.slow
def test_a_process_of_its_own_compiles_and_then_the_engine_plans(
    monkeypatch, tmp_path: Path, fresh
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first_start.start()
    started = os.environ.get("SOLA_SCHED_COMPILES")
    subprocess.run(COMPILE, check=True)  # waits for the one that was started, or does its work

    assert started == "1"
    assert kept_code.is_ready()
    assert not first_start.is_compiling()
    assert list((tmp_path / "sola_sched" / "compiled").rglob("*decide*.nbc"))
