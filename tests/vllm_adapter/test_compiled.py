"""Engines start in a process in which a planner or a fast engine model has loaded numba."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("numba") is None:  # not imported: it would stay loaded for the engines of other tests
    pytest.skip("needs numba", allow_module_level=True)
pytest.importorskip("vllm.triton_utils.dispatcher")

# In a process of its own, because what is mended stays so.
_PLANNER = """
from sola_sched.planner.attain import loops
from sola_sched.vllm_adapter.compiled import let_vllm_look_through_llvmlite

loops.load()
let_vllm_look_through_llvmlite()
"""
_FAST_MODEL = "from sola_sched.simulator.cluster.fast import instance"
_LOOK = """
from vllm.triton_utils.dispatcher import _rebind_kernels

_rebind_kernels([(object(), object())])
import numba

print(numba.njit(lambda x: x + 1)(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("load", [_PLANNER, _FAST_MODEL])
def test_vllm_looks_through_all_modules_after_numba_has_been_loaded(load: str) -> None:
    code = f"{load}\n{_LOOK}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)

    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr


def test_without_numba_there_is_nothing_to_do() -> None:
    code = (
        "import sys\n"
        "from sola_sched.vllm_adapter.compiled import let_vllm_look_through_llvmlite as look\n"
        "sys.modules.pop('llvmlite.binding.ffi', None)\n"
        "look()\n"
        "print('done')"
    )

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)

    assert done.stdout == "done\n", done.stderr
