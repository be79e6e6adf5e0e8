"""`python -m sola_sched.plan`: the cheapest that attains, and what is said when none can."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sola_sched.errors import DatasetError
from sola_sched.plan.cli import main
from sola_sched.plan.configurations import Configuration, configurations
from sola_sched.plan.evaluate import Outcome, excess
from sola_sched.plan.search import search

BASE = ["--model", "llama-3-8b", "--disable-tqdm", "--num-prompts", "150"]
FAST = [
    *BASE,
    "--tensor-parallel-size",
    "1",
    "--schedulers",
    "sola",
    "--routers",
    "least-ttft",
    "--no-check",
]
LOAD = ["--request-rate", "6", "--dataset-name", "random", "--random-input-len", "1000"]
SLO = ["--slo", "ttft:1000", "tpot:60"]


def plan(tmp_path: Path, *args: str) -> tuple[int, dict]:
    output = tmp_path / "plan.json"
    code = main([*args, "--output", str(output)])
    return code, json.loads(output.read_text()) if output.exists() else {}


def test_the_answer_is_the_cheapest_that_attains_with_its_margin(tmp_path, capsys) -> None:
    code, found = plan(tmp_path, *FAST, *LOAD, *SLO, "--gpu", "a100=1.5", "h100=3.0")

    assert code == 0
    rows = found["configurations"]
    costs = [row["cost_per_hour"] for row in rows]
    assert costs == sorted(costs)
    attained = [row for row in rows if row["attained"]]
    assert found["best"] == attained[0]
    assert all(row["attained"] == (row["attainment"] >= 0.95) for row in rows)
    assert found["margin"]["attainment_points"] >= 0.0
    assert 1.0 <= found["margin"]["rate_factor"] <= 2.0
    assert (tmp_path / "plan.png").stat().st_size > 5000
    assert "Best: " in capsys.readouterr().out


def test_the_next_cheaper_costs_less_and_is_worse(tmp_path) -> None:
    args = ["--request-rate", "25", "--dataset-name", "random", "--gpu", "a100=1.5"]
    code, found = plan(tmp_path, *FAST, *args, *SLO, "--tensor-parallel-size", "1")

    assert code == 0
    assert found["best"]["num_instances"] >= 2
    following = found["next_cheaper"]
    assert following["cost_per_hour"] < found["best"]["cost_per_hour"]
    assert not following["attained"]
    assert following["points_lost"] > 0.0


def test_a_price_decides_between_types(tmp_path) -> None:
    best = []
    for prices in (("a100=1.0", "h100=9.0"), ("a100=9.0", "h100=1.0")):
        _, found = plan(tmp_path, *FAST, *LOAD, *SLO, "--gpu", *prices)
        best.append(found["best"]["gpu"])

    assert best == ["a100", "h100"]


@pytest.mark.vllm
def test_the_answer_is_checked_with_the_real_scheduler_and_the_error_is_said(
    tmp_path, capsys
) -> None:
    pytest.importorskip("vllm")
    args = ["--schedulers", "sola", "--routers", "least-ttft", "--gpu", "a100=1.5"]
    code, found = plan(tmp_path, *BASE, *args, *LOAD, *SLO, "--tensor-parallel-size", "1")

    assert code == 0
    assert found["checks"][-1]["real"]["attained"]
    assert abs(found["checks"][-1]["fast_model_error"]["attainment_points"]) < 10.0
    assert "With the real schedulers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("slo", "named"),
    [(["ttft:5", "tpot:60"], "ttft target"), (["ttft:1000", "tpot:0.5"], "tpot target")],
)
def test_a_target_that_nothing_can_meet_exits_with_2_and_by_how_much(
    tmp_path, capsys, slo: list[str], named: str
) -> None:
    code, _ = plan(tmp_path, *FAST, *LOAD, "--slo", *slo, "--gpu", "a100=1.5")

    error = capsys.readouterr().err
    assert code == 2
    assert f"the {named} must be at least" in error
    assert "times what it is" in error


def test_too_few_gpus_exits_with_2_and_says_what_is_missing(tmp_path, capsys) -> None:
    args = ["--request-rate", "80", "--dataset-name", "random", "--gpu", "a100=1", "--max-gpus"]
    code, found = plan(tmp_path, *FAST, *args, "1", *SLO)

    error = capsys.readouterr().err
    assert code == 2
    assert found["best"] is None
    assert "no configuration of up to 1 GPUs attains 95.0%" in error
    assert "points less" in error


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--gpu", "a100=-1"], "--gpu a100=-1"),
        (["--gpu", "a100=nan"], "--gpu a100=nan"),
        (["--gpu", "a100"], "--gpu a100"),
        (["--gpu", "tpu=1"], "TYPE=PRICE"),
        (["--gpu", "a100=1", "--attainment", "1.5"], "--attainment"),
        (["--gpu", "a100=1", "--slo", "ttft:nan"], "--slo"),
        (["--gpu", "a100=1", "--request-rate", "0"], "--request-rate"),
        (["--gpu", "a100=1", "--schedulers", "sjf"], "--schedulers"),
        (["--gpu", "a100=1", "--schedulers", "stock:128"], "--max-num-seqs"),
    ],
)
def test_bad_input_names_the_flag(tmp_path, capsys, args: list[str], named: str) -> None:
    code, _ = plan(tmp_path, *BASE, *LOAD, *SLO, *args)

    assert code == 2
    assert named in capsys.readouterr().err


def test_a_model_that_fits_nowhere_says_what_is_needed_and_what_there_is(tmp_path, capsys) -> None:
    args = ["--model", "llama-3-70b", "--gpu", "v100=1", "--tensor-parallel-size", "1", "2"]
    code, _ = plan(tmp_path, *args, *LOAD, *SLO)

    error = capsys.readouterr().err
    assert code == 2
    assert "141.1 GB of weights on each, 30.7 GB usable" in error


def test_neither_rate_nor_trace_is_an_error(tmp_path, capsys) -> None:
    code, _ = plan(tmp_path, *BASE, *SLO, "--gpu", "a100=1")

    assert code == 2
    assert "--request-rate" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["", "nan,10,10\n1.0,10,10\n"])
def test_empty_traces_and_times_that_are_no_numbers_are_errors(tmp_path, capsys, rows: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,prompt_tokens,output_tokens\n" + rows)
    args = ["--dataset-name", "custom", "--dataset-path", str(trace), "--self-timed"]
    code, _ = plan(
        tmp_path, "--model", "llama-3-8b", *args, "--num-prompts", "2", *SLO, "--gpu", "a100=1"
    )

    assert code == 2
    assert "trace.csv" in capsys.readouterr().err


def test_a_public_data_set_that_is_not_there_is_replaced_and_said(
    tmp_path, capsys, monkeypatch
) -> None:
    def fail(name: str) -> Path:
        raise DatasetError(f"{name} cannot be downloaded")

    monkeypatch.setattr("sola_sched.bench.data.datasets.fetch", fail)
    args = ["--dataset-name", "azure", "--request-rate", "2", "--gpu", "h100=3"]
    code, found = plan(tmp_path, *FAST, *args, "--slo", "ttft:2000", "tpot:80")

    assert code == 0
    assert "instead of azure" in found["notes"][0]
    assert "instead of azure" in capsys.readouterr().out


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13])
def test_the_search_finds_the_least_number_and_the_cheaper_of_two(needed: int) -> None:
    choices = configurations(
        "llama-3-8b", {"a100": 1.0, "h100": 1.5}, [1], ["sola", "stock"], [256], ["least-ttft"]
    )

    def evaluate(c: Configuration) -> Outcome:
        speed = {"a100": 1.0, "h100": 2.0}[c.gpu] * (1.0 if c.scheduler == "sola" else 0.6)
        share = min(1.0, c.num_instances * speed / needed)
        return Outcome(c, share, share, share, (1.0, 1.0), (1.0, 1.0), 1.0, 1.0)

    outcomes = search(choices, evaluate, 1.0, 64)

    best = next(o for o in outcomes if o.attainment >= 1.0).configuration
    expected = min((needed * 1.0, "a100"), (math.ceil(needed / 2) * 1.5, "h100"))
    assert (best.cost_per_hour, best.gpu) == expected
    assert best.scheduler == "sola"


def test_the_excess_is_the_factor_that_the_share_asked_for_needs() -> None:
    assert excess([1.0, 2.0, 3.0, 10.0], [2.0] * 4, 0.75) == 1.5
    assert excess([1.0, 2.0, 3.0, 10.0], [2.0] * 4, 1.0) == 5.0
