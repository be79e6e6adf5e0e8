"""Compiles the policy while an engine loads its model, the first time on a machine.

Compiling takes half a minute of one core, once for each version of this package. It is done in a
process of its own, which `vllm serve` starts first of all: ``python -m
sola_sched.vllm_adapter.first_start``. An engine that is ready sooner serves in vLLM's own order
until it has ended.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

from sola_sched.compiled import kept_code

#: Set for the processes of an engine for which the policy is being compiled.
_VARIABLE = "SOLA_SCHED_COMPILES"
#: Processes that this one has started, after another one had ended without having compiled.
_again: list[subprocess.Popen[bytes]] = []
_MOST_AGAIN = 2


def start() -> None:
    """Compile in a process of its own, if need be; for the process that starts an engine."""
    if kept_code.is_ready() or os.environ.get(_VARIABLE):
        return
    os.environ[_VARIABLE] = "1"
    _start_process()


def _start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def is_compiling() -> bool:
    """Whether the policy of this engine is still being compiled elsewhere.

    Where the process that does so has ended too soon, as for want of memory while the model was
    loaded, another one is started: compiled in this process, it would hold up all requests.
    """
    if not os.environ.get(_VARIABLE) or kept_code.is_ready():
        return False
    if _again and _again[-1].poll() is None:
        return True
    try:
        with open(kept_code.folder() / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nothing can be kept
        return False
    if kept_code.is_ready() or len(_again) == _MOST_AGAIN:
        return False
    _again.append(_start_process())
    return True


def compile_all() -> None:
    """Compile what is not kept yet; if another process is at it, wait for that."""
    from sola_sched.config.sola_config import SolaConfig
    from sola_sched.core.steps import warm_up
    from sola_sched.planner.attain import AttainPlanner

    with open(kept_code.folder() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept_code.is_ready():
            warm_up()
            AttainPlanner(SolaConfig())
            kept_code.set_ready()


if __name__ == "__main__":
    compile_all()
