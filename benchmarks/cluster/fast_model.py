"""The fast engine model beside the real schedulers: its error, and how much faster it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cluster.cases import Case, file_of, rows_of
from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup

#: Where prompts are what takes time, where decodes are, clusters of unequal ones, three of the
#: clusters on which placement is compared (`aladdin.TESTBEDS`) at the middle rate, and a decode
#: pool.
_POINTS = (
    Case("1*llama-3-8b@a100:1", "", "shortest-queue", "azure-conv", 14.0, 1.0, 0.06),
    Case("1*llama-2-13b@a100-pcie:1", "", "shortest-queue", "sharegpt", 1.0, 0.6, 0.03),
    Case(
        "1*llama-3-8b@h100:1+1*llama-3-8b@v100:1", "", "least-ttft", "azure-conv", 25.0, 1.0, 0.06
    ),
    Case("4*llama-2-13b@a100-pcie:1", "", "combined", "sharegpt", 3.0, 0.6, 0.03),
    Case("2*llama-2-70b@a100-pcie:2", "", "shortest-queue", "sharegpt", 1.0, 1.6, 0.075),
    Case("4*llama-2-7b@v100:1", "", "combined", "sharegpt", 3.0, 0.8, 0.03),
    Case(
        "1*llama-3-8b@v100-nvlink:4+1*llama-3-8b@v100-nvlink:1", "", "workload", "sharegpt",
        4.0, 1.0, 0.06, seed=1,
    ),
    Case(
        "2*llama-2-13b@a100-pcie:2", "", "combined", "sharegpt", 4.0, 0.6, 0.03, is_decode=True,
        seed=1,
    ),
)  # fmt: skip
_SCHEDULERS = ("stock:512", "sola:8192")
_REQUESTS = 300


def error(setup: Setup) -> Outcome:
    """Attainment, latencies and processor time of both, point by point."""
    cases = [
        replace(
            point, scheduler=scheduler, dataset=file_of(setup, point.dataset), is_real=is_real,
            num_requests=_REQUESTS,
        )
        for point in (_POINTS[:1] if setup.is_quick else _POINTS)
        for scheduler in _SCHEDULERS
        for is_real in (True, False)
    ]  # fmt: skip
    rows = rows_of(setup, cases, "fast model")
    lines, misses = [], {scheduler: [] for scheduler in _SCHEDULERS}  # type: ignore[var-annotated]
    for real, fast in zip(rows[::2], rows[1::2], strict=False):
        misses[real["scheduler"]].append(100 * abs(fast["attainment"] - real["attainment"]))
        lines.append([
            real["cluster"], real["scheduler"], f"{real['rate_per_s']:g}",
            f"{100 * real['attainment']:.1f}", f"{100 * fast['attainment']:.1f}",
            _off(fast, real, "p99_ttft_s"), _off(fast, real, "p99_tpot_s"),
            f"{real['engine_s'] / fast['engine_s']:.0f}", f"{real['cpu_s'] / fast['cpu_s']:.0f}",
        ])  # fmt: skip
    head = [
        "cluster", "scheduler", "req/s", "attained, real, %", "fast, %", "P99 TTFT", "P99 TPOT",
        "engines, times faster", "whole run, times faster",
    ]  # fmt: skip
    about = "; ".join(
        f"{name}: mean error {np.mean(each):.1f} points, largest {np.max(each):.1f}"
        for name, each in misses.items()
    )
    about += (
        ". Speed is processor time of the engines' steps, and of the whole run with reports and "
        "routing, which are the same for both; without building engines"
    )
    return Outcome(rows, f"Attainment of the fast model, {about}.\n\n{markdown(head, lines, 2)}")


def _off(fast: Row, real: Row, name: str) -> str:
    """By how much a column is off; a decode pool has no first tokens."""
    return f"{100 * (fast[name] / real[name] - 1):+.0f} %" if real[name] else "-"
