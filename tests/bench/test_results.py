from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench_runs import INFO, SLO, make_records, make_workload, run_result, with_percentiles

from sola_sched.bench.backends.base import RunOutcome, SchedulerSpec, parse_scheduler
from sola_sched.bench.report import plots, results
from sola_sched.bench.report import table as report
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError

VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
}  # fmt: skip
VLLM_LATENCY_KEYS = {
    f"{statistic}_{name}_ms"
    for statistic in ("mean", "median", "std", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")
}
VLLM_DETAILED_KEYS = {
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
    "errors",
}  # fmt: skip
OUR_KEYS = {"slo", "attainment", "attainment_by_class", "scheduler", "notes", "seed"}


def test_result_has_the_keys_of_vllm_bench_serve_and_ours() -> None:
    result = run_result()

    wanted = VLLM_KEYS | VLLM_LATENCY_KEYS | VLLM_DETAILED_KEYS | OUR_KEYS
    assert wanted <= set(result)
    assert not VLLM_DETAILED_KEYS & set(results.without_details(result))


def test_numbers_of_a_hand_computed_run() -> None:
    result = run_result(ttfts_s=(0.1, 0.2, 0.9, math.nan))

    assert (result["completed"], result["failed"], result["num_prompts"]) == (3, 1, 4)
    assert result["total_input_tokens"] == 30
    assert result["total_output_tokens"] == 9
    assert result["request_throughput"] == pytest.approx(0.3)
    assert result["request_goodput"] == pytest.approx(0.2)
    assert result["attainment"] == 0.5
    assert result["output_throughput"] == pytest.approx(0.9)
    assert result["mean_ttft_ms"] == pytest.approx(400)
    assert result["median_tpot_ms"] == pytest.approx(50)
    assert result["slo"] == {
        "ttft_ms": 500,
        "tpot_ms": 100,
        "e2e_ms": math.inf,
        "source": "given with --slo",
    }
    assert result["scheduler"]["mean_step_cpu_ms"] == pytest.approx(1.5)
    assert result["scheduler"]["num_preemptions"] == 1


@pytest.mark.vllm
def test_result_follows_vllms_own_arithmetic() -> None:
    serve = pytest.importorskip("vllm.benchmarks.serve")
    request_output = pytest.importorskip("vllm.benchmarks.lib.endpoint_request_func")
    workload = make_workload(4)
    records = make_records(workload, (0.1, 0.2, 0.9, math.nan))
    outputs = [
        request_output.RequestFuncOutput(
            success=r.completed, latency=r.latency_s, ttft=r.ttft_s, itl=r.itls_s,
            output_tokens=r.num_output_tokens, prompt_len=r.num_prompt_tokens,
            start_time=r.arrival_s,
        )
        for r in records
    ]  # fmt: skip

    theirs, _ = serve.calculate_metrics(
        [], outputs, 10.0, None, [99.0], {"ttft": 500.0, "tpot": 100.0}
    )
    ours = results.make_result(
        INFO, workload, SchedulerSpec("stock", "stock"), RunOutcome(records, 10.0)
    )

    for key in ("request_goodput", "request_throughput", "output_throughput", "mean_ttft_ms",
                "median_tpot_ms", "std_itl_ms", "max_output_tokens_per_s",
                "max_concurrent_requests"):  # fmt: skip
        assert ours[key] == pytest.approx(getattr(theirs, key)), key
    assert ours["p99_ttft_ms"] == pytest.approx(dict(theirs.percentiles_ttft_ms)[99.0])


def test_metadata_rate_and_percentiles_are_written_as_vllm_does() -> None:
    info = with_percentiles(replace(INFO, metadata={"tp": "1"}, label="night"), 25.0, 99.9)

    result = run_result(rate=math.inf, info=info)

    assert result["tp"] == "1"
    assert result["label"] == "night-stock:512"
    assert result["request_rate"] == "inf"
    assert {"p25_ttft_ms", "p99.9_tpot_ms"} <= set(result)
    name = results.result_filename(result)
    assert name == f"night-stock_512-infqps-model-{result['date']}.json"


def test_saved_json_has_no_nan_and_can_be_appended(tmp_path: Path) -> None:
    nothing = run_result(ttfts_s=(math.nan, math.nan))
    path = tmp_path / "deep" / "r.json"

    results.save(path, [nothing])
    assert json.loads(path.read_text())["mean_ttft_ms"] is None

    results.save(path, [run_result()], append=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["completed"] for line in lines] == [0, 3]


@pytest.mark.parametrize(
    ("text", "kind", "engine_args", "options"),
    [
        ("stock", "stock", {}, {}),
        ("stock:512", "stock", {"max_num_batched_tokens": 512}, {}),
        ("stock:engine.scheduling_policy=priority", "stock", {"scheduling_policy": "priority"}, {}),
        ("sola:policy=paper,tile=64", "sola", {}, {"policy": "paper", "tile": 64}),
        ("sola:safety=0.1,engine.max_num_seqs=8,profile=null", "sola", {"max_num_seqs": 8},
         {"safety": 0.1, "profile": None}),
    ],
)  # fmt: skip
def test_scheduler_specs(
    text: str, kind: str, engine_args: dict[str, object], options: dict[str, object]
) -> None:
    spec = parse_scheduler(text)

    assert (spec.label, spec.kind) == (text, kind)
    assert (spec.engine_args, spec.options) == (engine_args, options)


@pytest.mark.parametrize("text", ["vllm", "stock:0", "stock:x", "stock:policy=paper", ""])
def test_unknown_scheduler_spec_is_explained(text: str) -> None:
    with pytest.raises(ConfigError, match="'--schedulers' takes"):
        parse_scheduler(text)


def test_table_marks_the_best_stock_run_of_each_rate() -> None:
    runs = [
        run_result("stock:512", 2.0, (0.1, 0.9, 0.9, 0.9)),
        run_result("stock:2048", 2.0, (0.1, 0.2, 0.9, 0.9)),
        run_result("sola", 2.0, (0.1, 0.2, 0.3, 0.9)),
    ]

    lines = report.table(runs).splitlines()

    assert [line.split()[1] for line in lines[2:5]] == ["stock:512", "stock:2048*", "sola"]
    assert [line.split()[3] for line in lines[2:5]] == ["25.0", "50.0", "75.0"]
    assert report.conclusions(runs)[0] == (
        "2 req/s: sola / stock:2048 = 1.50 x goodput (75.0% against 50.0% attained)."
    )


def test_classes_are_shown_with_what_they_are_worth_and_the_worst() -> None:
    workload = make_workload(4)
    records = make_records(workload, (0.1, 0.9, 0.1, 0.1))
    for record, name in zip(records, ("chat", "chat", "job", "job"), strict=True):
        weight = 3.0 if name == "chat" else 1.0
        record.slo, record.slo_class = replace(SLO, weight=weight), name
    run = results.make_result(INFO, workload, parse_scheduler("sola"), RunOutcome(records, 10.0))

    assert run["weighted_attainment"] == pytest.approx(5 / 8)
    assert run["weighted_goodput"] == pytest.approx(0.5)
    *_, header, _, row = report.class_table([run]).splitlines()
    assert header.split() == [
        "req/s", "scheduler", "chat", "job", "all", "weighted", "weighted", "goodput", "worst",
    ]  # fmt: skip
    assert row.replace(" %", "").split() == ["2", "sola", "50.0", "100.0", "75.0", "62.5", "0.50",
                                            "chat"]  # fmt: skip
    assert report.class_table([run_result()]) == ""


def test_table_tells_the_worst_wait() -> None:
    header, _, run, nothing = report.table(
        [run_result("sola", 2.0, (0.1, 0.25, 0.2, math.nan)), run_result("stock", 2.0, (math.nan,))]
    ).splitlines()[:4]

    worst = slice(header.index(" max"), header.index(" max") + 4)
    assert run[worst].strip() == "250"
    assert nothing[worst].strip() == "-"


def test_sustained_rates_are_bounded_by_what_was_run() -> None:
    good, bad = (0.1,) * 10, (0.9,) * 10
    runs = [
        run_result("stock", 2.0, bad), run_result("stock", 4.0, bad),
        run_result("sola", 2.0, good), run_result("sola", 4.0, good),
        run_result("sola:policy=paper", 2.0, good), run_result("sola:policy=paper", 4.0, bad),
    ]  # fmt: skip

    assert report.conclusions(runs)[-1] == (
        "Rate at 90% attainment, req/s: stock < 2, sola > 4, sola:policy=paper 2.2."
    )
    assert "inf x goodput" in report.conclusions(runs)[0]


def test_where_nobody_attains_there_is_no_ratio() -> None:
    none = (0.9,) * 10
    runs = [run_result("stock", 2.0, none), run_result("sola", 2.0, none)]

    first = report.conclusions(runs)[0]

    assert first.startswith("2 req/s: no request attains, neither with sola nor with stock")


def test_without_matplotlib_the_picture_is_none_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = [run_result("stock", 2.0, (0.1,) * 10)]

    said = plots.drawn(lambda: plots.plot_attainment(runs, tmp_path / "figure.png"))

    assert said.startswith("none, plots need matplotlib")


def test_both_figures_are_drawn_even_if_nothing_completed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        run_result("stock", 2.0), run_result("sola", 2.0),
        run_result("stock", math.inf, (math.nan,)), run_result("sola", math.inf),
    ]  # fmt: skip

    plane = plots.plot_plane(runs, SloTarget(ttft_s=0.5), tmp_path / "plane.png")
    curve = plots.plot_attainment(runs, tmp_path / "curve.png")

    assert plane.read_bytes()[:4] == curve.read_bytes()[:4] == b"\x89PNG"
