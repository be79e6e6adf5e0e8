"""Where compiled functions are kept, and whether all of them are there."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator
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


@cache
def folder() -> Path:
    """Of these sources as they are now, on this processor, with these versions.

    In the user's cache; where nothing can be written there, in a folder of the user's own for
    temporary files. It may not be there, if neither can be written: then nothing is kept.
    """
    name = _digest()
    for parent in (user_cache_dir, _temporary):
        try:
            path = parent() / "compiled" / name
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(path, os.W_OK) and path.stat().st_uid == os.getuid():
            return path
    return user_cache_dir() / "compiled" / name


def is_ready() -> bool:
    """Whether the policy has been compiled and kept."""
    return (folder() / _READY).exists()


def set_ready() -> None:
    """Tell all processes so."""
    (folder() / _READY).touch()


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
    for key in ("model name", "flags"):
        yield next((line for line in lines if line.startswith(key)), "")
