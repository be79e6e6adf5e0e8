"""Sweeps in virtual time: resumable, repeatable, the bound beside every row."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from harness import hindsight as sim_hindsight
from harness import points, resumable, sweep
from harness.points import BOUND, HINDSIGHT, SYNTHETIC, Point, make_workload
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.backends.bound import workload_bound
from sola_sched.bench.cli import main
from sola_sched.bench.report import table as report
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.errors import ConfigError, DatasetError
from sola_sched.workloads.workload import RequestSpec, Workload

pytestmark = pytest.mark.vllm

BASE = Point(
    "llama-3-8b-a100", SYNTHETIC, rate_per_s=4.0, ttft_s=2.0, tpot_s=0.1, scheduler="stock:2048",
    num_requests=25,
)  # fmt: skip
POINTS = [replace(BASE, scheduler=name) for name in ("stock:2048", "sola", BOUND)]
#: Columns that depend on the machine.
MEASURED = ("cpu_us_per_step", "overhead_ratio", "num_workers")


def facts(rows: list[sweep.Row]) -> list[sweep.Row]:
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


def limits() -> Any:
    return sweep.make_backend(BASE.profile).limits


def arrivals_of(point: Point, data: Path | None = None) -> np.ndarray:
    return np.array([r.arrival_s for r in make_workload(point, limits(), data).requests])


def write_lengths(folder: Path, rows: list[tuple[float, int, int]]) -> str:
    with gzip.open(folder / "trace.csv.gz", "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n")
        file.writelines(f"{a},{p},{o}\n" for a, p, o in rows)
    return "trace.csv.gz"


def test_finished_points_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    first = sweep.run(POINTS[:1], path, is_hidden=True)
    ran: list[Point] = []
    run_point = sweep.run_point
    monkeypatch.setattr(
        sweep, "run_point", lambda p, data=None: ran.append(p) or run_point(p, data)
    )

    rows = sweep.run(POINTS, path, is_hidden=True)

    assert ran == POINTS[1:]
    assert facts(rows[:1]) == [row | {BOUND: rows[0][BOUND]} for row in facts(first)]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz"])
def test_a_line_cut_off_by_a_kill_is_run_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = facts(sweep.run(POINTS, path, is_hidden=True))
    path.write_bytes(path.read_bytes()[:-40])

    assert len(resumable.load(path)) in (1, 2)
    assert facts(sweep.run(POINTS, path, is_hidden=True)) == whole
    assert len(resumable.load(path)) == 3
    if path.suffix == ".gz":
        assert len(gzip.decompress(path.read_bytes()).splitlines()) == 3


@pytest.mark.parametrize("num_bytes", [0, 1, 9, 15, 200, 10**6])
def test_of_a_compressed_file_that_was_cut_off_what_is_whole_stays(
    tmp_path: Path, num_bytes: int
) -> None:
    path, rows = tmp_path / "rows.jsonl.gz", [{"key": str(number)} for number in range(100)]
    streams = [gzip.compress(f"{json.dumps(row)}\n".encode(), mtime=0) for row in rows]
    path.write_bytes(b"".join(streams)[:num_bytes])
    ends = np.cumsum([len(stream) for stream in streams])

    found = resumable.load(path)
    assert found == rows[: len(found)]
    # The last eight bytes of a stream are its checksum: without them its line is whole already.
    assert sum(ends <= num_bytes) <= len(found) <= sum(ends - 8 <= num_bytes)


@pytest.mark.slow
@pytest.mark.long
def test_rows_are_the_same_in_worker_processes(tmp_path: Path) -> None:
    alone = sweep.run(POINTS, tmp_path / "alone.jsonl", is_hidden=True)
    together = sweep.run(POINTS, tmp_path / "together.jsonl", num_workers=2, is_hidden=True)

    assert facts(together) == facts(alone)


def test_bound_is_a_column_and_above_every_scheduler(tmp_path: Path) -> None:
    names = ("stock:2048", "sola", "sjf", BOUND)
    overload = [replace(BASE, rate_per_s=30.0, scheduler=name) for name in names]

    rows = sweep.run(overload, tmp_path / "runs.jsonl", is_hidden=True)

    assert [row["scheduler"] for row in rows] == list(names[:-1])
    assert len({row["bound"] for row in rows}) == 1
    assert all(0.0 < row["attainment"] <= row["bound"] <= 1.0 for row in rows)


def test_no_bound_where_none_was_asked_for(tmp_path: Path) -> None:
    rows = sweep.run(POINTS[:1], tmp_path / "runs.jsonl", is_hidden=True)

    assert math.isnan(rows[0]["bound"])


@pytest.mark.slow
def test_hindsight_lies_between_the_scheduler_and_the_bound(tmp_path: Path) -> None:
    names = (sim_hindsight.SCHEDULER, HINDSIGHT, BOUND)
    overload = [replace(BASE, rate_per_s=60.0, num_requests=30, scheduler=n) for n in names]

    (row,) = sweep.run(overload, tmp_path / "runs.jsonl", is_hidden=True)

    assert row["attainment"] <= row["hindsight"] <= row["bound"] <= 1.0


@pytest.mark.slow
def test_what_can_be_done_with_hindsight_is_done_in_a_run() -> None:
    """The best selection is that of a run: one run serves all, and more are never worse."""
    point = replace(BASE, rate_per_s=60.0, num_requests=30)
    backend = sweep.make_backend(point.profile)
    workload = make_workload(point, backend.limits)
    plain = backend.run(workload, parse_scheduler(sim_hindsight.SCHEDULER), point.slo)

    shares = [
        sim_hindsight.attainable_with_hindsight(backend, workload, point.slo, num_runs=n)
        for n in (1, 2, 6)
    ]

    assert shares[0] == metrics.attained(plain.records, point.slo).mean()
    assert shares == sorted(shares)
    with pytest.raises(ValueError, match="'num_runs' must be >= 1"):
        sim_hindsight.attainable_with_hindsight(backend, workload, point.slo, num_runs=0)


def test_every_scheduler_gets_the_same_requests() -> None:
    first, second = (make_workload(point, limits()) for point in POINTS[:2])

    assert first == second
    assert first != make_workload(replace(BASE, seed=1), limits())


@pytest.mark.parametrize("arrivals", ["poisson", "gamma:0.25", "mmpp:4:20"])
def test_realised_rate_is_the_rate_asked_for(arrivals: str) -> None:
    times_s = arrivals_of(replace(BASE, arrivals=arrivals, num_requests=400))

    assert times_s[-1] == pytest.approx(400 / BASE.rate_per_s)
    assert (np.diff(times_s) >= 0).all()


def test_modulated_arrivals_are_burstier_than_poisson() -> None:
    def dispersion(arrivals: str) -> float:
        times_s = arrivals_of(replace(BASE, arrivals=arrivals, num_requests=2000))
        counts = np.bincount((times_s / 20.0).astype(int))[:-1]
        return float(counts.var() / counts.mean())

    assert dispersion("poisson") < 2.0
    assert dispersion("mmpp:4:20") > 4.0


def test_recorded_arrivals_are_windows_of_the_trace(tmp_path: Path) -> None:
    name = write_lengths(tmp_path, [(10.0 * i + i % 3, 100 + i, 5) for i in range(8)])
    point = replace(BASE, dataset=name, arrivals="recorded", num_requests=4, rate_per_s=2.0)

    times_s = arrivals_of(replace(point, seed=1), tmp_path)

    # Rows 4 to 7, at 41, 52, 60 and 71 s, on 2 s.
    assert times_s == pytest.approx(np.array([0.0, 11.0, 19.0, 30.0]) / 15.0)
    with pytest.raises(ConfigError, match="need 12 rows with times for seed 2"):
        arrivals_of(replace(point, seed=2), tmp_path)


def test_lengths_shift_in_the_middle_of_the_run(tmp_path: Path) -> None:
    name = write_lengths(tmp_path, [(0.0, 7, 3)] * 4)
    point = replace(BASE, dataset_after=name, outputs_from=name, num_requests=10)

    requests = make_workload(point, limits(), tmp_path).requests

    assert [r.output_tokens for r in requests] == [3] * 10
    assert [len(r.prompt_token_ids) for r in requests[5:]] == [7] * 5
    assert all(len(r.prompt_token_ids) != 7 for r in requests[:5])


def test_long_lengths_are_scaled_to_the_context(tmp_path: Path) -> None:
    name = write_lengths(tmp_path, [(0.0, 1000 * i, 100) for i in range(1, 41)])

    table = points.read_lengths(name, 8192, tmp_path)

    assert table.scale < 0.25
    assert np.percentile(table.prompt + table.output, 99) == pytest.approx(8192, rel=0.01)


@pytest.mark.parametrize("arrivals", ["poison", "gamma", "gamma:x", "mmpp:4", "mmpp:0:1"])
def test_unknown_arrivals_are_refused(arrivals: str) -> None:
    with pytest.raises(ConfigError, match="'arrivals' must be poisson, gamma:SHAPE"):
        make_workload(replace(BASE, arrivals=arrivals), limits())


def test_files_need_the_folder_they_are_in() -> None:
    with pytest.raises(DatasetError, match="pass --data DIR"):
        make_workload(replace(BASE, dataset="azure.csv.gz"), limits())


def test_cached_prefixes_loosen_the_bound() -> None:
    prompt = tuple(range(3, 3 + 4096))
    requests = tuple(RequestSpec(str(i), prompt, 2, 0.01 * i) for i in range(8))
    workload, slo = Workload(requests, request_rate=100.0), SloTarget(ttft_s=0.7, tpot_s=0.1)
    backend = sweep.make_backend(BASE.profile)
    cached = parse_scheduler("stock:engine.enable_prefix_caching=true")

    assert workload_bound(backend, workload, slo).num_attainable < 3
    assert workload_bound(backend, workload, slo, [cached]).num_attainable == 8


def test_benchmark_prints_and_saves_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--backend", "sim", "--schedulers", "stock:512", "sola", "--num-prompts", "30",
            "--request-rate", "3", "9", "--slo", "ttft:800", "tpot:60", "--disable-tqdm",
            "--result-dir", str(tmp_path)]  # fmt: skip

    assert main(argv) == 0

    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.split()[1:2] == ["bound"]]
    saved = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    ratios = report.bounds(saved)
    assert [row[0] for row in rows] == ["3", "9"]
    assert [float(row[3]) for row in rows] == [round(100 * r, 1) for r in ratios.values()]
    assert all(run["attainment"] <= run["bound_attainment"] for run in saved)
    assert "no scheduler attains more" in out
    assert len(list(tmp_path.glob("*-attainment.png"))) == 1
