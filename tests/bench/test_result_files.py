"""Results are saved, or found to be unsavable before the first run, or printed: never lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import FixedBackend

from sola_sched.bench import calibrate, plan
from sola_sched.bench.cli import main
from sola_sched.bench.report import plots, result_files, results
from sola_sched.config.output_file import require_writable
from sola_sched.errors import ConfigError
from sola_sched.workloads.datasets import ModelLimits

RUN = ["--schedulers", "stock:64", "stock:128", "--request-rate", "5", "--num-prompts", "6",
       "--slo", "ttft:500", "tpot:50", "--disable-tqdm"]  # fmt: skip


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FixedBackend:
    made = FixedBackend()
    limits = ModelLimits(max_model_len=256, vocab_size=100)
    monkeypatch.setattr(plan, "_backend", lambda args, say: (made, limits))
    return made


@pytest.mark.parametrize(
    ("folder", "more", "rule"),
    [
        ("taken", [], "'--result-dir' must name a folder that can be written"),
        ("taken/below", [], "'--result-dir' must name a folder"),
        ("/dev/null/x", [], "'--result-dir' must name a folder"),
        ("fine", ["--result-filename", "."], "'--result-filename' must name a file"),
        ("fine", ["--result-filename", "x" * 300], "'--result-filename' must name a file"),
    ],
)
def test_what_cannot_be_written_is_found_before_the_first_run(
    backend: FixedBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str,
    more: list[str], rule: str,
) -> None:  # fmt: skip
    (tmp_path / "taken").write_text("a file")

    assert main([*RUN, *more, "--result-dir", str(tmp_path / folder)]) == 2

    assert backend.calls == []
    err = capsys.readouterr().err
    assert rule in err
    assert len(err.splitlines()) == 1


def test_a_trial_leaves_files_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    require_writable(path, "--x")
    assert list(path.parent.iterdir()) == []

    path.write_text("{}")
    require_writable(path, "--x")
    assert path.read_text() == "{}"

    with pytest.raises(ConfigError, match="'--x' must name a file"):
        require_writable(tmp_path, "--x")


def test_a_result_that_cannot_be_saved_is_kept_and_saved_later(
    backend: FixedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    save, fails = results.save, [True]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if fails:
            fails.pop()
            raise OSError(28, "No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(result_files.results, "save", failing)

    assert main([*RUN, "--result-dir", str(tmp_path), "--result-filename", "a.json"]) == 0

    assert len(backend.calls) == 2
    saved = [json.loads(line) for line in (tmp_path / "a.json").read_text().splitlines()]
    assert [run["scheduler"]["label"] for run in saved] == ["stock:64", "stock:128"]
    assert "No space left on device" in capsys.readouterr().out


def test_results_that_stay_unsaved_are_printed(
    backend: FixedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result_files.results, "save", full)
    monkeypatch.setattr(plots, "save", full)

    assert main([*RUN, "--result-dir", str(tmp_path)]) == 1

    out = capsys.readouterr().out
    printed = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [run["scheduler"]["label"] for run in printed] == ["stock:64", "stock:128"]
    assert all(run["attainment"] == 1.0 for run in printed)
    assert "The plots could not be saved" in out


def test_no_result_takes_the_place_of_another_of_the_same_run(
    backend: FixedBackend, tmp_path: Path
) -> None:
    """Rates that are written alike, in one second."""
    given = [*RUN, "--schedulers", "stock:64", "--request-rate", "5.0001", "5.0002", "5.0003"]

    assert main([*given, "--result-dir", str(tmp_path)]) == 0

    saved = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(run["request_rate"] for run in saved) == [5.0001, 5.0002, 5.0003]


def test_nothing_is_written_where_nothing_is_to_be_saved(
    backend: FixedBackend, tmp_path: Path
) -> None:
    folder = tmp_path / "none"

    assert main([*RUN, "--no-save-result", "--result-dir", str(folder)]) == 0

    assert not folder.exists()


def test_a_model_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--make-model", "/dev/null/x/model"]) == 2
    assert main(["--make-model", "/dev/null"]) == 2

    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert "'--make-model' must name a folder" in err[0]


def test_a_short_run_names_no_saturation_rate(
    backend: FixedBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--num-prompts", "10", "--slo", "ttft:500", "tpot:50", "--disable-tqdm",
            "--result-dir", str(tmp_path)]  # fmt: skip

    assert main(argv) == 0

    out = capsys.readouterr().out
    assert "10 requests are too few to find the saturation rate" in out
    assert "Saturation near" not in out
    assert calibrate.saturation_text(3.14, 80) == "Saturation near 3.1 requests/s"
