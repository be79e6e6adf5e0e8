"""The comparison of ways to displace KV: what each way changes, and the table."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import load_script

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm]

_ALISE = "sola:policy=alise,sim.predictor=oracle"
_SWAP = f"{_ALISE},swap.mode=raw,swap.host_gib=8"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("swap", "bench_swap")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Tokens by request of every step of the runs that follow."""
    from sola_sched.vllm_adapter.scheduler import Scheduler

    seen: list[dict[str, int]] = []
    record = Scheduler._record

    def remember(self: Any, output: Any) -> None:
        seen.append(dict(output.num_scheduled_tokens))
        record(self, output)

    monkeypatch.setattr(Scheduler, "_record", remember)
    return seen


def _serve(script: ModuleType, scheduler: str, policy: str) -> dict[str, Any]:
    """Forty requests, more than memory holds at a time."""
    point = script.Point("opt-13b-v100", script.SYNTHETIC, 3.0, 60.0, 1.0, scheduler,
                         num_requests=40)  # fmt: skip
    row: dict[str, Any] = script.run(script.Case(point, "one", 250, policy), None)
    assert row["num_ended"] == 40
    return row


def _num_mixed(steps: list[dict[str, int]]) -> int:
    """Steps in which some compute prompts and others decode."""
    return sum({min(2, tokens) for tokens in step.values()} == {1, 2} for step in steps)


@pytest.mark.parametrize("scheduler", [_ALISE, _SWAP])
def test_prompts_alone_are_computed_in_steps_of_their_own(script, steps, scheduler):
    row = _serve(script, scheduler, "alone")

    assert row["num_preemptions"] > 0
    # But for what vLLM plans itself before step times are known, and tokens beside loaded KV.
    assert _num_mixed(steps) <= 8

    steps.clear()
    _serve(script, scheduler, "")
    assert _num_mixed(steps) >= 40


def test_who_defers_displaces_for_nobody_that_waits(script):
    assert _serve(script, _ALISE, "defer")["num_preemptions"] == 0
    assert _serve(script, _ALISE, "always")["num_preemptions"] > 0


def test_table_of_the_papers_engine(script: ModuleType, tmp_path: Path) -> None:
    arguments = ["alone", "--quick", "--num-requests", "20", "--results", str(tmp_path)]
    arguments += ["--data", str(tmp_path / "none")]
    assert script.main(arguments) == 0

    table = (tmp_path / "alone-quick.md").read_text()
    assert "| req/s | swap, raw | recompute | defer |" in table
    assert len((tmp_path / "alone-quick.jsonl").read_text().splitlines()) == 6
