"""The script that measures copies on a GPU: what it does where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from harness.command import main
from registry import EXPERIMENTS
from swap import transfer


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")
def test_without_a_gpu_numbers_are_marked_absent(tmp_path: Path) -> None:
    assert main(EXPERIMENTS, ["swap-transfer", "--results", str(tmp_path)]) == 0
    table = (tmp_path / "swap-transfer.md").read_text()
    assert "speed absent" in table
    assert "GB/s" in table
    assert not [
        line for line in table.splitlines() if line.startswith("| raw") and "absent" not in line
    ]


@pytest.mark.parametrize(("is_int8", "worst"), [(False, 0.0), (True, 0.55)])
def test_round_trips_of_both_modes_are_right(is_int8: bool, worst: float) -> None:
    swapped = transfer.Swapped(transfer.TINY, 640, torch.device("cpu"), is_int8=is_int8)
    assert swapped.largest_error() <= worst
    swapped.worker.close()


def test_a_wrong_round_trip_reports_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.Packer, "unpack", lambda self, piece, image, tables: None)

    with pytest.raises(SystemExit, match="no speed is reported"):
        main(EXPERIMENTS, ["swap-transfer", "--results", str(tmp_path)])
    assert not (tmp_path / "swap-transfer.md").exists()


def test_a_step_is_the_matrix_products_of_the_shape() -> None:
    flop_counter = pytest.importorskip("torch.utils.flop_counter")
    with flop_counter.FlopCounterMode(display=False) as flops:
        transfer.make_step(transfer.TINY, torch.device("cpu"))()
    # Batch 64, two layers; 32 x (32 + 32), 32 x 32, 32 x 128 and 64 x 32 weights.
    assert flops.get_total_flops() == 2 * 64 * 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32)
