"""One run of the latency experiments, and what is measured of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np

from alise.setups import Run, make_workload, scheduler_of
from harness.resumable import Row


def run_one(run: Run, data: Path | None) -> Row:
    """One run, in this process."""
    from harness import sweep
    from sola_sched.bench.backends import environment
    from sola_sched.bench.backends.base import parse_scheduler
    from sola_sched.bench.calibrate import measure_slo
    from sola_sched.core import metrics

    environment.prepare(None, is_random=True)
    backend = sweep.make_backend(run.profile)
    workload = make_workload(run, backend.limits, data)
    slo = measure_slo(backend, workload, parse_scheduler("stock")).target
    outcome = backend.run(workload, parse_scheduler(scheduler_of(run)), slo)
    done = [record for record in outcome.records if record.completed]
    latency_s = np.array([record.latency_s for record in done])
    ttft = metrics.describe((record.ttft_s for record in done), (50.0, 99.0))
    assert outcome.scheduler is not None
    row = {
        "normalized_latency_s": metrics.mean_normalized_latency_s(outcome.records),
        "mean_latency_s": float(latency_s.mean()),
        "p50_latency_s": float(np.percentile(latency_s, 50)),
        "p99_latency_s": float(np.percentile(latency_s, 99)),
        "worst_latency_s": float(latency_s.max()),
        "mean_ttft_s": ttft["mean"],
        "worst_ttft_s": max(record.ttft_s for record in done),
        "attainment": metrics.attainment_ratio(metrics.attained(outcome.records, slo)),
        "num_completed": len(done),
        "tokens_per_s": sum(r.num_output_tokens for r in done) / outcome.duration_s,
        "mean_running": outcome.scheduler.mean_num_running,
        "num_preemptions": outcome.scheduler.num_preemptions,
        "duration_s": outcome.duration_s,
        "cpu_us_per_step": 1e6 * outcome.scheduler.cpu_s / max(1, outcome.scheduler.num_steps),
    }
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
    return {**asdict(run), **rounded}
