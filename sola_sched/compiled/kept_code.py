"""Where compiled functions are kept, and whether all of them are there."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from sola_sched.config.cache_dir import user_cache_dir

_PACKAGE = Path(__file__).parents[1]
#: Files with compiled functions, or with constants of such.
_SOURCES = (
    "compiled/*.py", "core/*.py", "cost/*.py", "planner/attain/*.py", "prediction/length.py",
    "simulator/cluster/step_model.py", "simulator/cluster/fast/*.py",
)  # fmt: skip
_READY = "ready"
#: Functions that this process has compiled and could not keep.
_lacks: list[str] = []
#: What tells processors apart: of x86, and of Arm.
_CPU_FACTS = (
    "model name", "flags", "CPU implementer", "CPU architecture", "CPU variant", "CPU part",
    "CPU revision", "Features",
)  # fmt: skip


@cache
def folder() -> Path:
    """Of these sources as they are now, on this processor, with these versions.

    In the user's cache; where nothing can be written there, in a folder of the user's own for
    temporary files. It is not there, if neither can be written: then nothing is kept.
    """
    name = _digest()
    for parent in (user_cache_dir, _temporary):
        try:
            path = parent() / "compiled" / name
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK) and path.stat().st_uid == os.getuid():
                return path
        except OSError:
            continue
    return Path(os.devnull) / name


def is_ready() -> bool:
    """Whether the policy has been compiled and kept."""
    return (folder() / _READY).exists()


def set_ready() -> None:
    """Tell all processes so, unless something could not be kept."""
    if not _lacks:
        (folder() / _READY).touch()


def cannot_keep(function: str) -> bool:
    """A compiled function could not be written; whether it is the first one of this process."""
    _lacks.append(function)
    return len(_lacks) == 1


def is_damaged(path: Path) -> None:
    """Remove a file that cannot be used, and tell all processes that not all is there."""
    for each in (folder() / _READY, path):
        with suppress(OSError):
            each.unlink(missing_ok=True)


def _temporary() -> Path:
    """A folder that nobody else can write to, or has put there: what lies in it is run."""
    path = Path(tempfile.gettempdir()) / f"sola_sched-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{path} must be a folder of this user's that nobody else can write.")
    return path


def _digest() -> str:
    digest = hashlib.sha256()
    for source in sorted(path for pattern in _SOURCES for path in _PACKAGE.glob(pattern)):
        digest.update(source.read_bytes())
    for fact in (sys.version, version("numba"), version("numpy"), *_processor()):
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


def _processor() -> Iterator[str]:
    """Its name and what it can do."""
    yield platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    for key in _CPU_FACTS:
        yield next((line for line in lines if line.startswith(key)), "")
