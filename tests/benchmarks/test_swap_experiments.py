"""The comparison of ways to displace KV: what each way changes, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from harness.command import main
from harness.points import SYNTHETIC, Point
from registry import EXPERIMENTS
from swap.cases import Case, run

pytestmark = [pytest.mark.vllm]

_ALISE = "sola:policy=alise,sim.predictor=oracle"
_SWAP = f"{_ALISE},swap.mode=raw,swap.host_gib=8"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Tokens by request of every step of the runs that follow."""
    from sola_sched.vllm_adapter.requests.booking import Booking

    seen: list[dict[str, int]] = []
    record = Booking._record

    def remember(self: Any, output: Any, num_held: int) -> None:
        seen.append(dict(output.num_scheduled_tokens))
        record(self, output, num_held)

    monkeypatch.setattr(Booking, "_record", remember)
    return seen


def _serve(scheduler: str, policy: str) -> dict[str, Any]:
    """Forty requests, more than memory holds at a time."""
    point = Point("opt-13b-v100", SYNTHETIC, 3.0, 60.0, 1.0, scheduler,
                         num_requests=40)  # fmt: skip
    row: dict[str, Any] = run(Case(point, "one", 250, policy), None)
    assert row["num_ended"] == 40
    return row


def _num_mixed(steps: list[dict[str, int]]) -> int:
    """Steps in which some compute prompts and others decode."""
    return sum({min(2, tokens) for tokens in step.values()} == {1, 2} for step in steps)


@pytest.mark.parametrize("scheduler", [_ALISE, _SWAP])
def test_prompts_alone_are_computed_in_steps_of_their_own(steps, scheduler):
    row = _serve(scheduler, "alone")

    assert row["num_preemptions"] > 0
    # But for what vLLM plans itself before step times are known, and tokens beside loaded KV.
    assert _num_mixed(steps) <= 8

    steps.clear()
    _serve(scheduler, "")
    assert _num_mixed(steps) >= 40


def test_who_defers_displaces_for_nobody_that_waits():
    assert _serve(_ALISE, "defer")["num_preemptions"] == 0
    assert _serve(_ALISE, "always")["num_preemptions"] > 0


def test_table_of_the_papers_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOLA_SCHED_DATA", str(tmp_path / "none"))
    argv = ["swap-alone", "--quick", "--num-requests", "20", "--seeds", "0"]
    assert main(EXPERIMENTS, [*argv, "--results", str(tmp_path)]) == 0

    table = (tmp_path / "swap-alone-quick.md").read_text()
    assert "| req/s | swap, raw | recompute | defer |" in table
    assert len((tmp_path / "swap" / "alone-quick.jsonl").read_text().splitlines()) == 6


def test_stored_rows_of_swapping_must_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOLA_SCHED_DATA", str(tmp_path / "none"))
    row = {"name": "raw", "profile": "opt-13b-v100", "dataset": SYNTHETIC, "rate_per_s": 7.0}
    row |= {"ttft_s": 60.125, "tpot_s": 1.0, "num_requests": 500, "swap": {}}
    row["scheduler"] = f"{_ALISE},swap.mode=raw,swap.host_gib=0.125,swap.group_tokens=16"
    (tmp_path / "swap").mkdir()
    (tmp_path / "swap" / "host.jsonl").write_text(json.dumps(row) + "\n")

    with pytest.raises(SystemExit, match=r"each of 12 runs \(got 1\)"):
        main(EXPERIMENTS, ["swap-host", "--stored", "--results", str(tmp_path)])
