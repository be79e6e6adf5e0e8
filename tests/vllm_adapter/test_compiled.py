"""Engines start in a process in which a planner or a fast engine model has loaded numba."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm.triton_utils.dispatcher")

# In a process of its own, because what is mended stays so.
_PLANNER = """
from sola_sched.config.sola_config import SolaConfig
from sola_sched.planner import make_planner

make_planner(SolaConfig())
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
