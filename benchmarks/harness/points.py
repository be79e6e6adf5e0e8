"""Points of a sweep and the workloads they stand for: lengths of a file, arrivals of a process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError, DatasetError
from sola_sched.workloads import lengths
from sola_sched.workloads.datasets import ModelLimits
from sola_sched.workloads.rows import read_rows
from sola_sched.workloads.workload import RequestSpec, Workload, arrival_times, random_token_ids

#: The upper bound takes a scheduler's place in a point.
BOUND = "bound"
#: So does what is attained with knowledge of the future.
HINDSIGHT = "hindsight"
#: Needs no data: lengths drawn from the fit of `sola_sched.workloads.lengths`.
SYNTHETIC = "sharegpt-like"
_SYNTHETIC_ROWS = 4000


@dataclass(frozen=True)
class Point:
    """Everything that decides a run.

    Attributes:
        profile: Of `sola_sched.simulator.steps.profile`.
        dataset: File name in the data folder, whose rows give lengths and recorded arrivals, or
            ``SYNTHETIC``.
        rate_per_s: Mean arrivals per second; the realised rate is exactly this.
        ttft_s, tpot_s: Targets of every request.
        scheduler: As on the command line of `sola_sched.bench`, or ``BOUND`` or ``HINDSIGHT``.
        arrivals: ``poisson``, ``gamma:SHAPE`` (less than 1 is bursty), ``mmpp:RATIO:DWELL_S``
            (two Poisson states whose rates differ by RATIO and that last DWELL_S on average), or
            ``recorded`` (those of the file, stretched to the rate; seed n takes the n-th run of
            `num_requests` rows).
        num_requests: Rows drawn, without repetition where there are enough.
        seed: Of rows, arrivals and prompt tokens.
        dataset_after: The second half of the requests has lengths from this file; empty for one
            file throughout.
        outputs_from: File whose output lengths replace those of `dataset`, drawn on their own;
            empty to keep the pairs.
        scheduling_time: As in `SimOptions`; what the scheduler's own calls take of the time.
    """

    profile: str
    dataset: str
    rate_per_s: float
    ttft_s: float
    tpot_s: float
    scheduler: str
    arrivals: str = "poisson"
    num_requests: int = 1000
    seed: int = 0
    dataset_after: str = ""
    outputs_from: str = ""
    scheduling_time: str = "none"

    @property
    def slo(self) -> SloTarget:
        """Targets of every request."""
        return SloTarget(ttft_s=self.ttft_s, tpot_s=self.tpot_s)


def make_workload(point: Point, limits: ModelLimits, data: Path | None = None) -> Workload:
    """The requests of a point, the same for every scheduler.

    A request's name is its index and its output length: only the length models that
    `benchmarks/simulation` puts into a scheduler for comparison read the latter.
    """
    rng = np.random.default_rng([point.seed, 6])
    table = read_lengths(point.dataset, limits.max_model_len, data)
    size, is_recorded = point.num_requests, point.arrivals == "recorded"
    if is_recorded:
        start = point.seed * size
        if start + size > len(table.prompt) or not np.isfinite(table.arrival_s).all():
            raise ConfigError(
                f"'recorded' arrivals need {start + size} rows with times for seed {point.seed} "
                f"(got {len(table.prompt)} in {point.dataset}); use fewer requests or poisson."
            )
        chosen = np.argsort(table.arrival_s, kind="stable")[start : start + size]
    else:
        chosen = _draw(rng, len(table.prompt), size)
    prompt, output = table.prompt[chosen], table.output[chosen]
    if point.outputs_from:
        other = read_lengths(point.outputs_from, limits.max_model_len, data)
        output = other.output[_draw(rng, len(other.output), size)]
    if point.dataset_after:
        other = read_lengths(point.dataset_after, limits.max_model_len, data)
        late = _draw(rng, len(other.prompt), size)[size // 2 :]
        prompt = np.concatenate([prompt[: size // 2], other.prompt[late]])
        output = np.concatenate([output[: size // 2], other.output[late]])
    output = np.clip(output, 1, limits.max_model_len - 1)
    prompt = np.minimum(prompt, limits.max_model_len - output)
    times_s = (
        _stretched(table.arrival_s[chosen], point.rate_per_s)
        if is_recorded
        else _made_arrivals(point)
    )
    requests = tuple(
        RequestSpec(f"{i}:{o}", random_token_ids(rng, p, limits.vocab_size), o, t)
        for i, (p, o, t) in enumerate(
            zip(prompt.tolist(), output.tolist(), times_s.tolist(), strict=True)
        )
    )
    return Workload(requests, request_rate=point.rate_per_s)


@dataclass(frozen=True)
class Lengths:
    """Lengths of a data set, scaled to a context, in the order of the file.

    Attributes:
        prompt, output: Tokens, >= 1.
        arrival_s: Recorded arrivals; NaN where there are none.
        scale: Factor that all lengths were multiplied by.
    """

    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    scale: float = 1.0


@functools.lru_cache(maxsize=16)
def read_lengths(dataset: str, max_model_len: int, data: Path | None = None) -> Lengths:
    """Lengths of a data set, all scaled by context / 99th percentile of the totals, never up.

    Raises:
        DatasetError: There is no such file, or a row has no lengths.
    """
    if dataset == SYNTHETIC:
        rngs = [np.random.default_rng([i, 7]) for i in range(2)]
        prompt = lengths.SHAREGPT_PROMPT.sample(rngs[0], _SYNTHETIC_ROWS)
        output = lengths.SHAREGPT_OUTPUT.sample(rngs[1], _SYNTHETIC_ROWS)
        arrival_s = np.full(len(prompt), np.nan)
    else:
        if data is None:
            raise DatasetError(
                f"{dataset!r} needs the folder it is in (got none); pass --data DIR, or use "
                f"{SYNTHETIC!r}."
            )
        rows = [row for row in read_rows(data / dataset) if row.is_usable]
        if not rows or any(row.prompt_tokens is None for row in rows):
            raise DatasetError(f"{dataset} must have rows, all with token counts.")
        prompt = np.array([row.prompt_tokens for row in rows], dtype=np.float64)
        output = np.array([row.output_tokens or 1 for row in rows], dtype=np.float64)
        arrival_s = np.array(
            [np.nan if row.arrival_s is None else row.arrival_s for row in rows], dtype=np.float64
        )
    scale = min(1.0, max_model_len / float(np.percentile(prompt + output, 99)))
    return Lengths(
        np.maximum(1, np.rint(prompt * scale)).astype(np.int64),
        np.maximum(1, np.rint(output * scale)).astype(np.int64),
        arrival_s,
        scale,
    )


def _draw(rng: np.random.Generator, num_rows: int, size: int) -> NDArray[np.int64]:
    return np.resize(rng.permutation(num_rows), size)


def _made_arrivals(point: Point) -> NDArray[np.float64]:
    kind, *rest = point.arrivals.split(":")
    size, rate = point.num_requests, point.rate_per_s
    try:
        values = [float(text) for text in rest]
    except ValueError:
        values = []
    if (kind, len(values)) == ("poisson", 0) and not rest:
        return arrival_times(size, rate, seed=point.seed)
    if (kind, len(values)) == ("gamma", 1):
        return arrival_times(size, rate, values[0], seed=point.seed)
    if (kind, len(values)) == ("mmpp", 2) and min(values) > 0:
        return _modulated(size, rate, values[0], values[1], point.seed)
    raise ConfigError(
        "'arrivals' must be poisson, gamma:SHAPE, mmpp:RATIO:DWELL_S or recorded "
        f"(got {point.arrivals!r})."
    )


def _modulated(
    size: int, rate: float, ratio: float, dwell_s: float, seed: int
) -> NDArray[np.float64]:
    """A Poisson process whose rate switches between two values after exponential times."""
    rng = np.random.default_rng([seed, 8])
    low = 2.0 * rate / (1.0 + ratio)
    times: list[float] = []
    start_s, is_high = 0.0, bool(rng.integers(2))
    while len(times) < size:
        end_s = start_s + rng.exponential(dwell_s)
        state_rate = low * ratio if is_high else low
        count = rng.poisson(state_rate * (end_s - start_s))
        times += np.sort(rng.uniform(start_s, end_s, count)).tolist()
        start_s, is_high = end_s, not is_high
    return _stretched(np.array(times[:size]), rate)


def _stretched(times_s: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
    """Times from the first on, with the last at n / rate."""
    times_s = times_s - times_s[0]
    return times_s * (len(times_s) / rate / max(times_s[-1], 1e-9))
