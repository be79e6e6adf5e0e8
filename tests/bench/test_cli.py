from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from bench_runs import FixedBackend, make_workload

from sola_sched.bench import calibrate, plan, runner
from sola_sched.bench.args import build_parser
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import RunOutcome, SchedulerSpec
from sola_sched.bench.backends.model import TINY_SHAPE, ModelShape, cached_model, write_model
from sola_sched.bench.cli import main
from sola_sched.bench.report.results import SloSource
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError
from sola_sched.workloads.datasets import ModelLimits


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def use_fixed_backend(monkeypatch: pytest.MonkeyPatch, backend: Any = None) -> Any:
    backend = backend or FixedBackend()
    limits = ModelLimits(max_model_len=256, vocab_size=100)
    monkeypatch.setattr(plan, "_backend", lambda args, say: (backend, limits))
    return backend


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--schedulers", "fcfs"], "'--schedulers' takes"),
        (["--schedulers", "stock", "stock"], "must not repeat"),
        (["--schedulers", "sola:polcy=paper"], "Unknown option 'polcy'"),
        (["--slo", "ttft:0"], "must hold finite numbers > 0"),
        (["--slo", "ttft=5"], "takes ttft:<ms>"),
        (["--slo", "itl:5"], "takes ttft:<ms>"),
        (["--slo-class", "chat:1"], "NAME:SHARE:TTFT_MS:TPOT_MS"),
        (["--slo-class", "chat:1:9:9:9:9:9"], "WEIGHT"),
        (["--slo-class", "chat:none:9:9"], "--slo-class"),
        (["--slo", "ttft:500", "e2e:400"], "must be >= 'ttft_s'"),
        (["--slo", "e2e:400", "e2el:400"], "each once"),
        (["--request-rate", "-1"], "must be a number > 0"),
        (["--num-prompts", "0"], "whole number >= 1"),
        (["--metadata", "novalue"], "KEY=VALUE"),
        (["--metadata", "tp=1", "tp=2"], "each key once"),
        (["--metadata", "label=x", "tp=1", "num_prompts=7"], r"got label, num_prompts\)"),
        (["--metadata", "p99_ttft_ms=1"], r"got p99_ttft_ms\)"),
        (["--metadata", "bound_attainment=1"], r"got bound_attainment\)"),
        (["--slo-class", "chat:1:9:9", "--slo-class", "chat:2:9:9"], "got 'chat' 2 times"),
        (["--metric-percentiles", "50,101"], r"numbers in \[0, 100\]"),
        (["--percentile-metrics", "ttft,foo"], "takes ttft, tpot, itl, e2el"),
        (["--append-result"], "needs --result-filename"),
        (["--self-timed"], "needs --num-prompts"),
        (["--dataset-name", "wikipedia"], "invalid choice"),
        (["--engine-args", "[1]"], "must be a JSON object"),
        (["--frobnicate"], "unrecognized arguments"),
        (["--backend", "openai", "--schedulers", "stock"], "is for --backend engine"),
        (["--backend", "openai", "--port", "9"], "needs a server that answers"),
    ],
)
def test_wrong_arguments_end_with_one_line_and_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(argv)

    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    assert re.search(message, err)


def test_data_set_errors_end_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_fixed_backend(monkeypatch)

    code = main(["--dataset-name", "custom", "--dataset-path", str(tmp_path / "none.jsonl")])

    assert code == 2
    assert "must name an existing file" in capsys.readouterr().err


def test_sweep_reports_and_saves_every_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = use_fixed_backend(monkeypatch)

    code = main(
        ["--schedulers", "stock:64", "stock:128", "--request-rate", "5", "10", "--num-prompts",
         "12", "--slo", "ttft:500", "tpot:50", "--result-dir", str(tmp_path), "--disable-tqdm",
         "--metadata", "tp=1", "--save-detailed"]
    )  # fmt: skip

    out = capsys.readouterr().out
    assert code == 0
    assert [label for label, _, _ in backend.calls] == ["stock:64", "stock:128"] * 2
    assert len({tuple(w.requests) for _, w, _ in backend.calls}) == 2  # same within a rate
    assert out.count("100.0 %") == 4
    assert "SLO: TTFT 500 ms, TPOT 50 ms (given with --slo)." in out
    saved = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(saved) == 4
    assert all(run["tp"] == "1" and len(run["ttfts"]) == 12 for run in saved)
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_targets_rates_and_size_follow_from_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fixed_backend(monkeypatch)

    code = main(
        ["--schedulers", "stock", "--duration-budget", "3", "--no-save-result", "--disable-tqdm",
         "--result-dir", str(tmp_path)]
    )  # fmt: skip

    out = capsys.readouterr().out
    assert code == 0
    assert "SLO: TTFT 200 ms, TPOT 50 ms (10 x the single-request latency measured here" in out
    assert "3 runs of" in out
    assert list(tmp_path.iterdir()) == []


