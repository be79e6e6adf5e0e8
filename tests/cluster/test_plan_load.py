"""How much of a log `python -m sola_sched.plan` takes, and what it says of that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_help import assert_explained

from sola_sched.plan.inputs.args import build_parser
from sola_sched.plan.inputs.load import make_load

SLO = ["--model", "llama-3-8b", "--gpu", "a100=1", "--slo", "ttft:1000", "tpot:60"]


def a_log(folder: Path, num_rows: int) -> list[str]:
    """Flags that name a log with so many rows, one each second, the newest first."""
    path = folder / "log.jsonl"
    rows = [
        {"prompt_tokens": 10, "output_tokens": 5 + at, "arrival_s": at} for at in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    return ["--dataset-name", "custom", "--dataset-path", str(path)]


def load(*flags: str):
    return make_load(build_parser().parse_args([*SLO, *flags]), 8192, 1000)


@pytest.mark.parametrize("num_rows", [30, 900])
def test_a_log_at_its_own_times_is_taken_whole(tmp_path: Path, num_rows: int) -> None:
    found = load(*a_log(tmp_path, num_rows), "--self-timed")

    assert [r.arrival_s for r in found.workload.requests] == list(range(num_rows))
    assert found.notes == ()


def test_of_a_long_log_the_first_are_taken_and_that_is_said(tmp_path: Path) -> None:
    found = load(*a_log(tmp_path, 2100), "--self-timed")

    assert [r.arrival_s for r in found.workload.requests] == list(range(2000))
    (note,) = found.notes
    assert note == ("The first 2,000 of the 2,100 requests in log.jsonl; --num-prompts takes more.")


def test_as_many_as_are_asked_for_are_taken(tmp_path: Path) -> None:
    log = a_log(tmp_path, 2100)

    assert len(load(*log, "--self-timed", "--num-prompts", "2050").workload.requests) == 2050
    assert len(load(*log, "--request-rate", "10").workload.requests) == 600


def test_the_help_explains_every_flag() -> None:
    assert_explained(build_parser().format_help())
