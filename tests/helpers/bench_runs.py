"""Builders for benchmark runs that need no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sola_sched.bench.backends.base import (
    OnDone,
    RunOutcome,
    SchedulerSpec,
    SchedulerStats,
    parse_scheduler,
)
from sola_sched.bench.report.results import Result, RunInfo, SloSource, make_result
from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import RequestRecord
from sola_sched.workloads.workload import RequestSpec, Workload

SLO = SloTarget(ttft_s=0.5, tpot_s=0.1)
INFO = RunInfo(
    backend="engine",
    model_id="org/model",
    tokenizer_id="org/model",
    dataset_name="random",
    seed=0,
    slo=SloSource(SLO, "given with --slo"),
)


def make_workload(num_requests: int = 4, rate: float = 2.0, output_tokens: int = 3) -> Workload:
    requests = tuple(
        RequestSpec(str(i), tuple(range(3, 13)), output_tokens) for i in range(num_requests)
    )
    return Workload(requests).at_rate(rate)


def make_records(workload: Workload, ttfts_s: Sequence[float]) -> list[RequestRecord]:
    """One record per request with this TTFT and 50 ms per further token; NaN never answers."""
    records = []
    for request, ttft_s in zip(workload.requests, ttfts_s, strict=True):
        record = RequestRecord(request.req_id, request.arrival_s, len(request.prompt_token_ids))
        record.sent_s = request.arrival_s
        if ttft_s == ttft_s:
            first_s = request.arrival_s + ttft_s
            record.token_times_s = [first_s + 0.05 * i for i in range(request.output_tokens)]
            record.completed = True
        else:
            record.error = "lost"
        records.append(record)
    return records


def run_result(
    scheduler: str = "stock:512",
    rate: float = 2.0,
    ttfts_s: Sequence[float] = (0.1, 0.2, 0.9, float("nan")),
    info: RunInfo = INFO,
) -> Result:
    workload = make_workload(len(ttfts_s), rate)
    stats = SchedulerStats(2, 0.003, [0.001, 0.002], 1, 4, 2.5)
    outcome = RunOutcome(make_records(workload, ttfts_s), duration_s=10.0, scheduler=stats)
    return make_result(info, workload, parse_scheduler(scheduler), outcome)


class FixedBackend:
    """Serves every request in the same time, whatever the rate: a machine without limits."""

    name = "fixed"
    model_id = "fixed-model"
    tokenizer_id = "fixed-model"

    def __init__(self, ttft_s: float = 0.02, tpot_s: float = 0.005) -> None:
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
        self.calls: list[tuple[str, Workload, int | None]] = []

    def run(
        self,
        workload: Workload,
        scheduler: SchedulerSpec,
        slo: SloTarget,
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        self.calls.append((scheduler.label, workload, max_concurrency))
        free_s = [0.0] * (max_concurrency or len(workload.requests))
        records = []
        for request in workload.requests:
            record = RequestRecord(request.req_id, request.arrival_s, len(request.prompt_token_ids))
            slot = free_s.index(min(free_s))
            record.sent_s = max(request.arrival_s, free_s[slot])
            record.token_times_s = [
                record.sent_s + self.ttft_s + self.tpot_s * i for i in range(request.output_tokens)
            ]
            record.completed = True
            free_s[slot] = record.token_times_s[-1]
            records.append(record)
            if on_done is not None:
                on_done(record)
        return RunOutcome(records, duration_s=max(free_s))


def with_percentiles(info: RunInfo, *percentiles: float) -> RunInfo:
    return replace(info, percentiles=percentiles)
