"""`python -m sola_sched.bench --backend sim`: what it takes, what it refuses, and a whole run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from sola_sched.bench.cli import main
from sola_sched.cost.file import Coefficients, write_profile

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--profile", "gpt-5-b300"], r"'--profile' must be a file or one of llama-3-70b-a100"),
        (["--model", "org/model"], r"'--model' has no meaning with --backend sim \(got 'org"),
        (["--clock", "cpu"], "'--clock' has no meaning"),
        (["--tensor-parallel-size", "2"], "'--tensor-parallel-size' has no meaning"),
        (["--base-url", "http://x"], "'--base-url' has no meaning"),
        (["--max-model-len", "9000"], r"must be <= 8192 .* \(got 9000\); lower it"),
        (["--engine-args", '{"dtype": "half"}'], "'dtype' is no engine argument of --backend sim"),
        (["--engine-args", '{"block_size": 0}'], "'block_size' must be a whole number"),
        (["--engine-args", '{"async_scheduling": 1}'], "must be true or false"),
        (["--engine-args", '{"scheduler_cls": "no.such"}'], "dotted name of a class"),
        (["--engine-args", '{"scheduling_policy": "lifo"}'], "must be fcfs or priority"),
        (["--schedulers", "stock:64"], r"cannot run on profile .*\(64\) must be greater"),
        (["--schedulers", "stock:engine.max_num_seqs=x"], "'max_num_seqs' must be a whole"),
        (["--schedulers", "sjf:x=1"], "'--schedulers' takes"),
    ],
)
def test_arguments_without_a_meaning_here_end_with_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--backend", "sim", *argv])

    err = capsys.readouterr().err.strip()
    assert code == 2
    assert re.search(message, err)
    assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--profile", "llama-3-8b-a100"], "'--profile' is for --backend sim"),
        (["--schedulers", "sjf"], "'--schedulers sjf' is for --backend sim"),
    ],
)
def test_arguments_of_virtual_time_are_refused_on_an_engine(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_profile_of_a_live_engine_needs_the_memory_it_does_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.sola.json"
    write_profile(path, Coefficients(0.0, 0.0, 1e-5, 1e-3, 1e-4, 1e-7, 1e-3, 1e-3), {})
    argv = ["--backend", "sim", "--profile", str(path), "--schedulers", "stock:512", "--slo",
            "ttft:99", "--request-rate", "9", "--num-prompts", "8", "--disable-tqdm",
            "--result-dir", str(tmp_path)]  # fmt: skip

    assert main(argv) == 2
    assert "'max_model_len' must be given for profile mine" in capsys.readouterr().err
    assert main([*argv, "--max-model-len", "512"]) == 2
    assert "'num_gpu_blocks_override' must be given" in capsys.readouterr().err
    memory = ["--engine-args", '{"num_gpu_blocks_override": 100}']
    assert main([*argv, "--max-model-len", "512", *memory]) == 0


def test_whole_comparison_with_measured_targets_and_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--backend", "sim", "--profile", "opt-13b-h100", "--schedulers", "stock:512", "sola",
            "--num-prompts", "40", "--max-num-seqs", "16", "--disable-tqdm", "--slo-class",
            "chat:1:500:50", "--result-dir", str(tmp_path)]  # fmt: skip

    assert main(argv) == 0

    out = capsys.readouterr().out
    assert "Model opt-13b-h100, backend sim, data set sharegpt-like." in out
    assert "lengths x 0.25" in out
    saved = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(saved) == 6
    assert {run["clock"] for run in saved} == {"virtual"}
    assert {run["model_id"] for run in saved} == {"opt-13b-h100"}
    assert all(run["completed"] == 40 and run["scheduler"]["num_steps"] > 0 for run in saved)
    assert all(run["attainment_by_class"]["chat"]["num_requests"] == 40 for run in saved)
    assert len(list(tmp_path.glob("*.png"))) == 2
