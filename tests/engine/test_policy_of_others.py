"""A policy that is not ours, by its installed name: the example on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import STOCK, make_workload, run
from installed_policy import installed_policy

pytestmark = pytest.mark.vllm

EDF = "edf_policy:EarliestDeadlineFirst"


def test_an_installed_policy_runs_on_the_engine_with_stock_tokens(
    model_dir: Path, tmp_path: Path
) -> None:
    requests = make_workload(12, output_len=20)
    sola: dict[str, Any] = {"policy": "edf", "policy_options": {"chunk": 48}, "log_interval_s": 0}
    with installed_policy(tmp_path, "edf", EDF):
        result = run(
            "sola_sched.Scheduler", requests, model_dir, additional_config={"sola_sched": sola}
        )
    assert result.tokens == run(STOCK, requests, model_dir).tokens
    assert result.stats["policy"] == "edf"
    assert result.stats["problems"]["edf"] > 20
    assert not result.stats["failures"]


@pytest.mark.injects_failures
def test_a_plan_that_cannot_be_carried_out_costs_no_request(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = make_workload(12, output_len=20)
    with installed_policy(tmp_path, "edf", EDF):
        import edf_policy  # type: ignore[import-not-found]

        plan = edf_policy.EarliestDeadlineFirst.plan

        def twice(self: Any, state: Any) -> Any:
            made = plan(self, state)
            made.run = [*made.run, *made.run]
            return made

        monkeypatch.setattr(edf_policy.EarliestDeadlineFirst, "plan", twice)
        result = run(
            "sola_sched.Scheduler",
            requests,
            model_dir,
            additional_config={"sola_sched": {"policy": "edf", "log_interval_s": 0}},
        )
    assert result.tokens == run(STOCK, requests, model_dir).tokens
    assert result.stats["failures"]["planning a step"] > 0
    assert result.stats["is_aside"]
