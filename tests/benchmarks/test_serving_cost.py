"""What a token costs beside stock vLLM: whom a variant is compared with, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from harness.command import main
from registry import EXPERIMENTS
from serving.cost import CLIENTS, STOCK, STOCK_BARE, VARIANTS, _latest, compared, table

pytestmark = pytest.mark.vllm


def row(variant: str, ms: list[float], seed: int = 0, **columns: Any) -> dict[str, Any]:
    made = {
        "variant": variant, "seed": seed, "ms": ms, "cpu_ms": [each / 10 for each in ms],
        "quiet_ms": [each - 0.5 for each in ms],
        "way": "served", "clients": 1, "tokens": 400, "load": 0.5, "vllm": "0.32.0", "cpu": "C",
        "num_cores": 2,
        "run": 1,
    }  # fmt: skip
    return made | columns


def test_a_variant_is_compared_with_stock_in_the_same_round_of_the_same_start() -> None:
    """Rounds and starts differ by far more than the variants."""
    stock = [row(STOCK, [2.0, 8.0]), row(STOCK, [4.0, 1.0], seed=1)]
    ours = [row("sola_sched", [4.2, 1.05], seed=1), row("sola_sched", [2.1, 8.4])]

    beside = compared(ours, stock)

    assert beside.added == pytest.approx(0.05)
    assert (beside.low, beside.high) == pytest.approx((0.05, 0.05))
    assert beside.added_ms == pytest.approx(0.15)  # of 0.05, 0.1, 0.2 and 0.4
    assert beside.added_cpu_ms == pytest.approx(0.015)
    assert beside.ms == pytest.approx(3.15)
    assert beside.quiet_ms == pytest.approx(2.65)
    assert beside.quiet_added_ms == pytest.approx(0.15)
    assert (beside.quiet_low_ms, beside.quiet_high_ms) == pytest.approx((0.05, 0.4))


def test_the_interval_is_wide_where_rounds_disagree() -> None:
    beside = compared([row("sola_sched", [1.0, 2.0, 3.0])], [row(STOCK, [2.0, 2.0, 2.0])])

    assert beside.added == pytest.approx(0.0)
    assert beside.low < -0.3
    assert beside.high > 0.3


def test_the_table_has_each_variant_beside_its_own_stock_vllm() -> None:
    rows = [
        row(STOCK, [2.0, 2.0]), row("sola_sched", [2.2, 2.2]),
        row(STOCK_BARE, [1.0, 1.0]), row("sola_sched, no statistics", [1.2, 1.2]),
    ]  # fmt: skip

    text = table(rows)

    assert "vLLM 0.32.0, C, 2 cores, load average 0.5 to 0.5" in text
    lines = [line for line in text.splitlines() if line.startswith("| `vllm serve`")]
    assert len(lines) == len(rows)
    assert "| +0.200 | +10.0% (+10.0% to +10.0%) |" in lines[1]
    assert "| +0.200 | +20.0% (+20.0% to +20.0%) |" in lines[3]


def test_a_variant_that_was_measured_later_is_compared_with_stock_of_its_own_run() -> None:
    rows = [
        row(STOCK, [2.0, 2.0]), row("sola_sched", [2.2, 2.2]), row("no swapping", [9.0, 9.0]),
        row(STOCK, [4.0, 4.0], run=2), row("no swapping", [4.1, 4.1], run=2),
    ]  # fmt: skip

    latest = _latest(rows)

    assert [row["ms"][0] for row in latest] == [2.0, 2.2, 4.0, 4.1]
    lines = [line for line in table(latest).splitlines() if line.startswith("| `vllm serve`")]
    assert "| sola_sched | 2 | 2.200 | 2.200 to 2.200 | +0.200 |" in lines[1]
    assert "| no swapping | 2 | 4.100 | 4.100 to 4.100 | +0.100 |" in lines[2]


def test_every_variant_has_a_stock_vllm_to_be_compared_with() -> None:
    for name, variant in VARIANTS.items():
        stock = VARIANTS[variant.beside]
        assert stock.options is None, name
        assert stock.has_statistics == variant.has_statistics, name


@pytest.mark.long  # `test_unused_swapping` runs an engine of these benchmarks
@pytest.mark.slow
def test_the_engine_alone_is_measured(tmp_path: Path) -> None:
    argv = [
        "serving-cost", "--ways", "alone", "--only", "no swapping", "--seeds", "0",
        "--num-rounds", "1", "--output-len", "10", "--results", str(tmp_path),
    ]  # fmt: skip

    assert main(EXPERIMENTS, argv) == 0

    lines = (tmp_path / "serving-cost.md").read_text().splitlines()
    measured = [line for line in lines if line.startswith("| engine in one process")]
    assert len(measured) == len(CLIENTS) * 2
