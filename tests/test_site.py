"""The documentation as a site."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None or not (_ROOT / ".git").exists(),
        reason="mkdocs-material is not installed, or this is no git checkout",
    ),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout without its history, so that building disturbs nothing."""
    copy = tmp_path_factory.mktemp("copy")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (_ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_ROOT / name, copy / name)
    (copy / ".ci" / "site").chmod(0o755)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=copy, check=True)
    return copy


def build(copy: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"VENV": sys.prefix}
    return subprocess.run([".ci/site"], cwd=copy, env=env, capture_output=True, text=True)


def test_every_link_leads_somewhere(copy: Path) -> None:
    done = build(copy)

    assert done.returncode == 0, done.stderr
    for page in ("index.html", "docs/symptoms.html", "docs/options.html"):
        assert "sola_sched" in (copy / "build" / "site" / page).read_text(encoding="utf-8")


def test_one_that_leads_nowhere_ends_it(copy: Path) -> None:
    page = copy / "docs" / "symptoms.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text + "\n[there](nowhere.md)\n", encoding="utf-8")

    done = build(copy)
    page.write_text(text, encoding="utf-8")

    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
