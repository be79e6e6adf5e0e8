"""Settings for the whole test run, and skips for what this machine does not have.

Shared builders belong in ``tests/helpers/<module>.py``; tests import them as ``<module>``.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from hypothesis import settings

from sola_sched.compiled import kept_code
from sola_sched.vllm_adapter.guard import Guard

# How long an example takes depends on what else the machine does; times are for `-m timing`.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the policy once, or every process would at its first test."""
    if not hasattr(config, "workerinput") and not kept_code.is_ready():
        command = [sys.executable, "-P", "-m", "sola_sched.vllm_adapter.first_start"]
        subprocess.run(command, check=True)


def _has_gpu() -> bool:
    """Whether the driver lists a device; asked without importing torch."""
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and listing.stdout.startswith("GPU")


HAS_GPU = _has_gpu()

# vLLM, torch and Triton read these when they are imported, hence before any test module is.
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the test's own process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
if not HAS_GPU:
    _ENVIRONMENT |= {
        # Two OpenMP threads that spin for each other slow a busy machine down many times.
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",  # with n-gram drafts vLLM gives OpenMP as many
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

_NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (lambda: HAS_GPU, "needs a CUDA device"),
    "ray": (lambda: importlib.util.find_spec("ray") is not None, "needs Ray"),
    "vllm": (lambda: importlib.util.find_spec("vllm") is not None, "needs vLLM"),
}


@pytest.fixture(scope="session", autouse=True)
def _small_heap() -> Iterator[None]:
    """Spare the collector what is imported: it is never garbage, and takes half a second to search.

    An engine of vLLM searches the whole heap seven times, and would also freeze and unfreeze it.
    """
    gc.collect()
    gc.freeze()
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"):
        yield


@pytest.fixture(autouse=True)
def _vllm_has_set_up_its_log(request: pytest.FixtureRequest) -> None:
    """vLLM sets up its log when it is imported or, from 0.32 on, with the first engine.

    It takes away the handlers that there are by then. Within a test that would be the handler of
    `caplog`, so that the first test of a run would see no lines.
    """
    if "caplog" in request.fixturenames and request.node.get_closest_marker("vllm"):
        log = pytest.importorskip("vllm.logger")
        if hasattr(log, "configure_logging_if_needed"):
            from vllm.config.logging import LoggingConfig

            log.configure_logging_if_needed(LoggingConfig())


@pytest.fixture(autouse=True)
def _nothing_fails_unseen(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The engine goes on when the scheduler fails; a test must not, unless it injects failures."""
    if request.node.get_closest_marker("injects_failures"):
        yield
        return
    failures: list[str] = []

    def fail(_: Guard, doing: str, error: BaseException) -> None:
        failures.append("".join(traceback.format_exception(error)))
        raise error

    monkeypatch.setattr(Guard, "failed", fail)
    monkeypatch.setattr(Guard, "failed_beside", fail)
    yield
    assert not failures, failures[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, each test that is marked for something missing here."""
    skips = {
        marker: pytest.mark.skip(reason=reason)
        for marker, (is_present, reason) in _NEEDS.items()
        if not is_present()
    }
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("slow"):
            raise pytest.UsageError(f"A long test must be slow too (got {item.nodeid}); mark it.")
        for marker, skip in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)
