"""What `plan` tells of its search: table, figures, report, and what the next cheaper would lose."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from html_report import Report
from plan_runs import FAST, LOAD, SLO, plan

from sola_sched.plan import cli
from sola_sched.plan.outputs import html, report
from sola_sched.plan.outputs.report import table
from sola_sched.plan.search.configurations import Configuration
from sola_sched.plan.search.evaluate import Outcome
from sola_sched.plan.search.fast_error import OF_ONE_MODEL, OF_SERVICES


def tried(number: int, router: str, attainment: float, scheduler: str = "sola") -> Outcome:
    c = Configuration("a100", 1.0, 1, scheduler, 256, 2048, router, num_instances=number)
    return Outcome(c, attainment, {}, (1.0, 2.0), (3.0, 4.0), {})


def test_the_table_has_a_line_for_each_number_of_gpus_and_the_answer_is_among_them() -> None:
    """However many variants of cheaper ones there are."""
    outcomes = [
        *(tried(2, f"r{i}", 0.9 - i / 1000) for i in range(30)),
        tried(2, "r0", 0.8, "stock:2048"),
        tried(3, "r1", 1.0),
        best := tried(3, "r0", 0.99),
        *(tried(number, "r0", 1.0) for number in range(4, 40)),
    ]

    head, *lines = table(outcomes, 0.95, best).splitlines()

    assert head.split() == ["cost/h", "attained", "TTFT", "p99", "TPOT", "p99", "configuration"]
    assert [line.split()[:2] for line in lines[:4]] == [
        ["2.00", "90.0%"], ["2.00", "80.0%"], ["3.00", "99.0%*"], ["4.00", "100.0%"],
    ]  # fmt: skip
    assert len(lines) == 16
    dearest = table(outcomes, 0.95, outcomes[-1])
    assert dearest.splitlines()[-1].startswith(" 39.00   100.0%*")


def test_the_plot_has_every_type_of_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(report, "save", lambda plt, figure, path: drawn.append(figure) or path)
    gpus = ["a100", "h100", "h200", "l4", "l40s", "mi300x"]
    outcomes = [
        replace(one := tried(1, "r0", 0.9), configuration=replace(one.configuration, gpu=gpu))
        for gpu in gpus
    ]

    report.plot(outcomes, 0.95, None, tmp_path / "plan.png")

    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == gpus


def test_what_misses_by_far_is_left_out_unless_all_do() -> None:
    outcomes = [tried(1, "r0", 0.1), tried(2, "r0", 0.8)]

    assert len(table(outcomes, 0.95, None).splitlines()) == 2
    assert len(table(outcomes[:1], 0.95, None).splitlines()) == 2
    assert "10.0%" not in table(outcomes, 0.95, None)


def test_the_report_has_the_table_that_is_printed_and_every_choice_as_a_dot(tmp_path) -> None:
    pytest.importorskip("plotly")
    outcomes = [tried(1, "r0", 0.1), tried(2, "r1", 0.96), best := tried(2, "r0", 0.95),
                tried(3, "r0", 0.9)]  # fmt: skip
    document = {"model": "m", "attainment_goal": 0.95}

    found = Report(html.write(document, ["Yes."], outcomes, best, tmp_path / "plan.html"))

    assert found.problems == []
    printed = table(outcomes, 0.95, best).replace("*", " ").splitlines()
    assert [" ".join(row).split() for row in found.tables[0]] == [x.split() for x in printed]
    dots, most, answer = found.figures["figure-0"]["data"]
    assert dots["x"] == [1.0, 2.0, 2.0, 3.0]
    assert dots["y"] == pytest.approx([10.0, 96.0, 95.0, 90.0])
    assert (most["x"], most["y"]) == ([1.0, 2.0, 3.0], [10.0, 96.0, 96.0])
    assert (answer["x"], answer["y"]) == ([2.0], [95.0])


def test_the_error_that_is_told_without_a_check_is_that_of_the_tables() -> None:
    results = Path(__file__).resolve().parents[2] / "docs" / "results"

    assert f"off by: {OF_ONE_MODEL}." in (results / "cluster-combined.md").read_text()
    assert f"least slack, attain {OF_SERVICES}" in (results / "sharing-real.md").read_text()


def test_without_matplotlib_the_plan_is_there_and_what_is_missing_said(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    code, found = plan(tmp_path, *FAST, *LOAD, *SLO, "--gpu", "a100=1.5")

    assert code == 0
    assert found["best"]
    assert "plots need matplotlib: pip install 'sola-sched[bench]'" in capsys.readouterr().out


def test_when_no_check_stands_those_that_were_checked_are_named(
    tmp_path, capsys, monkeypatch
) -> None:
    def missed(args, load, configuration):  # type: ignore[no-untyped-def]
        fast = cli.run_fast(args.model, configuration, load, args.seed, args.attainment)
        return replace(fast, attainment=0.9)

    monkeypatch.setattr(cli, "_real", missed)
    fast = [flag for flag in FAST if flag != "--no-check"]

    code, found = plan(tmp_path, *fast, *LOAD, *SLO, "--gpu", "a100=1.5")

    assert code == 2
    error = capsys.readouterr().err
    assert "none of the 4 cheapest that were checked attains 95.0%" in error
    assert all(check["configuration"] in error for check in found["checks"])


def test_the_next_cheaper_costs_less_and_is_worse(tmp_path) -> None:
    args = ["--request-rate", "25", "--dataset-name", "random", "--gpu", "a100=1.5"]
    code, found = plan(tmp_path, *FAST, *args, *SLO, "--tensor-parallel-size", "1")

    assert code == 0
    assert found["best"]["num_instances"] >= 2
    following = found["next_cheaper"]
    assert following["cost_per_hour"] < found["best"]["cost_per_hour"]
    assert not following["attained"]
    assert following["points_lost"] > 0.0


def test_the_next_cheaper_that_a_check_has_rejected_is_told_as_the_check_found_it(
    tmp_path, capsys, monkeypatch
) -> None:
    found_by_checks = iter((0.90, 0.97))

    def checked(args, load, configuration):  # type: ignore[no-untyped-def]
        fast = cli.run_fast(args.planned, configuration, load, args.seed, args.attainment)
        return replace(fast, attainment=next(found_by_checks))

    monkeypatch.setattr(cli, "_real", checked)
    fast = [flag for flag in FAST if flag != "--no-check"]

    code, found = plan(tmp_path, *fast, *LOAD, *SLO, "--gpu", "a100=1.5", "--no-pools")

    assert code == 0
    following = found["next_cheaper"]
    assert following["name"] == found["checks"][0]["configuration"]
    assert (following["attainment"], following["attained"]) == (0.90, False)
    assert following["points_lost"] == pytest.approx(7.0)
    assert "loses 7.0 points (90.0%) with the real schedulers." in capsys.readouterr().out


def test_requests_of_one_token_are_planned_for_and_have_no_time_per_token(
    tmp_path, capsys, monkeypatch
) -> None:
    def fast(args, load, configuration):  # type: ignore[no-untyped-def]
        return cli.run_fast(args.planned, configuration, load, args.seed, args.attainment)

    monkeypatch.setattr(cli, "_real", fast)
    args = [flag for flag in FAST if flag != "--no-check"]

    code, found = plan(
        tmp_path, *args, *LOAD, *SLO, "--gpu", "a100=1.5", "--random-output-len", "1"
    )

    assert code == 0
    assert found["best"]["tpot_ms"] == [None, None]
    assert found["best"]["tpot_attainment"] == 1.0
    out = capsys.readouterr().out
    assert "TTFT p50 +0% p99 +0%." in out
    assert "nan" not in out.lower()
