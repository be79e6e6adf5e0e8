"""Whatever the command line holds: a run, or one line that names the flag; never a traceback."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from unittest import mock

import pytest
from bench_runs import FixedBackend
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.bench import plan, values
from sola_sched.bench.cli import main
from sola_sched.errors import ConfigError
from sola_sched.workloads.datasets import ModelLimits

#: Flags that the run below reads; each gets any of the values.
FLAGS = (
    "--seed", "--num-warmups", "--num-prompts", "--request-rate", "--length-scale", "--burstiness",
    "--random-input-len", "--random-output-len", "--random-prefix-len", "--random-range-ratio",
    "--custom-output-len", "--max-concurrency", "--duration-budget", "--time-limit", "--slo",
    "--slo-class", "--metric-percentiles", "--percentile-metrics", "--metadata", "--label",
    "--dataset-name", "--dataset-path", "--schedulers", "--max-num-batched-tokens",
    "--result-filename",
)  # fmt: skip
VALUES = (
    "", "0", "1", "-1", "3", "0.5", "-0.5", "1e-300", "1e400", "nan", "inf", "99999999999999999999",
    "ttft:1", "tpot:inf", "a:1:2:3", "ttft", "99.9", "x", "x=1", "random", "sharegpt-like",
    "custom", "stock", "sola", "stock:64", "sola:policy=paper", "../x", "é\ud800", "/dev/null",
)  # fmt: skip


def run_with(argv: list[str]) -> tuple[int, str]:
    """Exit code and error output of a run on a machine without limits."""
    limits = ModelLimits(max_model_len=256, vocab_size=100)
    errors = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(plan, "_backend", return_value=(FixedBackend(), limits)),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
    ):
        size = ["--num-prompts", "3", "--schedulers", "stock:64", "--no-save-result"]
        code = main([*size, "--disable-tqdm", "--result-dir", folder, *argv])
    return code, errors.getvalue()


@given(st.lists(st.tuples(st.sampled_from(FLAGS), st.sampled_from(VALUES)), min_size=1, max_size=3))
def test_any_flag_is_a_run_or_one_line(chosen: list[tuple[str, str]]) -> None:
    if any(flag == "--num-prompts" and len(value) > 2 for flag, value in chosen):
        return  # valid, and longer than a test may take
    code, errors = run_with([f"{flag}={value}" for flag, value in chosen])

    assert code in (0, 2)
    assert (code == 0) or (errors.startswith("error: ") and len(errors.splitlines()) == 1), errors


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (["--seed", "-1"], "whole number >= 0"),
        (["--num-warmups", "-3"], "whole number >= 0"),
        (["--random-prefix-len", "-1"], "whole number >= 0"),
        (["--random-range-ratio", "nan", "--dataset-name", "random"], r"in \[0, 1\)"),
        (["--burstiness", "1e-300"], "must lie at finite times"),
        (["--port", "99999999"], "--port.*0 to 65535"),
        (["--base-url", "http://me:secret@h:1"], r"--base-url.*\(got '\.\.\.@h:1'\)"),
        (
            ["--base-url", "h:1/v2"],
            "--base-url: must be http://HOST:PORT/PATH .*write http://h:1/v2",
        ),
        (["--tokenizer", "/nowhere/at/all"], "'--tokenizer' must"),
    ],
)
def test_what_a_flag_may_be_is_said(argv: list[str], rule: str) -> None:
    if argv[0] == "--tokenizer":
        pytest.importorskip("vllm")
        argv = [*argv, "--backend", "sim"]
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code, text = main(argv), errors.getvalue()
    else:
        code, text = run_with(argv)

    assert code == 2
    assert len(text.splitlines()) == 1
    assert re.search(rule, text), text


def test_a_path_without_a_data_set_that_reads_it_is_refused() -> None:
    code, error = run_with(["--dataset-path", "/no/such/file.csv"])

    assert code == 2
    assert "'--dataset-path' needs a data set" in error
    assert "/no/such/file.csv" in error


def test_a_class_may_not_be_called_as_requests_without_one_are() -> None:
    with pytest.raises(ConfigError, match="'--slo-class' must not be called 'default'"):
        values.parse_slo_class("default:0.5:500:50")


def test_a_tokenizer_without_transformers_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="'--tokenizer' needs transformers"):
        plan.load_tokenizer("me/mine")