def test_rates_that_would_end_too_late_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fixed_backend(monkeypatch)

    code = main(
        ["--schedulers", "stock", "--request-rate", "5", "6", "7", "--slo", "ttft:500",
         "--duration-budget", "9", "--time-limit", "1e-6", "--no-save-result", "--disable-tqdm",
         "--result-dir", str(tmp_path)]
    )  # fmt: skip

    out = capsys.readouterr().out
    assert code == 0
    assert "Left out: 6/s, 7/s; they would end after --time-limit" in out


def test_several_runs_in_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_fixed_backend(monkeypatch)
    argv = ["--schedulers", "stock", "--request-rate", "5", "inf", "--num-prompts", "4", "--slo",
            "ttft:500", "--result-dir", str(tmp_path), "--disable-tqdm", "--result-filename",
            "all.json", "--append-result"]  # fmt: skip

    assert main(argv) == main(argv) == 0

    lines = [json.loads(line) for line in (tmp_path / "all.json").read_text().splitlines()]
    assert [line["request_rate"] for line in lines] == [5.0, "inf", 5.0, "inf"]
    assert "ttfts" not in lines[0]


def test_interrupted_run_saves_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FixedBackend):
        def run(self, *args: Any, **kwargs: Any) -> RunOutcome:
            outcome = super().run(*args, **kwargs)
            last = outcome.records[-1]
            last.completed, last.error = False, "interrupted by the user"
            outcome.interrupted = True
            return outcome

    use_fixed_backend(monkeypatch, Interrupted())

    code = main(
        ["--schedulers", "stock", "--request-rate", "5", "6", "--num-prompts", "4", "--slo",
         "ttft:500", "--result-dir", str(tmp_path), "--disable-tqdm"]
    )  # fmt: skip

    out = capsys.readouterr().out
    assert code == runner.EXIT_INTERRUPTED
    assert "1 of 2 runs started" in out
    assert "1 of 4 requests failed: interrupted by the user" in out
    (saved,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert saved["interrupted"] is True
    assert saved["attainment"] == 0.75


@pytest.mark.parametrize("place", ["between runs", "as a run starts", "after its requests"])
def test_an_interrupt_outside_a_run_keeps_the_runs_before(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    class Starting(FixedBackend):
        def run(self, *args: Any, **kwargs: Any) -> RunOutcome:
            if self.calls:
                raise KeyboardInterrupt
            outcome = super().run(*args, **kwargs)
            outcome.ends_all = place == "after its requests"
            return outcome

    bounds: list[int] = []

    def bound(*_: Any) -> dict[str, float]:
        bounds.append(len(backend.calls))
        if backend.calls:
            raise KeyboardInterrupt
        return {}

    backend = use_fixed_backend(
        monkeypatch, FixedBackend() if place == "between runs" else Starting()
    )
    monkeypatch.setattr(runner, "_bound", bound)

    code = main(
        ["--schedulers", "stock", "--request-rate", "5", "6", "--num-prompts", "4", "--slo",
         "ttft:500", "--result-dir", str(tmp_path), "--disable-tqdm"]
    )  # fmt: skip

    told = capsys.readouterr()
    assert code == runner.EXIT_INTERRUPTED
    assert "Interrupted: 1 of 2 runs have ended" in told.out
    assert "Saved 1 results" in told.out
    assert "nothing was saved" not in told.out + told.err
    (saved,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert (saved["interrupted"], saved["attainment"]) == (False, 1.0)
    assert place != "after its requests" or bounds == [0]  # nothing is begun after it


def test_an_interrupt_before_the_first_run_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bound(*_: Any) -> dict[str, float]:
        raise KeyboardInterrupt

    use_fixed_backend(monkeypatch)
    monkeypatch.setattr(runner, "_bound", bound)

    code = main(
        ["--schedulers", "stock", "--request-rate", "5", "--num-prompts", "4", "--slo",
         "ttft:500", "--result-dir", str(tmp_path), "--disable-tqdm"]
    )  # fmt: skip

    assert code == runner.EXIT_INTERRUPTED
    assert "nothing was saved" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_recorded_arrivals_that_come_at_once_cannot_be_stretched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = use_fixed_backend(monkeypatch)
    rows = [{"timestamp": 7.0, "input_length": 8, "output_length": 2, "hash_ids": []}] * 4
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    given = ["--dataset-name", "mooncake", "--dataset-path", str(trace), "--num-prompts", "4",
             "--self-timed", "--slo", "ttft:500", "--no-save-result"]  # fmt: skip

    for rate in ([], ["--request-rate", "5"]):
        assert main([*given, *rate]) == 2
        error = capsys.readouterr().err
        assert "not all at once" in error
        assert len(error.splitlines()) == 1
    assert backend.calls == []
    assert main([*given, "--request-rate", "inf"]) == 0


def test_single_request_latency_ignores_waiting_for_the_one_before() -> None:
    slo = calibrate.measure_slo(
        FixedBackend(ttft_s=0.03, tpot_s=0.004), make_workload(30), SchedulerSpec("stock", "stock")
    )

    assert slo.target.ttft_s == pytest.approx(0.3)
    assert slo.target.tpot_s == pytest.approx(0.04)


def test_saturation_of_a_server_with_a_known_service_time() -> None:
    backend = FixedBackend(ttft_s=0.1, tpot_s=0.05)  # 0.2 s a request, 32 at a time

    rate = calibrate.measure_saturation(
        backend, make_workload(200), SchedulerSpec("stock", "stock")
    )

    assert rate == pytest.approx(32 / 0.2, rel=0.05)
    assert calibrate.choose_rates(8.0) == [6.4, 8.0, 9.6]
    # 180 s of traffic are 30 requests in each of 12 runs, too few to queue, or 108 in each of 4.
    assert calibrate.choose_rates(2.0, num_schedulers=4, budget_s=180.0) == [2.4]
    assert calibrate.choose_rates(4.0, num_schedulers=4, budget_s=180.0) == [3.2, 4.0, 4.8]


def test_calibration_refuses_failures() -> None:
    class Broken(FixedBackend):
        def run(self, *args: Any, **kwargs: Any) -> RunOutcome:
            outcome = super().run(*args, **kwargs)
            outcome.records[0].completed, outcome.records[0].error = False, "no memory"
            return outcome

    with pytest.raises(ConfigError, match="no memory"):
        calibrate.measure_slo(Broken(), make_workload(5), SchedulerSpec("stock", "stock"))


def test_number_of_requests_follows_the_time_budget() -> None:
    count = calibrate.choose_num_prompts([5.0, 10.0], 3, budget_s=90.0, available=1000)

    assert count == 100  # 3 schedulers x (100 / 5 + 100 / 10) s = 90 s
    assert calibrate.choose_num_prompts([5.0], 1, 1e6, available=70) == 70
    assert calibrate.choose_num_prompts([math.inf], 1, 10.0, available=1000) == 200


def test_ours_gets_the_largest_token_budget_compared() -> None:
    specs = plan._schedulers(parse("--schedulers", "stock:256", "stock:1024", "sola"))

    assert specs[2].max_num_batched_tokens == 1024


def test_defaults_compare_stock_at_several_chunk_sizes_with_ours() -> None:
    args = parse()
    specs = plan._schedulers(args)

    assert sum(spec.kind == "stock" for spec in specs) >= 2
    assert specs[-1].kind == "sola"
    assert args.request_rate is None
    assert args.slo is None


def test_goodput_is_another_name_for_slo() -> None:
    assert parse("--goodput", "ttft:500", "tpot:50").slo == ["ttft:500", "tpot:50"]
    assert plan.slo_text(SloSource(SloTarget(0.5, math.inf), "x")) == (
        "TTFT 500 ms, TPOT unlimited (x)"
    )
    assert plan.slo_text(SloSource(SloTarget(1.0, 0.0123, 65.4321), "x")) == (
        "TTFT 1,000 ms, TPOT 12.3 ms, last token 65,432 ms (x)"
    )


def test_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_accelerator", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "x")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")

    changed = environment.prepare(None, is_random=True)

    assert "OMP_NUM_THREADS" not in changed
    assert changed["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_environment_does_not_force_cpu_settings_on_gpu_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "has_accelerator", lambda: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    monkeypatch.delenv("OMP_NUM_THREADS")

    assert "OMP_NUM_THREADS" not in environment.prepare("org/model")


def test_model_directory_is_complete_and_never_overwritten(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    directory = write_model(tmp_path / "model", TINY_SHAPE)

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("naïve ✓").ids) == "naïve ✓"
    assert tokenizer.get_vocab_size() == TINY_SHAPE.vocab_size
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 2
    assert main(["--make-model", str(directory)]) == 2


def test_cached_model_is_written_once(tmp_path: Path) -> None:
    first = cached_model(TINY_SHAPE, tmp_path)
    stamp = (first / "config.json").stat().st_mtime_ns

    assert cached_model(TINY_SHAPE, tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="to hold every byte"):
        ModelShape(vocab_size=100)
    with pytest.raises(ConfigError, match="must divide"):
        ModelShape(num_heads=7)
