"""How commands end: by Ctrl-C, where nobody reads on, and where letters cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fates import a_fate

import sola_sched
from sola_sched.config.program import EXIT_INTERRUPTED, EXIT_UNREAD, run

ROOT = Path(sola_sched.__file__).parents[1]
COMMANDS = sorted(
    [*ROOT.glob("sola_sched/*/__main__.py"), *ROOT.glob("length_predictor/__main__.py")]
)


def unread(*command: str) -> tuple[int, str]:
    """The exit code and errors of a command whose output nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, "-P", *command], stdout=writes, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writes)
    return done.returncode, done.stderr


@pytest.fixture
def window(tmp_path: Path) -> str:
    fates = [a_fate(f"été-{place}", arrival_s=10.0 + place, first_token_s=10.5 + place)
             for place in range(40)]  # fmt: skip
    fates += [a_fate("été-late", end="missed", first_token_s=13.0)]
    path = tmp_path / "window.json"
    path.write_text(json.dumps({"requests": fates, "engine": None}), encoding="utf-8")
    return str(path)


def test_ctrl_c_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    assert run(main) == EXIT_INTERRUPTED == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_the_exit_code_is_that_of_the_command() -> None:
    assert [run(lambda code=code: code) for code in (0, 1, 2, None)] == [0, 1, 2, 0]  # type: ignore[misc]
    with pytest.raises(SystemExit) as ended:
        run(lambda: sys.exit(2))
    assert ended.value.code == 2


@pytest.mark.parametrize("length", [1, 1_000_000])  # what is still in a buffer, and more
def test_a_reader_that_leaves_ends_a_command_in_silence(length: int) -> None:
    program = (
        "import sys; from sola_sched.config.program import run; "
        f"sys.exit(run(lambda: print('x' * {length})))"
    )
    assert unread("-c", program) == (EXIT_UNREAD, "")


@pytest.mark.parametrize("tool", ["compare", "explain", "top"])
def test_tools_end_in_silence_where_nobody_reads(tool: str, window: str) -> None:
    given = {
        "compare": [window, window],
        "explain": [window],
        "top": ["--once", "--every", "0.01", "http://127.0.0.1:9"],
    }[tool]
    assert unread("-m", f"sola_sched.{tool}", *given) == (EXIT_UNREAD, "")


def test_help_that_nobody_reads_is_no_error() -> None:
    assert unread("-m", "sola_sched.compare", "--help")[1] == ""


def test_letters_that_the_terminal_lacks_are_written_as_numbers(window: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sola_sched.explain", window],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "  \\xe9t\\xe9-late (default): It was late" in done.stdout


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: str(path.parent.name))
def test_each_command_ends_so(path: Path) -> None:
    assert (
        path.read_text(encoding="utf-8")
        .rstrip()
        .splitlines()[-1]
        .lstrip()
        .startswith("sys.exit(run(")
    )


@pytest.mark.parametrize(
    "tool",
    [
        "adaptive_placement",
        "bench",
        "colocation",
        "compare",
        "doctor",
        "explain",
        "length_predictor",
        "plan",
        "profile",
        "serving",
        "top",
    ],
)
def test_ctrl_c_while_a_tool_is_loaded_is_a_line_too(tool: str) -> None:
    program = f"""
import importlib.abc, runpy, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("sola_sched.{tool}.") and not name.endswith("__main__"):
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
sys.argv = ["{tool}"]
runpy.run_module("sola_sched.{tool}", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "Interrupted.\n")
