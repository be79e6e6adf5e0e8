"""`python -m sola_sched.plan`: the cheapest that attains, and what is said when none can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from html_report import Report
from plan_runs import BASE, FAST, LOAD, SLO, plan

from sola_sched.errors import DatasetError
from sola_sched.plan import cli
from sola_sched.plan.inputs.args import build_parser
from sola_sched.plan.inputs.load import make_load
from sola_sched.plan.search.evaluate import Outcome, run_fast
from sola_sched.plan.search.fast_error import OF_ONE_MODEL, unchecked
from sola_sched.simulator.cluster.cluster import VirtualCluster


def test_the_answer_is_the_cheapest_that_attains_with_its_margin(tmp_path, capsys) -> None:
    pytest.importorskip("plotly")
    report = tmp_path / "plan.html"
    code, found = plan(
        tmp_path, *FAST, *LOAD, *SLO, "--gpu", "a100=1.5", "h100=3.0", "--html", str(report)
    )

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
    said = capsys.readouterr().out
    assert "Best: " in said
    # Not checked: what it rests on, and how far off that was.
    assert unchecked(OF_ONE_MODEL) in said.splitlines()
    assert found["notes"][-1] == unchecked(OF_ONE_MODEL)
    shown = Report(report)
    assert shown.problems == []
    assert f"Report {report}." in said
    for line in said.splitlines():
        if line.startswith(("Best: ", "Next cheaper: ", "Step times: ", "To run it")):
            assert line in shown.text
    # The answer comes before what it rests on, and ends with how to run it.
    assert said.index("Best: ") < said.index("Not checked") < said.index("To run it")
    assert found["commands"][0] in said
    assert "vllm serve MODEL --tensor-parallel-size 1" in found["commands"][0]
    settings = dict(map(tuple, shown.tables[-1][1:]))
    assert settings["targets"] == "TTFT 1,000 ms, TPOT 60 ms"
    assert settings["requests"] == "150"
    everything = shown.tables[1]
    assert [row[4] for row in everything[1:]] == [row["name"] for row in rows]
    assert [row[1] for row in everything[1:]] == [f"{row['attainment']:.1%}" for row in rows]
    over_rate = shown.figures["figure-1"]["data"][0]
    pairs = zip(over_rate["x"], [y / 100 for y in over_rate["y"]], strict=True)
    assert [list(pair) for pair in pairs] == [
        pytest.approx(pair) for pair in found["margin"]["rates"]
    ]


def test_an_interrupt_leaves_what_was_evaluated(tmp_path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    runs = iter(range(2))

    def fast(args, *more):  # type: ignore[no-untyped-def]
        if next(runs, None) is None:
            raise KeyboardInterrupt
        return run_fast(args, *more)

    monkeypatch.setattr(cli, "run_fast", fast)

    with pytest.raises(KeyboardInterrupt):
        plan(tmp_path, *FAST, *LOAD, "--request-rate", "60", *SLO, "--gpu", "a100=1")

    found = json.loads((tmp_path / "plan.json").read_text())
    assert len(found["configurations"]) == 2
    assert found["best"] is None
    assert found["notes"][-2].startswith("Interrupted: these configurations had been evaluated")
    assert "Interrupted: these configurations" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["check", "margin", "figure"])
def test_an_interrupt_after_the_search_keeps_what_was_found(  # type: ignore[no-untyped-def]
    tmp_path, monkeypatch, place: str
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def fast(_, configuration, *more):  # type: ignore[no-untyped-def]
        attained = float(configuration.num_instances >= 2)
        shares = {"ttft": attained, "tpot": 1.0}
        return Outcome(configuration, attained, shares, (1.0, 2.0), (1.0, 2.0), dict(shares))

    monkeypatch.setattr(cli, "run_fast", fast)
    monkeypatch.setattr(cli, "prefill_share", lambda *_: 0.5)
    names = {"check": "run_real", "margin": "rate_margin", "figure": "plot"}
    monkeypatch.setattr(cli, names[place], stop)
    monkeypatch.setattr(cli.environment, "require_vllm", lambda *_: None)
    flags = [flag for flag in FAST if flag != "--no-check" or place != "check"]

    with pytest.raises(KeyboardInterrupt):
        plan(tmp_path, *flags, *LOAD, *SLO, "--gpu", "a100=1.5")

    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["best"] == next(row for row in found["configurations"] if row["attained"])
    assert found["commands"]
    assert found["checks"] == []
    assert ("margin" in found) == (place == "figure")
    said = [note for note in found["notes"] if note.startswith("Interrupted: ")]
    expected = {"check": ["not all checks"], "margin": ["the margin of the best"], "figure": []}
    for note, words in zip(said, expected[place], strict=True):
        assert words in note


def test_a_price_decides_between_types(tmp_path) -> None:
    best = []
    for prices in (("a100=1.0", "h100=9.0"), ("a100=9.0", "h100=1.0")):
        _, found = plan(tmp_path, *FAST, *LOAD, *SLO, "--gpu", *prices)
        best.append(found["best"]["gpu"])

    assert best == ["a100", "h100"]


SERVICE = "name=chat,model=llama-3-8b,rate=1,ttft=8000,tpot=200"


@pytest.mark.parametrize(
    "args",
    [[*(flag for flag in FAST if flag != "--no-check"), *LOAD, *SLO], ["--service", SERVICE]],
    ids=["one model", "services"],
)
def test_without_vllm_a_check_is_refused_before_the_search(
    tmp_path, capsys, monkeypatch, args: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)

    code, found = plan(tmp_path, *args, "--gpu", "a100=1.5")

    assert (code, found) == (2, {})
    assert capsys.readouterr() == (
        "",
        "error: the check with the real schedulers needs vLLM, which is not installed; install "
        "it, or give '--no-check' for an answer by the fast model alone.\n",
    )


def test_without_tqdm_the_extra_is_named(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)

    code, found = plan(tmp_path, *FAST, *LOAD, *SLO, "--gpu", "a100=1.5")

    assert (code, found) == (2, {})
    assert "pip install 'sola-sched[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["plan.cli", "explain.cli", "bench.cli", "bench.first_run"])
def test_tools_are_imported_without_optional_packages(tool: str) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['tqdm', 'transformers', 'vllm'])); "
        f"import sola_sched.{tool}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.vllm
def test_the_answer_is_checked_with_the_real_scheduler_and_the_error_is_said(
    tmp_path, capsys
) -> None:
    pytest.importorskip("vllm")
    args = ["--schedulers", "sola", "--routers", "least-ttft", "--gpu", "a100=1.5", "--no-pools"]
    slots = ["--tensor-parallel-size", "1", "--max-num-seqs", "256"]
    code, found = plan(tmp_path, *BASE, *args, *LOAD, *SLO, *slots)

    assert code == 0
    assert found["checks"][-1]["real"]["attained"]
    assert abs(found["checks"][-1]["fast_model_error"]["attainment_points"]) < 10.0
    said = capsys.readouterr().out
    assert "With the real schedulers" in said
    assert "Not checked" not in said


@pytest.mark.parametrize(
    ("slo", "named"),
    [
        (["ttft:5", "tpot:60"], "ttft target"),
        (["ttft:1000", "tpot:0.5"], "tpot target"),
        (["ttft:500", "tpot:60", "e2e:700"], "e2e target"),
    ],
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
        (["--gpu", "a100"],
         "'--gpu' must be TYPE=PRICE, the price of a GPU and hour (got 'a100'); write for example "
         "a100=1.5"),
        (["--gpu", "tpu=1"], "h200, b200, mi300x at most once (got 'tpu=1'); correct"),
        (["--gpu", "A-100=1"], "at most once (got 'A-100=1'); write a100=PRICE."),
        (["--gpu", "a100=1", "--slo", "ttft=900"], "'ttft=900'); write for example ttft:900."),
        (["--gpu", "a100=1", "--max-gpus", "0"], "--max-gpus: must be a whole number >= 1"),
        (["--gpu", "a100=1", "--max-gpus", "2", "--tensor-parallel-size", "4", "8"],
         "'--max-gpus' must be at least 4, what an instance takes that has memory for the model "
         "and a degree of --tensor-parallel-size (got 2); raise it"),
        (["--gpu", "a100=1", "--attainment", "1.5"], "--attainment"),
        (["--gpu", "a100=1", "--slo", "ttft:nan"], "--slo"),
        (["--gpu", "a100=1", "--request-rate", "0"], "--request-rate"),
        (["--gpu", "a100=1", "--schedulers", "sjf"], "--schedulers"),
        (["--gpu", "a100=1", "--schedulers", "stock:64"], "--max-num-seqs"),
        (["--gpu", "a100=1", "--request-rate", "nan"], "--request-rate"),
        (["--gpu", "a100=0"], "--gpu a100=0"),
        (["--gpu", "a100=1", "--slo-class", "chat:0.7:-5:60"], "--slo-class"),
    ],
)  # fmt: skip
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


def test_arrivals_too_short_for_a_queue_to_grow_are_told() -> None:
    def notes(rate: str) -> tuple[str, ...]:
        args = ["--dataset-name", "random", "--gpu", "a100=1", "--request-rate", rate]
        return make_load(build_parser().parse_args([*BASE, *args, *SLO]), 8192, 1000).notes

    (told,) = notes("1000")
    assert "too short for a queue to outgrow a TTFT target of 1 s" in told
    assert "give --num-prompts" in told
    assert notes("3") == ()


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

    monkeypatch.setattr("sola_sched.workloads.datasets.fetch", fail)
    args = ["--dataset-name", "azure", "--request-rate", "2", "--gpu", "h100=3"]
    code, found = plan(tmp_path, *FAST, *args, "--slo", "ttft:2000", "tpot:80")

    assert code == 0
    assert "instead of azure" in found["notes"][0]
    assert "instead of azure" in capsys.readouterr().out


def test_step_times_are_measured_where_there_are_such_and_the_output_says_so(
    tmp_path, capsys
) -> None:
    args = ["--schedulers", "sola", "--routers", "least-ttft", "--no-check", "--no-pools"]
    degrees = ["--tensor-parallel-size", "1", "2", "--gpu", "h100=3"]
    _, found = plan(tmp_path, *BASE, *args, *LOAD, *SLO, *degrees)

    steps = {row["tensor_parallel"]: row["step_times"] for row in found["configurations"]}
    assert steps == {1: "measured", 2: "computed"}
    said = capsys.readouterr().out
    assert "1 h100 of measured kernels; 2 h100 computed from hardware figures" in said


@pytest.mark.parametrize("rate", ["1", "0.01", "0.0001"])
def test_a_plan_for_a_low_rate_takes_no_longer_than_for_a_higher_one(
    tmp_path: Path, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    take = VirtualCluster._take_report
    monkeypatch.setattr(
        VirtualCluster, "_take_report", lambda *args: (reports.append(0), take(*args))
    )

    args = ["--gpu", "a100=1.5", *LOAD[2:], "--request-rate", rate]
    code, found = plan(tmp_path, *FAST, *args, *SLO)

    assert (code, found["best"]["num_instances"]) == (0, 1)
    # Requests alone on an engine take seconds; it reports for ten more before the next one.
    assert len(reports) < 150 * 4 * 100


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu", "a100=1e308"], "prices of '--gpu' must be between 1e-09 and 1e+09"),
        (["--gpu", "a100=1e-320"], "prices of '--gpu' must be between 1e-09 and 1e+09"),
        (["--gpu", "a100=1", "--request-rate", "1e-12"], "must come within 1e+09 s"),
        (["--gpu", "a100=1", "--request-rate", "1e-300"], "must come within 1e+09 s"),
    ],
)
def test_numbers_beyond_all_use_end_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    code, _ = plan(tmp_path, *FAST, *LOAD, *SLO, *args)

    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_no_more_instances_are_tried_than_there_are_requests(tmp_path: Path) -> None:
    args = ["--gpu", "a100=1", "--max-gpus", str(10**17), "--slo", "ttft:60", "tpot:16"]

    code, found = plan(tmp_path, *FAST, *LOAD, *args, "--num-prompts", "20")

    assert code == 2
    assert max((each["num_instances"] for each in found.get("configurations", [])), default=0) <= 20
