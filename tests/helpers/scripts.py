"""Scripts of `benchmarks/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load_script(folder: str, name: str) -> ModuleType:
    """The script `name` of a folder of `benchmarks/`, imported under its own name."""
    spec = importlib.util.spec_from_file_location(name, _BENCHMARKS / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    sys.path.insert(0, str(_BENCHMARKS / folder))  # for the scripts that it imports
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(_BENCHMARKS / folder))
    return module
