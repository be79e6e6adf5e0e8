"""Up to 256 instances in virtual time: what a request costs beside the engines, by router."""

from __future__ import annotations

from dataclasses import replace

from cluster.cases import Case, file_of, mean_by, rows_of
from cluster.fast_error import error_of
from harness.markdown import markdown
from harness.setup import Outcome, Setup

ROUTERS = (
    "power-of-two", "shortest-queue", "least-ttft", "combined", "packing", "aladdin", "workload",
)  # fmt: skip
_INSTANCES = (4, 16, 64, 256)
#: Of each instance, as in the scene "equal" of `combined`, where vLLM is at its limit.
_RATE_PER_S, _REQUESTS = 10.0, 60
_REAL = 64
_ENGINES = ("stock:2048", "sola:8192")


def many(setup: Setup) -> Outcome:
    """Cost by the number of instances with the fast model, and 64 with the real schedulers."""
    numbers = _INSTANCES[: 2 if setup.is_quick else None]
    fast = [
        replace(_case(setup, number, router), seed=seed)
        for number in numbers
        for router in ROUTERS
        for seed in setup.seeds
    ]
    rows = rows_of(setup, fast, "fast engines")
    for row in rows:
        row["request_us"] = 1e6 * (row["cpu_s"] - row["engine_s"]) / row["num_requests"]
    cost = mean_by(rows, ("cluster", "router"), "request_us")
    attained = mean_by(rows, ("cluster", "router"))
    lines = []
    for number in numbers:
        keys = [(_cluster(number), router) for router in ROUTERS]
        cells = [f"{cost[key]:.0f} ({100 * attained[key]:.1f})" for key in keys]
        lines.append([str(number), f"{number * _RATE_PER_S:g}", *cells])
    head = ["instances", "req/s", *(f"{router}, us" for router in ROUTERS)]
    about = (
        f"Processor time of a request beside the engines' steps: router, books, reports; in "
        f"brackets attained, %. {_REQUESTS} requests for each instance. {error_of(setup)}"
    )
    parts = [f"{about}\n\n{markdown(head, lines, 0)}"]
    if not setup.is_quick:
        found = rows_of(setup, _both(setup), f"{_REAL} engines, fast and real")
        rows += found
        parts.append(_beside(found))
    return Outcome(rows, "\n\n".join(parts))


def _cluster(number: int) -> str:
    return f"{number}*llama-3-8b@a100:1"


def _case(setup: Setup, number: int, router: str) -> Case:
    return Case(
        _cluster(number), _ENGINES[0], router, file_of(setup, "azure-conv"), number * _RATE_PER_S,
        1.0, 0.06, num_requests=number * _REQUESTS,
    )  # fmt: skip


def _both(setup: Setup) -> list[Case]:
    """64 engines with the fast model and with the real schedulers, one seed."""
    return [
        replace(_case(setup, _REAL, "combined"), scheduler=engine, is_real=is_real)
        for engine in _ENGINES
        for is_real in (False, True)
    ]


def _beside(rows: list[dict[str, object]]) -> str:
    lines = [
        [
            str(row["scheduler"]),
            "real" if row["is_real"] else "fast",
            f"{100 * float(str(row['attainment'])):.1f}",
            f"{float(str(row['cpu_s'])):.1f}",
            f"{float(str(row['engine_s'])):.1f}",
        ]
        for row in rows
    ]
    head = ["engines", "model", "attained, %", "processor s", "of that engines"]
    about = (
        f"{_REAL} engines in one event loop, {_REAL * _REQUESTS:,} requests at "
        f"{_REAL * _RATE_PER_S:g}/s, combined placement, one seed; without building the engines."
    )
    return f"{about}\n\n{markdown(head, lines, 2)}"
