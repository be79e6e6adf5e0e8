"""Functions over arrays and records that numba compiles.

Each is plain Python as well: with ``NUMBA_DISABLE_JIT=1`` it runs as it stands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import config, njit, typeof
from numpy.typing import NDArray

from sola_sched.compiled.file_cache import FileCache

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
#: An array of a structured type, and one element of it.
Records = Any
Record = Any

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Of a function that only compiled ones call, as a part of them: they pass on many arrays."""
    return cast(_Function, njit(forceinline=True)(function))


def entry(function: _Function) -> _Function:
    """Of a function that Python calls: what it compiles to stays on disk.

    Each state of the sources has a folder of its own, since the functions that this one calls are
    a part of it; see `kept_code`.
    """
    if config.DISABLE_JIT:
        return function
    try:
        kept = FileCache(function)
    except RuntimeError:  # nowhere to keep it
        return compiled(function)
    dispatcher = njit(function)
    dispatcher._cache = kept  # as `cache=True` does with numba's own
    return cast(_Function, dispatcher)


def as_it_stands(function: Callable[..., object]) -> Any:
    """The Python function that was compiled, for arguments of any types.

    Those that it calls are compiled ones all the same.
    """
    return getattr(function, "py_func", function)


def for_types_of(function: _Function, *args: object) -> _Function:
    """An entry for arguments of these types alone: it does not look at types at each call."""
    if config.DISABLE_JIT:
        return function
    return cast(_Function, cast(Any, function).compile(tuple(map(typeof, args))))


def records_of(dtype: np.dtype[Any], count: int) -> Records:
    """So many records of zeros, whose fields are attributes whether or not code is compiled."""
    records = np.zeros(count, dtype)
    return records.view(np.recarray) if config.DISABLE_JIT else records


def let_vllm_look_through_llvmlite() -> None:
    """Let further engines start in this process.

    When an engine starts, vLLM's CPU build reads ``vars(...).get("kernel")`` of every attribute of
    every loaded module. llvmlite's `lib` answers any name with a function of its library, so for
    ``__dict__`` too, and that has no `get`. Now it answers that one name with an empty table.
    """
    lib = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    functions = getattr(lib, "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}


let_vllm_look_through_llvmlite()
