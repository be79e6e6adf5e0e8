"""What has to be done for vLLM once numba is loaded, by a planner or by a fast engine model."""

from __future__ import annotations

import sys


def let_vllm_look_through_llvmlite() -> None:
    """Let further engines start in this process; harmless where numba is not loaded.

    When an engine starts, vLLM's CPU build reads ``vars(...).get("kernel")`` of every attribute of
    every loaded module. llvmlite's `lib` answers any name with a function of its library, so for
    ``__dict__`` too, and that has no `get`. Now it answers that one name with an empty table.
    """
    lib = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    functions = getattr(lib, "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}
