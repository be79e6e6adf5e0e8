"""How the fast model is compiled, and where the machine code is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

from numba import config, njit

from sola_sched.config.cache_dir import user_cache_dir
from sola_sched.core import traffic
from sola_sched.planner.attain import tuning
from sola_sched.prediction import length
from sola_sched.simulator.cluster import step_model
from sola_sched.vllm_adapter.compiled import let_vllm_look_through_llvmlite

let_vllm_look_through_llvmlite()

#: Modules of which compiled functions have constants inside.
_CONSTANTS = (length, step_model, traffic, tuning)

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Of a function that only compiled ones call."""
    return cast(_Function, njit(function))


def entry(function: _Function) -> _Function:
    """Of a function that Python calls: what it and those below it compile to stays on disk.

    Numba keeps machine code until the file of the function changes, whatever happens to the
    functions below it. So each state of the sources has a folder of its own.
    """
    before, config.CACHE_DIR = config.CACHE_DIR, _folder()
    try:
        return cast(_Function, njit(cache=True)(function))
    except RuntimeError:  # nowhere to keep it
        return compiled(function)
    finally:
        config.CACHE_DIR = before


@cache
def _folder() -> str:
    sources = [*sorted(Path(__file__).parent.glob("*.py"))]
    sources += [Path(str(module.__file__)) for module in _CONSTANTS]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    return str(user_cache_dir() / "compiled" / digest.hexdigest()[:16])
