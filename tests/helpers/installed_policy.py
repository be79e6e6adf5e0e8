"""A policy of somebody else, installed for a test as a distribution with an entry point."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sola_sched.config import policies

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@contextmanager
def installed_policy(folder: Path, name: str, value: str) -> Iterator[None]:
    """Install an entry point `name` that leads to `value`, e.g. ``module:Class`` of an example."""
    info = folder / f"{name}_policy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{policies.GROUP}]\n{name} = {value}\n")
    paths = [str(folder), str(EXAMPLES)]
    sys.path[:0] = paths
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        policies._load.cache_clear()
