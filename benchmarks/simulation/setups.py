"""What the experiments share: data sets, targets, rates, and how rows are made."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from harness import sweep
from harness.points import BOUND, SYNTHETIC, Point, make_workload
from harness.resumable import Row
from harness.setup import Setup
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.base import parse_scheduler
from sola_sched.bench.calibrate import SLO_FACTOR, measure_slo
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.simulator.steps.time import StepCounts

DATASETS = {
    "sharegpt": "sharegpt_lengths_llama2.csv.gz",
    "azure-conv": "azure_conv_2023.csv.gz",
    "azure-code": "azure_code_2023.csv.gz",
    "arxiv": "arxiv_summarization_lengths_llama2.csv.gz",
    "mooncake": "mooncake_conversation.jsonl.gz",
    "sharegpt-prompts": "sharegpt_prompts.jsonl.gz",
    "synthetic": SYNTHETIC,
}
"""File of the data folder by name."""
NAMES = {file: name for name, file in DATASETS.items()}

#: Stock vLLM, whose best counts.
STOCK = ("stock:512", "stock:1024", "stock:2048", "stock:8192")
#: The settings with which load 1 is found. A fourth would move the rates of every table.
LOAD_ONE = ("stock:512", "stock:2048", "stock:8192")
PAPER = "sola:policy=paper"
#: Two other rules, at the chunk size that is best for them past saturation (`rivals`).
REJECT, SPF = "reject:512", "spf:512"
ORACLE = "sola:sim.predictor=oracle"
LEVEL = 0.9
_SEARCH_STEP = 1.25
_NUM_BISECTIONS = 2
_NUM_LEVEL_BISECTIONS = 2
_MAX_STEPS = 20


def datasets(setup: Setup, names: Sequence[str]) -> list[str]:
    """Files of the data sets, or the synthetic one where there is no data folder."""
    if setup.data is None:
        return [SYNTHETIC]
    return [DATASETS[name] for name in (names[:1] if setup.is_quick else names)]


def grid(base: Point, **choices: Sequence[object]) -> list[Point]:
    """The points with every combination of the given values, the last name fastest."""
    return [
        replace(base, **dict(zip(choices, values, strict=True)))  # type: ignore[arg-type]
        for values in itertools.product(*choices.values())
    ]


@lru_cache(maxsize=64)
def single_request_slo(
    profile: str, dataset: str, factor: float, data: Path | None, outputs_from: str = ""
) -> SloTarget:
    """Both targets at `factor` times the latency of a request that has the engine to itself."""
    environment.prepare(None, is_random=True)
    backend = sweep.make_backend(profile)
    point = Point(profile, dataset, 1.0, 1.0, 1.0, "stock", outputs_from=outputs_from)
    workload = make_workload(point, backend.limits, data)
    slo = measure_slo(backend, workload, parse_scheduler("stock")).target
    ratio = factor / SLO_FACTOR
    return SloTarget(_digits(ratio * slo.ttft_s, 3), _digits(ratio * slo.tpot_s, 3))


def at_stock_rate(setup: Setup, base: Point, schedulers: Sequence[str] = LOAD_ONE) -> Point:
    """The point at the rate at which stock vLLM, at the best of the settings, attains `LEVEL`.

    From a guess, the rate is multiplied by a step until the level is passed, then bisected. The
    runs are rows like all others, with seed 0. Three digits are kept.
    """
    base = replace(base, num_requests=setup.num_requests)
    base = replace(base, rate_per_s=_digits(_guessed_rate(base, setup.data), 3))
    return replace(base, rate_per_s=_stock_rate(setup, base, schedulers))


def multiples(rate_per_s: float, shares: Sequence[float]) -> list[float]:
    """Multiples of a rate, to three digits."""
    return [_digits(share * rate_per_s, 3) for share in shares]


def rate_at(
    setup: Setup, base: Point, schedulers: Sequence[str], level: float, rates: Sequence[float]
) -> tuple[float, list[Row]]:
    """The rate at which the best of the schedulers attains `level` on average over the seeds.

    Bracketed by `rates`, then bisected; linear in the last bracket.

    Args:
        setup: How the runs are made.
        base: What is run.
        schedulers: As in `Point`; at each rate the best of them counts.
        level: In (0, 1).
        rates: Ascending.

    Returns:
        The rate, requests per second, 0 or inf where it lies outside `rates`; the rows.
    """
    rows: list[Row] = []
    at: dict[float, float] = {}

    def is_attained(rate: float) -> bool:
        if rate not in at:
            points = grid(base, rate_per_s=(rate,), seed=setup.seeds, scheduler=schedulers)
            title = f"{NAMES[base.dataset]}, {schedulers[0]} at {rate:g}/s"
            found = setup.rows(points, title)
            rows.extend(found)
            at[rate] = max(
                float(np.mean([row["attainment"] for row in found if row["scheduler"] == name]))
                for name in schedulers
            )
        return at[rate] >= level

    place = bisect.bisect_left(rates, True, key=lambda rate: not is_attained(rate))
    if place == 0:
        return 0.0, rows
    if place == len(rates):
        return math.inf, rows
    low, high = rates[place - 1], rates[place]
    for _ in range(1 if setup.is_quick else _NUM_LEVEL_BISECTIONS):
        middle = _digits((low + high) / 2, 3)
        low, high = (middle, high) if is_attained(middle) else (low, middle)
    share = (at[low] - level) / max(at[low] - at[high], 1e-9)
    return low + min(1.0, share) * (high - low), rows


def _stock_rate(setup: Setup, base: Point, schedulers: Sequence[str]) -> float:
    order = list(schedulers)

    def is_attained(rate: float) -> bool:
        # The setting that did it last is tried first: one that attains the level is enough.
        for scheduler in tuple(order):
            point = replace(base, rate_per_s=rate, scheduler=scheduler)
            title = f"{NAMES[base.dataset]}, {scheduler} at {rate:g}/s"
            row = setup.rows([point], title)[0]
            if row["attainment"] >= LEVEL:
                order.sort(key=lambda name: name != scheduler)
                return True
        return False

    what = f"{LEVEL:.0%} of {NAMES[base.dataset]}"
    return bracketed_rate(is_attained, base.rate_per_s, what)


def bracketed_rate(is_attained: Callable[[float], bool], first: float, what: str) -> float:
    """The largest rate found at which something is attained, three digits.

    From `first` on, the rate is multiplied by a step until the answer changes, then bisected.

    Raises:
        RuntimeError: It is attained at all rates or at none; `what` is said in the message.
    """
    low = high = first
    rises = is_attained(low)
    for _ in range(_MAX_STEPS):
        if rises and is_attained(high):
            low, high = high, _digits(high * _SEARCH_STEP, 3)
        elif not rises and not is_attained(low):
            low, high = _digits(low / _SEARCH_STEP, 3), low
        else:
            break
    else:
        raise RuntimeError(
            f"stock vLLM must attain {what} at some rate near {first:.3g}/s (got none down or up "
            f"to {low:g}/s); change the targets."
        )
    for _ in range(_NUM_BISECTIONS):
        middle = _digits((low * high) ** 0.5, 3)
        low, high = (middle, high) if is_attained(middle) else (low, middle)
    return low


def mean(rows: Sequence[Row], column: str) -> float:
    """Mean over rows, e.g. of several seeds."""
    return sum(row[column] for row in rows) / len(rows)


def crossing(rows: Sequence[Row], level: float, column: str = "attainment") -> float:
    """Rate at which the mean over seeds falls through `level`; see `metrics.crossing_rate`."""
    by_rate: dict[float, list[Row]] = {}
    for row in rows:
        by_rate.setdefault(row["rate_per_s"], []).append(row)
    return metrics.crossing_rate(
        list(by_rate), [mean(group, column) for group in by_rate.values()], level
    )


def with_bound(points: Sequence[Point]) -> list[Point]:
    """The points and the bound of each of their workloads."""
    bounds = dict.fromkeys(replace(point, scheduler=BOUND) for point in points)
    return [*points, *bounds]


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _guessed_rate(base: Point, data: Path | None) -> float:
    """Where a search for a rate may begin: the work of a mean request in a batch of 64."""
    environment.prepare(None, is_random=True)
    backend = sweep.make_backend(base.profile)
    point = replace(base, rate_per_s=1.0, num_requests=1000)
    requests = make_workload(point, backend.limits, data).requests
    prompt = sum(len(r.prompt_token_ids) for r in requests) / len(requests)
    output = sum(r.output_tokens for r in requests) / len(requests)
    seconds = backend.options.profile.step_time.seconds
    chunks = [seconds(StepCounts(0, 0, 1, tokens)) for tokens in (2048, 4096)]
    token_s = (chunks[1] - chunks[0]) / 2048
    decode_s = seconds(StepCounts(64, 64 * round(prompt))) / 64
    return 0.8 / (prompt * token_s + output * decode_s)
