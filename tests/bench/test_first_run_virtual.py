"""The part of a first run in virtual time, with the real schedulers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from sola_sched.bench import calibrate
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.first_run import virtual as first_run_virtual


def test_targets_are_ten_times_the_latency_of_a_request_alone() -> None:
    backend = first_run_virtual.make_backend()
    workload = first_run_virtual.make_workload(backend).at_rate(3.0)

    slo = calibrate.measure_slo(backend, workload, parse_scheduler("stock:8192")).target

    assert slo.ttft_s == pytest.approx(first_run_virtual.TTFT_S, rel=1e-3)
    assert slo.tpot_s == pytest.approx(first_run_virtual.TPOT_S, rel=1e-3)


@pytest.mark.slow
def test_every_share_has_an_interval_and_the_picture_is_where_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_run_virtual, "_NUM_WORKERS", 1)  # each imports vLLM
    said: list[str] = []

    found = first_run_virtual.run(
        tmp_path, said.append, rates=(2.5, 4.5), num_requests=12, is_hidden=True
    )

    assert len(found) == 2 * len(first_run_virtual.SCHEDULERS)
    rows = [line for line in said if line.split()[0] in ("2.5", "4.5")]
    assert [row.count(" to ") for row in rows] == [2, 2]
    picture = Path(said[-1].split()[-1])
    assert picture == tmp_path / first_run_virtual.FIGURE
    assert picture.read_bytes().startswith(b"\x89PNG")
