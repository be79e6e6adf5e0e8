"""Published schedulers inside vLLM's own loop: they plan, and lose no request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tiny_sim import SLO, busy_workload, make_backend

from harness import sweep
from harness.command import main
from harness.resumable import Row
from harness.setup import Setup
from registry import EXPERIMENTS
from rivals import experiment
from rivals.points import EVEN, MEASURED, PLACES, told
from rivals.runs import Case, key_of, run_case
from rivals.settings import RIVALS, short
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.backends.virtual_replay import VirtualReplay
from sola_sched.config.slo import SloTarget
from sola_sched.cost.model import CostModel
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.time import StepCounts

pytestmark = pytest.mark.vllm

NO_TTFT = SloTarget(tpot_s=3.0)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("num_blocks", [200, 40], ids=["memory for all", "little memory"])
def test_they_plan_every_step_and_serve_everybody(name: str, num_blocks: int) -> None:
    """With memory for all, every third request has no target, and every third no TTFT."""
    rival = RIVALS[name]
    spec = parse_scheduler(rival.specs()[0])
    workload = busy_workload()
    if num_blocks == 200:
        targets = itertools.cycle((SLO, NO_TTFT, SloTarget()))
        requests = zip(workload.requests, targets, strict=False)
        mixed = tuple(replace(request, slo=slo) for request, slo in requests)
        workload = replace(workload, requests=mixed)
    backend = make_backend(num_gpu_blocks_override=num_blocks)
    engine = backend.warm_engine(spec, SLO, workload)
    replay = VirtualReplay(engine, None, None, tells_lengths=False)
    records = replay.start(workload.requests, on_done=None)
    engine.run(on_finish=replay.ended)

    served = [record for record in records if record.completed]
    assert (len(served) == len(records)) == rival.serves_all
    assert engine.num_free_blocks == num_blocks - 1
    if spec.kind == "sola":
        planning, guard = engine.scheduler._planning, engine.scheduler.sola_guard
        assert set(planning.problems) <= {rival.rule, "learning"}
        assert planning.problems[rival.rule] > 0.7 * planning.num_plans
        assert planning.num_stalled < 0.05 * planning.num_plans
        assert not guard.num_failures


@pytest.mark.slow
@pytest.mark.long
def test_the_experiment_runs_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOLA_SCHED_DATA", str(tmp_path / "none"))
    argv = ["published", "--quick", "--num-requests", "20", "--seeds", "0", "--results",
            str(tmp_path), "--only", "QoServe", "SCORPIO", "azure-conv x 1.25"]  # fmt: skip
    assert main(EXPERIMENTS, argv) == 0
    table = capsys.readouterr().out
    assert table.startswith("| point | req/s | stock | QoServe | SCORPIO | sola | reject | closest")
    assert "azure-conv x 1.25" in table
    num_rows = len((tmp_path / "published-quick.jsonl").read_text().splitlines())
    assert main(EXPERIMENTS, argv) == 0
    assert len((tmp_path / "published-quick.jsonl").read_text().splitlines()) == num_rows


def test_a_lead_is_judged_by_requests_that_chose_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leads of 0 and 2 points in turn: 1, and 2.26 times a standard error of a third."""
    seen: list[Case] = []

    def rows(setup: Setup, cases: Sequence[Case], title: str) -> list[Row]:
        seen.extend(cases)
        ours = [0.9 if case.scheduler == "theirs" else 0.9 + 0.02 * (case.seed % 2)
                for case in cases]  # fmt: skip
        return [{"attainment": value} for value in ours]

    monkeypatch.setattr(experiment, "_rows", rows)
    place = next(place for place in PLACES if place.rate_per_s)
    point = experiment._Point(Setup(None, tmp_path, seeds=(0, 1, 2)), place)
    shares = {"sola": ("ours", 0.0), "EDF": ("worse", 0.5), "QoServe": ("theirs", 0.8),
              "SCORPIO": ("refuses", 1.0)}  # fmt: skip
    assert point.judged_lead(shares) == "+1.0 (+0.2 to +1.8)"
    assert {case.scheduler for case in seen} == {"ours", "theirs"}
    assert not {case.seed for case in seen} & {0, 1, 2}


def case(scheduler: str, machine: str = EVEN) -> Case:
    return Case("three classes", 6.0, scheduler, 40, 0, machine)


def test_a_machine_changes_the_run_and_what_is_told_of_it_changes_who_asks() -> None:
    """A wrong profile is nothing to stock vLLM; stalls hold everybody up."""
    for scheduler in ("stock:2048", "sola:policy=rivals.qoserve:QoServe,policy_options.profile=P"):
        spec = scheduler.replace("=P", f"={MEASURED}")
        waits = {
            machine: run_case(case(spec, machine), None)["p99_ttft_s"]
            for machine in (EVEN, "stalls", "profile x 2")
        }
        assert waits["stalls"] > waits[EVEN] + 0.1
        assert (waits["profile x 2"] == waits[EVEN]) == scheduler.startswith("stock")


def test_a_wrong_profile_is_what_our_scheduler_is_given() -> None:
    spec = told(parse_scheduler("sola"), MEASURED, "profile x 2")
    right = told(parse_scheduler("sola"), MEASURED, EVEN)
    assert "profile" not in right.options
    cost = CostModel.load(spec.options["profile"])
    true_s = load_step_profile(MEASURED).step_time.seconds(StepCounts(64, 64 * 1000))
    assert cost.decode_s(64, 64 * 1000) == pytest.approx(2.0 * true_s, rel=0.15)


def test_the_row_of_a_rival_changes_with_its_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(case(RIVALS[name].specs()[0])) for name in ("QoServe", "SLAI")]
    read = Path.read_bytes

    def edited(path: Path) -> bytes:
        return read(path) + (b"#" if path.name == "qoserve.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", edited)
    sweep._source_digest.cache_clear()
    again = [key_of(case(RIVALS[name].specs()[0])) for name in ("QoServe", "SLAI")]
    sweep._source_digest.cache_clear()
    assert again[0] != keys[0]
    assert again[1] == keys[1]


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        (RIVALS["SLAI"].specs(profile="P")[0], "chunk=512 k=2 profile=P"),
        (RIVALS["SLAI"].specs()[-1], "chunk=2048 k=5"),
        ("stock:2048", "2048"),
        ("sola", "sola"),
    ],
)
def test_a_setting_is_shown_without_what_all_share(spec: str, shown: str) -> None:
    assert short(spec) == shown
