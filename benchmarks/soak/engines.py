"""The servers of the soak: two engines of unlike policies, a cutter before one, and the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.clients import QUIET
from harness.command import ROOT
from soak.paths import FOLDER, ROLE, SESSION

_HELPERS = ROOT / "tests" / "helpers"
_BENCHMARKS = ROOT / "benchmarks"
_CLASSES = {"chat": {"ttft_s": 0.5, "tpot_s": 0.1, "weight": 2}, "batch": {"e2e_s": 30.0}}
_COMMON: dict[str, Any] = {
    "ttft_s": 1.0, "tpot_s": 0.1, "classes": _CLASSES, "load_interval_s": 0.1,
    "log_interval_s": 10.0, "swap": {"mode": "raw", "host_gib": 0.05, "always": True},
}  # fmt: skip
#: Our options of each engine. `alise` refuses nobody and swaps most; `attain` refuses who is late.
ENGINES: dict[str, dict[str, Any]] = {
    "attain": {**_COMMON, "overload": "reject"},
    "alise": {**_COMMON, "policy": "alise"},
}
#: The engine behind the cutter.
CUT = "alise"
_ARGUMENTS = (
    *("--scheduler-cls", "soak.faulty.FaultyScheduler", "--middleware", "soak.middleware.Driven"),
    *("--worker-extension-cls", "soak.faulty.FaultyWorker"),
    *("--scheduling-policy", "priority", "--num-gpu-blocks-override", "40"),
)


@dataclass(frozen=True)
class Servers:
    """What runs.

    Attributes:
        gateway_url, admin_url: Of the gateway.
        urls: Of the engines' own servers, by name.
        options: The options file of each.
        pids: Processes by what they are.
        logs: Of the engines.
    """

    gateway_url: str
    admin_url: str
    urls: dict[str, str]
    options: dict[str, Path]
    pids: dict[str, int]
    logs: dict[str, Path]


@asynccontextmanager
async def servers(folder: Path, cut: Any) -> AsyncIterator[Servers]:
    """Start them all.

    Args:
        folder: Empty; for models, logs and what processes write.
        cut: A context manager that serves a server's streams, and cuts some.
    """
    from http_server import serving

    os.environ.update(QUIET)
    os.environ[FOLDER] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (_BENCHMARKS, _HELPERS)))
    options = {name: folder / f"{name}.json" for name in ENGINES}
    urls: dict[str, str] = {}
    pids: dict[str, int] = {}
    logs: dict[str, Path] = {}
    with ExitStack() as stack:
        for name, sola in ENGINES.items():
            os.environ[ROLE] = name
            (folder / name).mkdir()
            before = _descendants(os.getpid())
            config = {**sola, "options_file": str(options[name])}
            server = await asyncio.to_thread(
                stack.enter_context, serving(folder / name, config, *_ARGUMENTS)
            )
            urls[name], logs[name] = server.url, server.log
            pids |= _named(name, _descendants(os.getpid()) - before)
        async with AsyncExitStack() as more:
            replicas = dict(urls)
            replicas[CUT] = await more.enter_async_context(cut(urls[CUT]))
            gateway, admin, pid = stack.enter_context(_gateway(list(replicas.values())))
            yield Servers(gateway, admin, urls, options, {**pids, "gateway": pid}, logs)


@contextmanager
def _gateway(urls: list[str]) -> Iterator[tuple[str, str, int]]:
    command = [
        *(sys.executable, "-P", "-m", "soak.gateway", "gateway", "--port", "0"),
        *("--pass-path", SESSION),
        *(part for url in urls for part in ("--replica", url)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url, admin = (process.stdout.readline().split()[-1] for _ in range(2))
        yield url, admin, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _named(name: str, pids: set[int]) -> dict[str, int]:
    """The server's process, its engine's, and its worker's."""
    found = {}
    for pid in sorted(pids):
        command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        if _parent(pid) == os.getpid():
            found[f"{name} server"] = pid
        elif "EngineCore" in command:
            found[f"{name} engine"] = pid
        elif "Worker" in command:
            found[f"{name} worker"] = pid
    if len(found) != 3:
        raise RuntimeError(f"a server must have three processes (got {found}).")
    return found


def _parent(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def _descendants(pid: int) -> set[int]:
    every = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    parents = {each: _parent(each) for each in every}
    found = {pid}
    while more := {each for each in every if parents[each] in found} - found:
        found |= more
    return found - {pid}


def of_process(pid: int) -> dict[str, int]:
    """Memory, threads and open files of a process."""
    root = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1)
        for line in (root / "status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    return {
        "memory_kib": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "files": len(list((root / "fd").iterdir())),
    }
