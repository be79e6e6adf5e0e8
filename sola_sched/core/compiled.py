"""Loops over arrays, compiled where that is possible, and the types of these arrays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

#: Types of numba by those of the annotations.
_TYPES = {
    "IntArray": "int64[::1]", "FloatArray": "float64[::1]", "BoolArray": "boolean[::1]",
    "int": "int64", "float": "float64",
}  # fmt: skip


def compile_loops(*loops: Callable[..., Any]) -> SimpleNamespace:
    """The functions by name, compiled if numba is there, as with every vLLM, else as they are.

    A tenth of a second each, several the first time on a machine.

    Args:
        loops: Every argument is annotated as one of `IntArray`, `FloatArray`, `BoolArray`, int
            and float; the modules are to have ``from __future__ import annotations``.
    """
    try:
        import numba
    except ImportError:
        return SimpleNamespace(**{loop.__name__: loop for loop in loops})
    compiled = {}
    for loop in loops:
        types = [_TYPES[kind] for name, kind in loop.__annotations__.items() if name != "return"]
        signature = f"({', '.join(types)},)"
        try:
            compiled[loop.__name__] = numba.njit(signature, cache=True)(loop)
        except RuntimeError:  # nowhere to keep what is compiled
            compiled[loop.__name__] = numba.njit(signature)(loop)
    return SimpleNamespace(**compiled)
