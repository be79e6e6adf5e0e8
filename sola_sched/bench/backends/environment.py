"""Environment defaults that have to be set before vLLM and torch are imported."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import logging
import os
import warnings
from pathlib import Path

from sola_sched.errors import ConfigError

_LEVEL = "VLLM_LOGGING_LEVEL"
_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    _LEVEL: "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# One thread: two OpenMP threads that spin next to any other work cost far more than they give.
_CPU = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
}


def has_accelerator() -> bool:
    """True if vLLM will find a GPU: a device node, and a torch that is not CPU-only."""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = ""
    if torch_version.endswith("+cpu") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd") or glob.glob("/dev/dxg"))


def require_vllm(what: str, instead: str) -> None:
    """Find out before the work starts whether vLLM's schedulers can be had.

    Args:
        what: Needs them.
        instead: What to do without.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"{what} needs vLLM, which is not installed; install it, or {instead}.")


def quiet() -> None:
    """Have vLLM tell errors alone, unless the user has said how much it is to tell."""
    if _LEVEL not in os.environ:
        os.environ[_LEVEL] = _ALWAYS[_LEVEL]
        _quiet()


def _quiet() -> None:
    """The same while vLLM is imported, before it reads the environment."""
    logging.getLogger("vllm").setLevel(_ALWAYS[_LEVEL])


def prepare(model: str | None, *, is_random: bool = False) -> dict[str, str]:
    """Set what the user has not set; return what was set.

    Args:
        model: Local folder or model name, or None.
        is_random: The model is the random one, which needs nothing from a hub.
    """
    wanted = dict(_ALWAYS)
    if not has_accelerator():
        wanted |= _CPU
    if is_random or (model is not None and Path(model).is_dir()):
        wanted["HF_HUB_OFFLINE"] = "1"
    changed = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(changed)
    if _LEVEL in changed:
        _quiet()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\..*")
    return changed
