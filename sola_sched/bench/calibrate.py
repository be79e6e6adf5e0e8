"""Finds targets and request rates that fit the machine, from two short runs of stock vLLM."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from sola_sched.bench.backends.base import Backend, OnDone, RunOutcome, SchedulerSpec
from sola_sched.bench.report.results import SloSource
from sola_sched.config.slo import SloTarget
from sola_sched.core import metrics
from sola_sched.errors import ConfigError
from sola_sched.workloads.workload import Workload

#: Targets are this many times the latency of a request that has the machine to itself.
SLO_FACTOR = 10.0
#: Rates of a run without ``--request-rate``, as shares of the measured saturation rate.
RATE_SHARES = (0.8, 1.0, 1.2)
#: The same where those would leave a run fewer than so many requests: no queue builds up.
FEW_RATE_SHARES = (1.2,)
_FEW_REQUESTS = 50

_NUM_SINGLE = 12
_SINGLE_OUTPUT_TOKENS = 32
_NUM_PROBE = 80
#: Requests per second assumed to be served of those sent all at once.
_BURST_RATE = 20.0
_PROBE_CONCURRENCY = 32


def measure_slo(
    backend: Backend, workload: Workload, scheduler: SchedulerSpec, on_done: OnDone | None = None
) -> SloSource:
    """Set both targets to ``SLO_FACTOR`` times the single-request latency on this machine.

    Serves a few requests one after another, spread over the prompt lengths of the workload.
    On a CPU shared with other work, the time the engine did not get is left out.

    Raises:
        ConfigError: None of them completed.
    """
    by_length = sorted(workload.requests, key=lambda request: len(request.prompt_token_ids))
    ranks = (np.arange(_NUM_SINGLE) + 0.5) / _NUM_SINGLE * len(by_length)
    chosen = [
        replace(
            by_length[int(rank)],
            req_id=f"single-{index}",
            arrival_s=0.0,
            output_tokens=max(2, min(_SINGLE_OUTPUT_TOKENS, by_length[int(rank)].output_tokens)),
        )
        for index, rank in enumerate(ranks)
    ]
    outcome = backend.run(
        replace(workload, requests=tuple(chosen)),
        scheduler,
        SloTarget(),
        max_concurrency=1,
        on_done=on_done,
    )
    done = [record for record in outcome.records if record.completed]
    _require_all(outcome, "single-request latency")
    share = _undisturbed_share(outcome)
    ttft_s = share * float(
        np.mean([metrics.ttft_s(r.sent_s or 0.0, r.token_times_s[0]) for r in done])
    )
    tpot_s = share * float(np.median([record.tpot_s for record in done]))
    return SloSource(
        SloTarget(ttft_s=SLO_FACTOR * ttft_s, tpot_s=SLO_FACTOR * tpot_s),
        f"{SLO_FACTOR:g} x the single-request latency measured here "
        f"({ttft_s * 1e3:.1f} ms to the first token, {tpot_s * 1e3:.2f} ms per token)",
    )


def measure_saturation(
    backend: Backend,
    workload: Workload,
    scheduler: SchedulerSpec,
    on_done: OnDone | None = None,
    *,
    num_requests: int = _NUM_PROBE,
    concurrency: int = _PROBE_CONCURRENCY,
) -> float:
    """Requests per second served while a fixed number of requests is kept in flight.

    Counts up to the time the last request is admitted, so that the emptying batch at
    the end does not count; those then in flight are half done on average. On a CPU shared with
    other work, the time the engine did not get is left out.
    """
    requests = workload.requests[:num_requests]
    concurrency = min(concurrency, max(1, len(requests) // 2))
    burst = replace(
        workload,
        requests=tuple(
            replace(request, req_id=f"probe-{request.req_id}", arrival_s=0.0)
            for request in requests
        ),
    )
    outcome = backend.run(
        burst, scheduler, SloTarget(), max_concurrency=concurrency, on_done=on_done
    )
    _require_all(outcome, "saturation rate")
    last_admitted_s = max(record.sent_s or 0.0 for record in outcome.records)
    if last_admitted_s <= 0:
        return len(requests) / outcome.duration_s
    return (len(requests) - concurrency / 2) / last_admitted_s / _undisturbed_share(outcome)


def saturation_text(
    saturation_per_s: float,
    num_available: int,
    *,
    num_requests: int = _NUM_PROBE,
    concurrency: int = _PROBE_CONCURRENCY,
) -> str:
    """What `measure_saturation` found with so many requests, which may be too few to find it.

    With fewer than it asks for, fewer are in flight, and what they were served at is the rate of
    a machine that is not full.
    """
    if num_available >= num_requests:
        return f"Saturation near {saturation_per_s:.2g} requests/s"
    return (
        f"{num_available} requests are too few to find the saturation rate (it takes "
        f"{num_requests}, {concurrency} of them in flight): the rates are guesses, and runs this "
        "short show no queue. Raise --num-prompts, or give --request-rate"
    )


def choose_rates(
    saturation_per_s: float, num_schedulers: int = 1, budget_s: float = math.inf
) -> list[float]:
    """Request rates around saturation, rounded to two significant digits.

    Args:
        saturation_per_s: Requests per second that the machine serves.
        num_schedulers: How many are run at each rate.
        budget_s: Seconds of traffic in all runs together.
    """
    num_requests = budget_s * saturation_per_s / (num_schedulers * len(RATE_SHARES))
    shares = FEW_RATE_SHARES if num_requests < _FEW_REQUESTS else RATE_SHARES
    return [_two_digits(share * saturation_per_s) for share in shares]


def choose_num_prompts(
    rates_per_s: list[float], num_schedulers: int, budget_s: float, available: int
) -> int:
    """Requests a run so that all runs together take about ``budget_s`` seconds.

    A rate of ``inf`` is counted as ``_BURST_RATE``.
    """
    finite = [min(rate, _BURST_RATE) for rate in rates_per_s]
    seconds_per_request = num_schedulers * sum(1.0 / rate for rate in finite)
    return max(20, min(available, round(budget_s / seconds_per_request)))


def _undisturbed_share(outcome: RunOutcome) -> float:
    if outcome.clock != "wall" or outcome.cpu_share is None:
        return 1.0
    return min(1.0, outcome.cpu_share)


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}") if value > 0 and math.isfinite(value) else value


def _require_all(outcome: RunOutcome, what: str) -> None:
    if outcome.interrupted or outcome.ends_all:
        raise KeyboardInterrupt
    failed = [record for record in outcome.records if not record.completed]
    if failed:
        raise ConfigError(
            f"Measuring the {what} needs every request to complete (got {len(failed)} failed of "
            f"{len(outcome.records)}; the first: {failed[0].error}); "
            "check the model, or set --slo and --request-rate."
        )
