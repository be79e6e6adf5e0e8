"""The profiler: what it records, what it measures, what it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_help import assert_explained
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.cost.fit import DECODE, MIXED, PREFILL, kind_of
from sola_sched.cost.grid import (
    Measured,
    held_out_errors,
    make_grid,
    typical_steps,
)
from sola_sched.cost.model import Coefficients, CostModel, StepShape
from sola_sched.errors import ProfileError
from sola_sched.profile.measure import StepRecorder, main
from sola_sched.vllm_adapter.engine_facts import COMPARED, differences
from sola_sched.vllm_adapter.steps.step_shape import shape_of

TRUTH = Coefficients(a0=2e-9, b0=1e-9, c0=6e-5, d0=8e-3, a1=5e-5, b1=1e-7, c1=9e-3, overlap=7e-3)


def make_request(*, prompt: int, computed: int, output: int = 0) -> SimpleNamespace:
    """A request as the scheduler leaves it after ``schedule()``."""
    return SimpleNamespace(
        num_prompt_tokens=prompt, num_tokens=prompt + output, num_computed_tokens=computed
    )


def shape_after(requests: dict[str, Any], scheduled: dict[str, int]) -> StepShape:
    return shape_of(SimpleNamespace(num_scheduled_tokens=scheduled), requests)


# ---- shapes


@pytest.mark.parametrize(
    ("request_", "scheduled", "expected"),
    [
        # A whole prompt.
        (make_request(prompt=10, computed=10), 10, StepShape(0, 0, 10, 100, 0)),
        # A chunk in the middle.
        (make_request(prompt=100, computed=60), 20, StepShape(0, 0, 20, 400, 800)),
        # The last token of a prompt is prefill, even alone.
        (make_request(prompt=100, computed=100), 1, StepShape(0, 0, 1, 1, 99)),
        # The first output token goes in, the second comes out.
        (make_request(prompt=100, computed=101, output=1), 1, StepShape(1, 101, 0, 0, 0)),
        # Asynchronous: the output of the step before is not known yet.
        (make_request(prompt=100, computed=102, output=1), 1, StepShape(1, 102, 0, 0, 0)),
        # Speculative decoding checks three drafts.
        (make_request(prompt=100, computed=104, output=1), 4, StepShape(1, 104, 0, 0, 0)),
        # Computed again after a preemption: prompt and outputs in one chunk, or the rest of them.
        (make_request(prompt=10, computed=30, output=20), 30, StepShape(0, 0, 30, 900, 0)),
        (make_request(prompt=10, computed=25, output=20), 10, StepShape(0, 0, 10, 100, 150)),
    ],
)
def test_shape_of_one_request(request_: Any, scheduled: int, expected: StepShape) -> None:
    assert shape_after({"r": request_}, {"r": scheduled}) == expected


def test_shape_of_a_mixed_step_sums_its_requests() -> None:
    requests = {
        "a": make_request(prompt=100, computed=101, output=1),
        "b": make_request(prompt=50, computed=60, output=10),
        "c": make_request(prompt=64, computed=48),
        "d": make_request(prompt=8, computed=8),
        "unscheduled": make_request(prompt=8, computed=0),
    }

    shape = shape_after(requests, {"a": 1, "b": 1, "c": 32, "d": 8})

    assert shape == StepShape(2, 161, 40, 32.0**2 + 8.0**2, 16.0 * 32)


# ---- recording


class FakeScheduler:
    """Schedules one decode a step; ``schedule`` takes 1 s, ``update_from_output`` 2 s."""

    def __init__(self, clock: FakeClock) -> None:
        self.requests = {"r": make_request(prompt=4, computed=5, output=1)}
        self._clock = clock

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        self._clock.now += 1.0
        return SimpleNamespace(num_scheduled_tokens={} if throttle_prefills else {"r": 1})

    def update_from_output(self, output: SimpleNamespace, model_output: str) -> str:
        self._clock.now += 2.0
        return model_output


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_synchronous_step_lasts_from_schedule_to_update() -> None:
    clock = FakeClock()
    scheduler: Any = FakeScheduler(clock)
    recorder = StepRecorder(scheduler, clock)

    clock.now = 100.0
    output = scheduler.schedule()
    clock.now += 10.0
    answer = scheduler.update_from_output(output, "tokens")

    assert answer == "tokens"
    assert recorder.steps == [(StepShape(1, 5, 0, 0.0, 0.0), 13.0)]


def test_step_scheduled_ahead_lasts_from_the_end_of_the_one_before() -> None:
    clock = FakeClock()
    scheduler: Any = FakeScheduler(clock)
    recorder = StepRecorder(scheduler, clock)

    first, second = scheduler.schedule(), scheduler.schedule()
    clock.now = 20.0
    scheduler.update_from_output(first, "")
    clock.now = 30.0
    scheduler.update_from_output(second, "")

    assert [time_s for _, time_s in recorder.steps] == [22.0, 10.0]


def test_empty_step_is_not_recorded_and_detaching_restores_the_methods() -> None:
    clock = FakeClock()
    scheduler: Any = FakeScheduler(clock)
    recorder = StepRecorder(scheduler, clock)

    scheduler.update_from_output(scheduler.schedule(throttle_prefills=True), "")
    recorder.detach()
    scheduler.update_from_output(scheduler.schedule(), "")

    assert recorder.steps == []


# ---- grid


@given(st.integers(1, 200_000), st.integers(1, 16_384), st.integers(1, 512), st.integers(1, 10**6))
def test_grid_stays_within_the_limits(
    max_len: int, max_chunk: int, max_batch: int, max_kv_tokens: int
) -> None:
    limits = {
        "max_len": max_len,
        "max_chunk": max_chunk,
        "max_batch": max_batch,
        "max_kv_tokens": max_kv_tokens,
    }
    if min(max_len, max_kv_tokens) < 40:
        with pytest.raises(ProfileError, match="A profile needs"):
            make_grid(**limits)
        return

    grid = make_grid(**limits)

    assert len(grid) < 100
    for scenario in grid:
        together = len(scenario.prefills) if scenario.num_decodes == 0 else 1
        assert scenario.num_decodes + together * bool(scenario.prefills) <= max_batch
        assert 1 <= scenario.chunk <= max_chunk
        assert all(1 <= length < max_len for length in (*scenario.prefills, scenario.context + 1))
        decoding = scenario.num_decodes * (scenario.context + 1)
        prefilling = (
            max(scenario.prefills, default=0) if scenario.num_decodes else sum(scenario.prefills)
        )
        assert decoding + prefilling <= max_kv_tokens


def test_usual_grid_has_every_kind_and_chunks_with_context() -> None:
    grid = make_grid(max_len=4096, max_chunk=2048, max_batch=256, max_kv_tokens=400_000)

    assert any(not s.num_decodes for s in grid)
    assert any(s.num_decodes == 256 and not s.prefills for s in grid)
    assert any(s.num_decodes and s.prefills for s in grid)
    assert any(max(s.prefills, default=0) > s.chunk for s in grid)


# ---- errors


def make_measured(count: int, *, passes: int = 3, noise: float = 0.0) -> list[Measured]:
    rng = np.random.default_rng(0)
    truth = CostModel.from_coefficients(TRUTH)
    measured = []
    for index in range(count):
        chunk = int(rng.integers(8, 2048))
        shapes = [
            StepShape(0, 0, chunk, float(chunk) ** 2, 100.0 * chunk),
            StepShape(index + 1, 500 * (index + 1), 0, 0.0, 0.0),
            StepShape(index + 1, 500 * (index + 1), chunk, float(chunk) ** 2, 0.0),
        ]
        measured.append(
            [
                [(shape, truth.step_s(shape) * rng.lognormal(0.0, noise)) for shape in shapes]
                for _ in range(passes)
            ]
        )
    return measured


def test_median_over_passes_removes_a_disturbed_pass() -> None:
    measured = make_measured(2)
    undisturbed = measured[0][0]
    measured[0][1] = [(shape, 50.0 * time_s) for shape, time_s in undisturbed]

    assert typical_steps(measured)[0] == undisturbed


def test_pass_with_other_shapes_is_left_out_of_the_median() -> None:
    measured = make_measured(1, passes=1)
    measured[0].append(measured[0][0][:1])

    assert typical_steps(measured)[0] == measured[0][0]


def test_held_out_error_is_small_for_a_model_that_fits() -> None:
    errors = held_out_errors(make_measured(30, noise=0.05))

    assert list(errors) == ["prefill only", "decode only", "mixed", "all"]
    assert errors["all"]["num_steps"] == 90
    # The mean of |x| for a normal x is 0.8 sigma; the median of three has 0.67 of its spread.
    assert errors["all"]["mean_abs_error"] == pytest.approx(0.04, abs=0.015)
    assert errors["all"]["median_step_error"] < errors["all"]["mean_abs_error"]


def test_held_out_error_of_a_single_scenario_is_its_own() -> None:
    assert held_out_errors(make_measured(1))["all"]["mean_abs_error"] < 0.05


# ---- command


def test_show_prints_provenance_errors_and_coefficients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    errors = held_out_errors(make_measured(6))
    meta = {"model": "llama", "versions": {"vllm": "1"}, "errors": errors}
    CostModel.from_coefficients(TRUTH).save(path, meta=meta)

    status = main(["--show", str(path)])

    out = capsys.readouterr().out
    assert status == 0
    assert "model: llama" in out
    assert "versions: vllm 1" in out
    assert "decode only" in out
    assert "6e-05 s/token" in out


def test_show_of_a_wrong_file_fails_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["--show", str(tmp_path / "none.json")])

    assert status == 2
    assert "none.json" in capsys.readouterr().err


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    from sola_sched.bench.backends.model import TINY_SHAPE, write_model

    return write_model(tmp_path / "tiny", TINY_SHAPE)


@pytest.mark.vllm
def test_profile_of_a_real_engine_covers_every_kind_and_is_usable(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tiny.json"
    flags = [
        "--load-format",
        "dummy",
        "--enforce-eager",
        "--max-num-seqs",
        "16",
        "--dtype",
        "float32",
    ]

    status = main(
        [str(tiny_model), *flags, "--output", str(output), "--passes", "1", "--time-limit-s", "15"]
    )

    assert status == 0
    model = CostModel.load(output)
    errors = model.meta["errors"]
    assert {"prefill only", "decode only", "mixed", "all"} == set(errors)
    assert model.meta["dtype"] == "torch.float32"
    assert set(COMPARED) <= set(model.meta)
    assert model.step_s(StepShape(8, 800, 64, 64.0**2, 0.0)) > 0.0
    assert "written to" in capsys.readouterr().out


def test_the_help_is_ours_and_loads_no_vllm() -> None:
    code = (
        "import runpy, sys; sys.modules['vllm'] = sys.modules['torch'] = None;"
        "sys.argv = ['profile', '--help'];"
        "runpy.run_module('sola_sched.profile', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert_explained(done.stdout)
    assert "vllm serve" in done.stdout
    assert len(done.stdout.splitlines()) < 30


def test_a_missing_model_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--enforce-eager"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: MODEL must be given, a name or a folder; see python -m sola_sched.profile --help\n"
    )


@pytest.mark.vllm
def test_a_flag_that_nobody_knows_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["some/model", "--pases", "3"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: unrecognized arguments: --pases 3; see ")


@pytest.mark.vllm
@pytest.mark.parametrize("option", ["--passes=0", "--time-limit-s=0", "--max-batch=0"])
def test_limit_without_a_measurement_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["some/model", option])

    assert status == 2
    assert f"'{option.partition('=')[0]}' must be > 0" in capsys.readouterr().err


@pytest.mark.vllm
def test_output_in_a_missing_folder_is_refused_before_the_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["some/model", "--output", str(tmp_path / "missing" / "p.json")])

    assert status == 2
    assert "'--output' must be in a folder that exists" in capsys.readouterr().err


def test_without_vllm_a_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)

    assert main(["some/model"]) == 2
    assert "vLLM, which is not installed" in capsys.readouterr().err


@pytest.mark.vllm
def test_an_output_that_cannot_be_written_is_found_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")

    assert main(["some/model", "--output", str(tmp_path)]) == 2
    assert "'--output' must name a file that can be written" in capsys.readouterr().err


@pytest.mark.vllm
def test_a_model_that_is_none_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "no-such-model"

    assert main([str(missing), "--output", str(tmp_path / "p.json")]) == 2

    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: 'MODEL' must be one that vLLM can serve")
    assert str(missing) in line


def test_kinds_of_steps() -> None:
    assert kind_of(StepShape(0, 0, 5, 25, 0)) == PREFILL
    assert kind_of(StepShape(1, 5, 0, 0, 0)) == DECODE
    assert kind_of(StepShape(1, 5, 5, 25, 0)) == MIXED
    assert kind_of(StepShape(0, 0, 0, 0, 0)) is None


@pytest.mark.parametrize(
    ("profiled", "served"),
    [
        ("meta-llama/Llama-3-8B", "/models/llama-3-8b"),
        ("/models/Llama-3-8B/", "Llama-3-8B"),
        ("meta-llama/Llama-3-8B", "/cache/models--meta-llama--Llama-3-8B/snapshots/8cde5ca"),
    ],
)
def test_one_model_at_two_places_is_one_model(profiled: str, served: str) -> None:
    assert differences({"model": profiled}, {"model": served}) == []


def test_two_models_differ_by_name() -> None:
    found = differences({"model": "a/Llama-3-8B"}, {"model": "a/Llama-3-70B"})

    assert found == ["model a/Llama-3-8B (here a/Llama-3-70B)"]
