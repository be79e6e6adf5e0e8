"""The simulator against the engine: ranking, tables, the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_steps import SLO, known_s, make_batch, make_cycle, random_batches

from fidelity import engine_steps as steps
from fidelity.recording import EngineFacts
from fidelity.report import engine_tables
from harness.command import main
from registry import EXPERIMENTS
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.cost.model import CostModel
from sola_sched.simulator.steps.curves import LINEAR
from sola_sched.simulator.steps.time import MeasuredStepTime
from sola_sched.workloads.workload import RequestSpec, Workload, random_token_ids


def test_ranking_counts_only_pairs_that_differ() -> None:
    real = {"a": 0.90, "b": 0.88, "c": 0.50}

    assert steps.ranking(real, {"a": 0.8, "b": 0.9, "c": 0.3}) == {"num_pairs": 2, "num_right": 2}
    assert steps.ranking(real, {"a": 0.8, "b": 0.2, "c": 0.3}) == {"num_pairs": 2, "num_right": 1}


def make_report(attainment: float, error: float) -> dict[str, Any]:
    simulated = {"attainment": attainment, "mean_ttft_s": 1.1, "mean_tpot_s": 0.01}
    run = {
        "workload": "chat",
        "scheduler": "stock",
        "is_repeat": False,
        "steps": {"num_steps": 9, "mean_abs_error": error, "total_error": -0.01},
        "repeat_noise": 0.01,
        "parts": dict.fromkeys(steps.PARTS, 1e-3),
        "real": {"attainment": 0.5, "mean_ttft_s": 1.0, "mean_tpot_s": 0.01},
        **dict.fromkeys(
            (f"simulated{kind}" for kind in ("", "_slower", "_without_host", "_own_speed")),
            simulated,
        ),
    }
    return {
        "runs": [run, {**run, "is_repeat": True}],
        "forms": {"curves": run["steps"]},
        "ranking": {"chat": {"num_pairs": 1, "num_right": 1}},
    }


def test_report_says_pass_and_fail_with_the_numbers() -> None:
    good, bad = engine_tables(make_report(0.52, 0.05)), engine_tables(make_report(0.54, 0.07))

    assert "step <= 6%: pass (5.0% over 9 held-out steps)" in good
    assert "within 3 points: pass (largest difference 2.0 points; 0 of 1" in good
    assert "schedulers: pass (1 of 1 pairs" in good
    assert "step <= 6%: FAIL (7.0%" in bad
    assert "within 3 points: FAIL (largest difference 4.0 points; 1 of 1" in bad


# Virtual time -------------------------------------------------------------------------------


def make_workload(count: int) -> Workload:
    rng = np.random.default_rng(0)
    return Workload(
        tuple(
            RequestSpec(str(i), random_token_ids(rng, 20 + 30 * (i % 4), 1000), 5 + i % 7)
            for i in range(count)
        )
    ).at_rate(20.0)


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["stock", "sola"])
def test_simulated_runs_repeat_exactly_and_take_what_the_steps_take(name: str) -> None:
    batches = random_batches(200, seed=0)
    fitted = steps.fit_engine({name: [make_cycle(b, known_s(b)) for b in batches]})[name]
    workload = make_workload(30)
    facts = EngineFacts(64, 16, 512, 8, 128, True, False)

    runs = [
        steps.simulate(workload, workload.requests[:0], parse_scheduler(name), SLO, facts, fitted)
        for _ in range(2)
    ]

    assert runs[0] == runs[1]
    assert all(record.completed for record in runs[0])
    fastest_s = fitted.step_s(make_batch(1, context=20))
    assert all(gap_s >= fastest_s for record in runs[0] for gap_s in record.itls_s)
    assert steps.summary(runs[0], SLO)["attainment"] > 0.0


@pytest.mark.vllm
@pytest.mark.slow
def test_command_runs_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    argv = ["fidelity", "--quick", "--only", "chat", "--num-requests", "8", "--schedulers",
            "stock:128", "sola:128", "--results", str(tmp_path)]  # fmt: skip

    assert main(EXPERIMENTS, [*argv, "--save-profile", str(profile)]) == 0

    assert "Ranking of the schedulers" in capsys.readouterr().out
    table = (tmp_path / "fidelity-quick.md").read_text()
    assert "Commit" in table.splitlines()[0]
    assert main(EXPERIMENTS, [*argv, "--stored"]) == 0
    assert (tmp_path / "fidelity-quick.md").read_text() == table
    assert MeasuredStepTime(CostModel.load(profile)).curves is not None
    assert set(LINEAR) == set(MeasuredStepTime(CostModel.load(profile)).curves.linear)
