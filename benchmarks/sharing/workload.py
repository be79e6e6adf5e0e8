"""Services and arrivals of SeaLLM's section 6.1: K-means request groups, bursty functions."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.cluster.vq import kmeans2

from sola_sched.cluster.sharing.services import Service
from sola_sched.simulator.sharing.cluster import Arrival
from sola_sched.simulator.sharing.hardware import Hardware

MODELS = ("opt-6.7b", "llama-2-7b", "llama-2-13b", "llama-2-70b")
SLO_SCALE = 5.0
#: Longest prompt and output; the paper's LongBench prompts have 13,187 tokens in the mean.
MOST_PROMPT, MOST_OUTPUT = 16_000, 1_024
#: Of the requests that are grouped, those of ShareGPT and with long contexts.
_NUM_CHAT, _NUM_LONG = 6_000, 1_500

# Shahrad et al., "Serverless in the Wild" (USENIX ATC 2020), section 3: 45 % of the applications
# are invoked once an hour or less, 81 % once a minute or less. The lognormal with these two
# quantiles gives the 18.6 % most popular ones 99.9 % of the invocations; the paper says 99.6 %.
_LOG_MEAN, _LOG_STD = 0.513, 4.08
#: 10^8 invocations a day, about the largest that the paper plots, per hour.
_LARGEST_PER_HOUR = 1e8 / 24
FUNCTIONS_PER_SERVICE = 250
#: Mixes of which 32 GPUs have more to do at 50 requests a second are drawn again: the paper's
#: SeaLLM attains 90 % at all rates, so its mix was not one of them.
LOADS = (0.6, 0.72)
_HIGHEST_RATE, _NUM_GPUS, _MOST_DRAWS, _BATCH = 50.0, 32, 1000, 32
#: What placements are made of.
PAST_S = 40.0
#: Windows of the trace, whose counts are per minute there; a run is shorter than a day.
_WINDOW_S = 20.0
WINDOW_STD = 0.5
#: Coefficient of variation of gaps within a window; AlpaServe fits gammas and tries 1 to 8.
BURST_CV = 3.0


@dataclass(frozen=True)
class Traffic:
    """What is asked of the services.

    Attributes:
        services: With their past.
        arrivals: Sorted; a run.
        past: The same services' arrivals before, of which placements are made.
    """

    services: Sequence[Service]
    arrivals: Sequence[Arrival]
    past: Sequence[Arrival]


def lengths(data: Path | None, seed: int = 0) -> np.ndarray:
    """Prompt and output tokens [n, 2] of ShareGPT and long contexts, or made-up ones like them.

    ShareGPT's first prompts and its outputs come from two files, so they are drawn apart.
    """
    rng = np.random.default_rng([seed, 7])
    if data is None:
        chat = _lognormal(rng, _NUM_CHAT, (40, 1.3), (330, 0.9))
        long = _lognormal(rng, _NUM_LONG, (8500, 0.5), (12, 1.3))
    else:
        first = [q["prompt_tokens"] for q in _lines(data / "sharegpt_prompts.jsonl.gz")]
        with gzip.open(data / "sharegpt_lengths_llama2.csv.gz", "rt") as file:
            outputs = [int(row["output_tokens"]) for row in csv.DictReader(file)]
        chat = np.stack([rng.choice(column, _NUM_CHAT) for column in (first, outputs)], axis=1)
        queries = _lines(data / "longctx_queries.jsonl.gz")
        rows = [(q["prompt_tokens"], max(1, q["reference_tokens"])) for q in queries]
        long = np.array(rows)[rng.choice(len(rows), _NUM_LONG, replace=False)]
    both = np.concatenate([chat, long]).astype(np.int64)
    clipped: np.ndarray = np.clip(both, 1, (MOST_PROMPT, MOST_OUTPUT))
    return clipped


def services(
    data: Path | None,
    num_services: int,
    rate: float,
    seed: int,
    slo_scale: float = SLO_SCALE,
    loads: tuple[float, float] = LOADS,
    num_functions: int = FUNCTIONS_PER_SERVICE,
) -> list[Service]:
    """K-means groups of requests, each with a model; rates by the popularity of functions."""
    rng = np.random.default_rng([seed, 11])
    pool = lengths(data, seed)
    logs = np.log(pool)
    _, group = kmeans2(logs / logs.std(axis=0), num_services, minit="++", rng=rng)
    shapes = []
    for number in range(num_services):
        own = [(int(a), int(b)) for a, b in pool[group == number]]
        shapes.append(own or [(int(pool[number][0]), int(pool[number][1]))])  # an empty group
    for _ in range(_MOST_DRAWS):
        models = [MODELS[i % len(MODELS)] for i in range(num_services)]
        rng.shuffle(models)
        shares = popularity(num_services, rng, num_functions)
        work_s = [
            share * gpu_seconds(model, own)
            for share, model, own in zip(shares, models, shapes, strict=True)
        ]
        load = sum(work_s) * _HIGHEST_RATE / _NUM_GPUS
        if loads[0] <= load <= loads[1]:
            break
    return [
        Service(f"s{i:02d}", models[i], float(rate * shares[i]), shapes[i], slo_scale=slo_scale)
        for i in range(num_services)
    ]


def gpu_seconds(model: str, own: Sequence[tuple[int, int]]) -> float:
    """GPU time of a mean request, on the fewest GPUs, beside 31 others that decode."""
    prompt, output = np.mean(own, axis=0)
    degree = 2 if model == "llama-2-70b" else 1
    steps = Hardware().steps(model, degree)
    constant_s, per_ctx_s = steps.decode_line(_BATCH)
    prefill_s = steps.step_s(0, 0, prompt, prompt * prompt, 0.0)
    return float(degree * (prefill_s + output * (constant_s / _BATCH + per_ctx_s * prompt)))


def popularity(
    num_services: int, rng: np.random.Generator, num_functions: int = FUNCTIONS_PER_SERVICE
) -> np.ndarray:
    """Share of the requests of each service: functions are dealt out to services in turn."""
    logs = rng.normal(_LOG_MEAN, _LOG_STD, (num_functions, num_services))
    totals = np.minimum(np.exp(logs), _LARGEST_PER_HOUR).sum(axis=0)
    shares: np.ndarray = totals / totals.sum()
    return shares


def arrivals(
    services: Sequence[Service],
    duration_s: float,
    seed: int,
    burst_cv: float = BURST_CV,
    window_std: float = WINDOW_STD,
) -> list[Arrival]:
    """Requests of all services: rates change from window to window, gaps are gamma within one."""
    rng = np.random.default_rng([seed, 13])
    made: list[Arrival] = []
    for service in services:
        num_windows = math.ceil(duration_s / _WINDOW_S)
        factors = np.exp(rng.normal(0.0, window_std, num_windows))
        factors /= factors.mean()
        times = _gamma_times(rng, service.rate * factors, duration_s, burst_cv)
        picks = rng.integers(len(service.lengths), size=len(times))
        for at_s, pick in zip(times, picks, strict=True):
            made.append((at_s, service.name, *service.lengths[pick]))
    return sorted(made)


def traffic(
    data: Path | None,
    num_services: int,
    rate: float,
    duration_s: float,
    seed: int,
    slo_scale: float = SLO_SCALE,
) -> Traffic:
    """Services, a run, and what came in `PAST_S` before it at the same mean rates."""
    made = services(data, num_services, rate, seed, slo_scale)
    return Traffic(made, arrivals(made, duration_s, 2 * seed + 1), arrivals(made, PAST_S, 2 * seed))


def skewed(run: Sequence[Arrival], consecutive: int) -> list[Arrival]:
    """The same requests at the same times, so many of one service in a row (Fig. 12)."""
    if consecutive <= 1:
        return list(run)
    times = [at_s for at_s, *_ in run]
    lines: dict[str, list[Arrival]] = {}
    ordered: list[Arrival] = []
    for request in run:
        line = lines.setdefault(request[1], [])
        line.append(request)
        if len(line) == consecutive:
            ordered += line
            line.clear()
    for line in lines.values():
        ordered += line
    return [(at_s, *request[1:]) for at_s, request in zip(times, ordered, strict=True)]


def blurred(run: Sequence[Arrival], factor: float, seed: int) -> list[Arrival]:
    """Outputs that differ from the profiled ones by a Gaussian of `factor` x output (Fig. 13)."""
    rng = np.random.default_rng([seed, 17])
    made = []
    for at_s, name, prompt, output in run:
        other = output + factor * output * rng.standard_normal()
        made.append((at_s, name, prompt, int(np.clip(round(other), 1, MOST_OUTPUT))))
    return made


def with_scale(services: Sequence[Service], slo_scale: float) -> list[Service]:
    """The same services with other targets."""
    return [replace(service, slo_scale=slo_scale) for service in services]


def _gamma_times(
    rng: np.random.Generator, rates: np.ndarray, duration_s: float, cv: float
) -> list[float]:
    """Arrivals whose gaps, in units of the mean gap at their time, are gamma."""
    edges = np.arange(len(rates) + 1) * _WINDOW_S
    expected = np.concatenate([[0.0], np.cumsum(rates * _WINDOW_S)])
    shape = 1.0 / cv**2
    num = int(expected[-1] * 1.5 + 10 * cv * math.sqrt(expected[-1] + 1) + 20)
    points = np.cumsum(rng.gamma(shape, 1.0 / shape, num)) - rng.random()
    times = np.interp(points[points > 0], expected, edges, right=np.inf)
    return [float(t) for t in times if t < duration_s]


def _lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _lognormal(
    rng: np.random.Generator, n: int, prompt: tuple[float, float], output: tuple[float, float]
) -> np.ndarray:
    columns = [median * np.exp(rng.normal(0.0, std, n)) for median, std in (prompt, output)]
    return np.stack(columns, axis=1).round()
